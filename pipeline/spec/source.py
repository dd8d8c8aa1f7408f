"""Where a model comes from, and the shapes it takes."""

from pathlib import Path
from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from enginesmith.core.names import inside
from enginesmith.core.state import Places
from enginesmith.core.text import join_first
from enginesmith.core.types import PLUS, Dim, Scalar
from pipeline.spec.value_types import Axis, DimName, File, GraphName, Least, Mistakes, Size, SpecPart

InputDtype = Literal["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
PadValue = float | Literal["repeat"]
INPUT_DTYPES: tuple[str, ...] = get_args(InputDtype)
# Stands in a spec, as a dim, where a person has to write something; no spec with it is loaded.
FILL_IN = "FILL_IN"
# How files of weights end.
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")


class Source(SpecPart):
    """Where the model comes from: exactly one of torch, pt2, onnx."""

    torch: str | None = Field(
        None,
        description="'file.py:function' or 'package.module:function'; the function returns a torch.nn.Module, and a "
        "package lies in the spec's folder",
    )
    pt2: File | None = Field(None, description="a program saved by torch.export.save")
    onnx: File | None = Field(None, description="an ONNX file; external data lies in the same folder or below")
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
    opset: int = Field(20, ge=17, le=23, description="ONNX opset that torch sources are exported to")

    @field_validator("torch")
    @classmethod
    def _entry_point(cls, text: str | None) -> str | None:
        if text is None:
            return None
        file, colon, function = text.partition(":")
        is_file, is_module = file.endswith(".py"), all(part.isidentifier() for part in file.split("."))
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
        given = [name for name in ("torch", "pt2", "onnx") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of torch, pt2, onnx; found {', '.join(given) or 'none'}")
        homeless = {"weights": self.torch is None, "arguments": self.pt2 is not None}
        if given := [key for key in homeless if homeless[key] and getattr(self, key)]:
            raise Mistakes([((key,), f"{key} belongs to a torch source; remove it") for key in given])
        return self

    @property
    def kind(self) -> Literal["torch", "pt2", "onnx"]:
        """Which of the three it is."""
        return "torch" if self.torch else "pt2" if self.pt2 else "onnx"

    @property
    def module(self) -> str:
        """The dotted name of the entry point's module; empty where a file is named."""
        name = self.torch.partition(":")[0] if self.torch else ""
        return "" if name.endswith(".py") else name

    def file_in(self, folder: Path) -> str:
        """The main file, relative to the spec's folder; of a package that is the module, its `__init__.py`."""
        if not self.module:
            return self.torch.partition(":")[0] if self.torch else self.pt2 or self.onnx or ""
        place = self.module.replace(".", "/")
        package = f"{place}/__init__.py"
        return package if (folder / package).is_file() else f"{place}.py"

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
    def _of_each_dim(cls, given: object) -> object:
        """One value as that of all dims."""
        if not isinstance(given, dict) or isinstance(pad := given.get("pad"), dict) or pad is None:
            return given
        shape = given.get("shape")
        named = [dim for dim in shape if isinstance(dim, str)] if isinstance(shape, list | tuple) else []
        return {**given, "pad": dict.fromkeys((dim for dim in named if PLUS.strip() not in dim), pad)}


class PlacesSection(SpecPart):
    """Where a step writes into a cache of a fixed size, so that one that would write behind its end is refused."""

    axis: int = Field(ge=0, description="axis of the state that is filled place by place")
    at: GraphName = Field(description="input of integers: the places that the step writes, or the first of `count`")
    count: DimName | None = Field(None, description="dim of a step's inputs: so many places are written from `at` on")

    omitted: ClassVar[frozenset[str]] = frozenset({"count"})

    def to_places(self) -> Places:
        """The value."""
        return Places(self.axis, self.at, self.count or "")


class StateInput(SpecPart):
    """Where an input comes from that a caller does not give: the call before."""

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
        1,
        description="the model takes multiples of this size alone; so are min (default: this), opt, max and buckets",
    )

    @model_validator(mode="before")
    @classmethod
    def _least(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("multiple") is not None and "min" not in given:
            return {**given, "min": given["multiple"]}
        return given

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.buckets is not None:
            self._check_buckets()
        elif self.max is None:
            raise ValueError("has no max; compilers need one; add max, or buckets")
        elif not self.min <= (self.opt or self.max) <= self.max:
            raise ValueError(f"needs min <= opt <= max, found {self.min}, {self.opt or self.max}, {self.max}")
        self._check_multiples()
        return self

    def _check_multiples(self) -> None:
        given = [("min", self.min), ("opt", self.opt), ("max", self.max), *(("buckets", x) for x in self.buckets or ())]
        wrong = [f"{key} {size}" for key, size in given if size is not None and size % self.multiple]
        if wrong:
            raise ValueError(f"takes multiples of {self.multiple} alone, which {', '.join(wrong)} is not; change it")

    def _check_buckets(self) -> None:
        edges = self.buckets or ()
        if self.opt is not None or self.max is not None:
            raise ValueError("has buckets and also opt or max; the buckets say it all, remove the others")
        if not edges or list(edges) != sorted(set(edges)) or edges[0] < self.min:
            raise ValueError(f"buckets must rise from min={self.min}, found {list(edges)}")

    def to_dim(self, name: str) -> Dim:
        """As a `Dim`."""
        if self.buckets:
            return Dim(name, self.min, self.buckets[-1], self.buckets[-1], self.buckets, self.multiple)
        top = self.max or self.min
        return Dim(name, self.min, self.opt or top, top, multiple=self.multiple)
