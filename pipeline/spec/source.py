"""The source of a model, its shapes, and types of single values in a spec."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from enginesmith.core.errors import EnginesmithError, UnknownNameError
from enginesmith.core.hardware import machine
from enginesmith.core.names import check_channel, check_graph_name, check_model, check_version, inside, is_path
from enginesmith.core.state import Places
from enginesmith.core.text import join_first
from enginesmith.core.types import PLUS, Dim, Scalar
from pipeline.sources.hub import HubFile

# Sizes must be smaller, to fit into int32.
LARGEST_SIZE = 1 << 31
# The greatest number of characters and levels of a value that a message quotes.
_LONGEST_SHOWN = 80
_DEEPEST_SHOWN = 4

# Path of a key in a file: names of keys, and indices in lists.
Loc = tuple[int | str, ...]


class Mistakes(ValueError):  # noqa: N818 - several of them
    """Mistakes between several keys of a part: (path of a key below the part, message) for each mistake."""

    def __init__(self, mistakes: Iterable[tuple[Loc, str]]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(text for _, text in self.mistakes))


def format_value(value: object) -> str:
    """A value as YAML writes it, cut after 80 characters."""
    text = _yaml(value, _DEEPEST_SHOWN)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _yaml(value: object, depth: int) -> str:
    if isinstance(value, (dict, list, tuple)) and value and not depth:
        return "..."
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item, depth - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(item, depth - 1) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str | int | float | bytes) else str(value)


def as_value_error(check: Callable[..., object], *values: object) -> None:
    """Call `check(*values)`; an EnginesmithError becomes a ValueError, which pydantic collects."""
    try:
        check(*values)
    except EnginesmithError as error:
        raise ValueError(str(error)) from error


def _validator(check: Callable[[str], object]) -> AfterValidator:
    def validate(text: str) -> str:
        as_value_error(check, text)
        return text

    return AfterValidator(validate)


def _check_unit_pattern(text: str) -> None:
    words = text.split()
    if not 1 <= len(words) <= 3:
        raise UnknownNameError("is not 'TARGET [PRECISION [BACKEND]]'")
    machine.parse_targets(words[0])


def _check_dim_name(text: str) -> None:
    if not text.isidentifier():
        raise ValueError("must be a name made of letters, digits and '_', not starting with a digit")


def _check_axis(value: object) -> object:
    if isinstance(value, str) and "+" in value:
        return _check_sum(value)
    is_valid = value.isidentifier() if isinstance(value, str) else type(value) is int and 1 <= value < LARGEST_SIZE
    if not is_valid:
        raise ValueError("must be a size from 1 up, the name of a dim (letters, digits, '_'), or a sum of these")
    return value


def _check_sum(text: str) -> str:
    """A sum of dims and sizes with one space around each '+'."""
    terms = [term.strip() for term in text.split("+")]
    sizes = [term for term in terms if term.isascii() and term.isdecimal()]
    if not all(term.isidentifier() or term in sizes for term in terms) or any(
        not 1 <= int(term) < LARGEST_SIZE for term in sizes
    ):
        raise ValueError("must be a sum of dims and of sizes from 1 up, such as 'past + tokens' or 'past + 1'")
    if len(sizes) == len(terms):
        raise ValueError("is a sum of numbers only; write the total")
    return PLUS.join(terms)


def _as_name(value: object) -> object:
    """A whole number as text: PyTorch's older exporters call tensors 387, which YAML takes for a number."""
    return str(value) if type(value) is int else value


ModelName = Annotated[str, _validator(check_model)]
GraphKey = Annotated[str, _validator(check_graph_name)]
VersionName = Annotated[str, _validator(check_version)]
Channel = Annotated[str, _validator(check_channel)]
UnitPattern = Annotated[str, _validator(_check_unit_pattern)]
TargetName = Annotated[str, _validator(machine.parse_targets)]
File = Annotated[str, AfterValidator(inside)]
# The name of a repository of the Hugging Face Hub (https://huggingface.co/docs/hub/repositories).
_REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?"
Repository = Annotated[str, Field(pattern=f"^{_REPOSITORY}$")]
# The name of a tensor, a node or an array of data.
GraphName = Annotated[str, BeforeValidator(_as_name)]
DimName = Annotated[str, _validator(_check_dim_name)]
Size = Annotated[int, Field(strict=True, ge=1, lt=LARGEST_SIZE)]
# The least size of a dim: 0 is for states that begin empty.
Least = Annotated[int, Field(strict=True, ge=0, lt=LARGEST_SIZE)]
Axis = Annotated[int | str, BeforeValidator(_check_axis)]


def off(value: object) -> object:
    """'off' if YAML read the value as false; else the value."""
    return "off" if value is False else value


class SpecPart(BaseModel):
    """Base of all parts of a spec: frozen and closed. omitted: fields that are not written if they have their default.
    Versions are named by the content of their spec, and older specs do not have these keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    omitted: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _omit_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields, field_values = type(self).model_fields, write(self)
        return {
            key: value
            for key, value in field_values.items()
            if key not in self.omitted or getattr(self, key) != fields[key].default
        }


InputDtype = Literal["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
PadValue = float | Literal["repeat"]
INPUT_DTYPES: tuple[str, ...] = get_args(InputDtype)
# A dim in a draft that a person has to replace; a spec with this dim is refused.
FILL_IN = "FILL_IN"
_COMMIT = (
    "is not a commit of 40 hexadecimal digits; a branch or tag moves, and the build with it: write the commit that "
    "`git ls-remote https://huggingface.co/{} main` prints"
)
_NO_ONNX = "is not an ONNX file; name one, or beside weights the function that builds their module as torch"
# Suffixes of files of weights.
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")


class LibraryFile(SpecPart):
    """A shared library with operators of an ONNX file. Files of one name are one library for several platforms."""

    file: File = Field(description="the library, such as linux-x86_64/libcube.so; its header says for which platform")
    cuda: int = Field(0, ge=0, le=99, description="major version of CUDA that its kernels need; 0 for none")


class Source(SpecPart):
    """The source of the model: exactly one of torch, pt2, onnx. The file of hf is onnx, or the weights of torch."""

    omitted: ClassVar[frozenset[str]] = frozenset({"libraries", "hf", "revision", "file"})

    torch: str | None = Field(
        None,
        description="'file.py:function' or 'package.module:function'; the function returns a torch.nn.Module, and a "
        "package lies in the spec's folder",
    )
    pt2: File | None = Field(None, description="a program saved by torch.export.save")
    onnx: File | None = Field(None, description="an ONNX file; external data lies in the same folder or below")
    hf: Repository | None = Field(
        None,
        description="a repository on the Hugging Face Hub, org/model; its file stands for onnx, or beside torch for "
        "weights",
    )
    revision: str | None = Field(None, description="the commit of hf, 40 hexadecimal digits; branches and tags move")
    file: File | None = Field(None, description="path in hf; external data of an ONNX file comes with it")
    weights: File | None = Field(
        None,
        description="loaded into the torch module, strictly: .safetensors, or a state dict in .pt, .pth or .bin, read "
        "with weights_only",
    )
    arguments: dict[str, Scalar] = Field(
        {},
        description="keyword arguments of the torch function; of an ONNX file, values of inputs, such as a sample rate "
        "that chooses between two networks, which engines do not take any more",
    )
    libraries: tuple[LibraryFile, ...] = Field(
        (),
        description="shared libraries with custom operators of the ONNX file; they become blobs of the version, which "
        "come with each engine that needs them",
    )
    opset: int = Field(20, ge=17, le=23, description="ONNX opset that torch sources are exported to")

    @model_validator(mode="before")
    @classmethod
    def _from_hub(cls, keys: object) -> object:
        """Set `onnx`, or beside `torch` `weights`, to the path of the repository's file in the spec's folder."""
        if not isinstance(keys, dict) or not any(keys.get(key) for key in ("hf", "revision", "file")):
            return keys
        repository, revision, file = (keys.get(key) for key in ("hf", "revision", "file"))
        if missing_key := next((key for key in ("hf", "revision", "file") if not keys.get(key)), None):
            raise ValueError(f"hf, revision and file belong together; add {missing_key}")
        if not isinstance(revision, str) or not re.fullmatch("[0-9a-f]{40}", revision):
            raise Mistakes([(("revision",), f"{format_value(revision)} {_COMMIT.format(repository)}")])
        role = "weights" if keys.get("torch") else "onnx"
        if role == "onnx" and not str(file).endswith(".onnx"):
            raise Mistakes([(("file",), f"{format_value(file)} {_NO_ONNX}")])
        if not is_path(str(file)) or not re.fullmatch(_REPOSITORY, str(repository)):
            return keys  # the fields report the mistake
        path = HubFile(str(repository), revision, str(file)).path
        if keys.get(role) not in (None, path):
            raise Mistakes([((role,), f"{role} is the file of hf; remove one of the two")])
        return {**keys, role: path}

    @field_validator("torch")
    @classmethod
    def _entry_point(cls, text: str | None) -> str | None:
        if text is None:
            return None
        file, colon, function = text.partition(":")
        is_file, is_module = file.endswith(".py"), all(segment.isidentifier() for segment in file.split("."))
        if not colon or not (is_file or is_module) or not function.isidentifier():
            raise ValueError(
                "must look like 'model.py:build' or 'package.models:build', a file or module, and a function"
            )
        inside(file)
        return text

    @field_validator("weights")
    @classmethod
    def _known_form(cls, name: str | None) -> str | None:
        if name is not None and not name.lower().endswith(WEIGHTS):
            raise ValueError(f"must end in one of {join_first(WEIGHTS, 4)}; save the weights in that form")
        return name

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        source_keys = [name for name in ("torch", "pt2", "onnx") if getattr(self, name) is not None]
        if len(source_keys) != 1:
            raise ValueError(f"needs exactly one of torch, pt2, onnx; found {', '.join(source_keys) or 'none'}")
        extra_keys = {"weights": self.torch is None, "arguments": self.pt2 is not None, "libraries": self.onnx is None}
        if source_keys := [key for key in extra_keys if extra_keys[key] and getattr(self, key)]:
            owner = {"libraries": "an ONNX source"}
            raise Mistakes(
                [((key,), f"{key} belongs to {owner.get(key, 'a torch source')}; remove it") for key in source_keys]
            )
        return self

    @property
    def kind(self) -> Literal["torch", "pt2", "onnx"]:
        """The kind of source that the spec names."""
        return "torch" if self.torch else "pt2" if self.pt2 else "onnx"

    @property
    def hub_file(self) -> HubFile | None:
        """The file of the Hugging Face Hub; None without `hf`."""
        return HubFile(self.hf, self.revision, self.file) if self.hf and self.revision and self.file else None

    @property
    def module(self) -> str:
        """The dotted name of the entry point's module; empty if a file is named."""
        name = self.torch.partition(":")[0] if self.torch else ""
        return "" if name.endswith(".py") else name

    def file_in(self, folder: Path) -> str:
        """The main file, relative to the spec's folder; of a package that is the module, its `__init__.py`."""
        if not self.module:
            return self.torch.partition(":")[0] if self.torch else self.pt2 or self.onnx or ""
        module_path = self.module.replace(".", "/")
        package_path = f"{module_path}/__init__.py"
        return package_path if (folder / package_path).is_file() else f"{module_path}.py"

    @property
    def function(self) -> str:
        """The entry point's function; empty for other sources."""
        return self.torch.partition(":")[2] if self.torch else ""


class Input(SpecPart):
    """One input of the model."""

    omitted: ClassVar[frozenset[str]] = frozenset({"pad"})

    dtype: InputDtype = "float32"
    shape: tuple[Axis, ...] = Field(description="sizes, and names of dims for the dynamic axes")
    pad: dict[DimName, PadValue] | None = Field(
        None,
        description="what a server fills the axis of each dim with, to reach a size that an engine takes: a number, or "
        "repeat, the last entry again. One value stands for all dims of the input. A dim is padded where every input "
        "that has it says by what",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_each_dim(cls, data: object) -> object:
        """Apply a single value of `pad` to all dims."""
        if not isinstance(data, dict) or isinstance(pad := data.get("pad"), dict) or pad is None:
            return data
        shape = data.get("shape")
        dim_names = [dim for dim in shape if isinstance(dim, str)] if isinstance(shape, list | tuple) else []
        return {**data, "pad": dict.fromkeys((dim for dim in dim_names if PLUS.strip() not in dim), pad)}


class PlacesSection(SpecPart):
    """Where a step writes into a cache of a fixed size. A step that would write beyond the end is refused."""

    axis: int = Field(ge=0, description="axis of the state that is filled place by place")
    at: GraphName = Field(description="input of integers: the places that the step writes, or the first of `count`")
    count: DimName | None = Field(None, description="dim of a step's inputs: so many places are written from `at` on")

    omitted: ClassVar[frozenset[str]] = frozenset({"count"})

    def to_places(self) -> Places:
        """As `Places`."""
        return Places(self.axis, self.at, self.count or "")


class StateInput(SpecPart):
    """The source of an input that takes its value from the previous call, not from the caller."""

    output: GraphName = Field(description="the output whose value it takes in the next call")
    initial: float = Field(description="each of its elements in the first call, such as 0")
    dtype: Literal["int8"] | None = Field(
        None,
        description="int8: engines of quantized precisions take and give it as int8, a quarter of its memory, with a "
        "calibrated scale",
    )
    places: PlacesSection | None = Field(None, description="of a cache of a fixed size: where steps write into it")

    omitted: ClassVar[frozenset[str]] = frozenset({"places", "dtype"})


class DimRange(SpecPart):
    """The sizes a dynamic dimension may take: one range, or buckets that each get their own profile."""

    omitted: ClassVar[frozenset[str]] = frozenset({"multiple"})

    min: Least = 1
    opt: Size | None = Field(None, description="the size to tune for; defaults to max")
    max: Size | None = Field(None, description="needed unless buckets are given")
    buckets: tuple[Size, ...] | None = Field(None, description="rising upper edges, e.g. [32, 64, 128]")
    multiple: Size = Field(
        1, description="the model takes multiples of this size alone; so are min (default: this), opt, max and buckets"
    )

    @model_validator(mode="before")
    @classmethod
    def _least(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("multiple") is not None and "min" not in data:
            return {**data, "min": data["multiple"]}
        return data

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.buckets is not None:
            if self.opt is not None or self.max is not None:
                raise ValueError("has buckets and also opt or max; buckets replace both: remove opt and max")
            edges = list(self.buckets)
            if not edges or edges != sorted(set(edges)) or edges[0] < self.min:
                raise ValueError(f"buckets must rise from min={self.min}, found {edges}")
        elif self.max is None:
            raise ValueError("has no max; compilers need one; add max, or buckets")
        elif not self.min <= (self.opt or self.max) <= self.max:
            raise ValueError(f"needs min <= opt <= max, found {self.min}, {self.opt or self.max}, {self.max}")
        self._check_multiples()
        return self

    def _check_multiples(self) -> None:
        sizes = {"min": self.min, "opt": self.opt, "max": self.max}
        size_settings = [*sizes.items(), *(("buckets", edge) for edge in self.buckets or ())]
        misfits = [f"{key} {size}" for key, size in size_settings if size is not None and size % self.multiple]
        if misfits:
            raise ValueError(f"accepts only multiples of {self.multiple}; change {', '.join(misfits)}")

    def to_dim(self, name: str) -> Dim:
        """As a `Dim`."""
        if self.buckets:
            return Dim(name, self.min, self.buckets[-1], self.buckets[-1], self.buckets, self.multiple)
        max_size = self.max or self.min
        return Dim(name, self.min, self.opt or max_size, max_size, multiple=self.multiple)
