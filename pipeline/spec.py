"""The spec: one YAML file per model, the only door for user text.

`load_spec` is the way in (`pipeline.spec_file`); this module says what a spec may hold. Everything is frozen, unknown
keys are refused, and every file it names lies inside the spec's own folder.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from builders import backends, targets
from builders.errors import EngineryError, UnknownNameError
from builders.types import CALIBRATED, PRECISIONS, Dim, Precision, Scalar, Target, TensorSpec
from pipeline.registry.names import check_channel, check_model, check_version

DTYPES = ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
DEFAULT_BACKENDS: dict[str, dict[str, Scalar]] = {"onnxruntime": {}, "tensorrt-rtx": {}}
LARGEST_SIZE = 1 << 31


def _inside(text: str) -> str:
    path = PurePosixPath(text)
    if not text or path.is_absolute() or ".." in path.parts or "\\" in text or "\x00" in text:
        raise ValueError("must be a relative path inside the spec's folder, without '..'")
    return text


def _python_name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("must be a name made of letters, digits and '_', not starting with a digit")
    return text


def _as_value_error(check: Callable[..., object], *values: object) -> None:
    """Turn our own error into the one that pydantic collects."""
    try:
        check(*values)
    except EngineryError as error:
        raise ValueError(str(error)) from error


def _checked(check: Callable[[str], object]) -> AfterValidator:
    def validate(text: str) -> str:
        _as_value_error(check, text)
        return text

    return AfterValidator(validate)


def _unit_pattern(text: str) -> None:
    words = text.split()
    if not 1 <= len(words) <= 3:
        raise UnknownNameError("is not 'TARGET [PRECISION [BACKEND]]'")
    targets.parse_targets(words[0])


ModelName = Annotated[str, _checked(check_model)]
VersionName = Annotated[str, _checked(check_version)]
Channel = Annotated[str, _checked(check_channel)]
UnitPattern = Annotated[str, _checked(_unit_pattern)]
TargetName = Annotated[str, _checked(targets.parse_targets)]
File = Annotated[str, AfterValidator(_inside)]
DimName = Annotated[str, AfterValidator(_python_name)]
Size = Annotated[int, Field(strict=True, ge=1, lt=LARGEST_SIZE)]


def _axis(value: object) -> object:
    good = value.isidentifier() if isinstance(value, str) else type(value) is int and 1 <= value < LARGEST_SIZE
    if not good:
        raise ValueError("must be a size from 1 up, or the name of a dim (letters, digits, '_')")
    return value


Axis = Annotated[int | str, BeforeValidator(_axis)]


class Part(BaseModel):
    """Base of all parts of a spec: frozen and closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Source(Part):
    """Where the model comes from: exactly one of torch, pt2, onnx."""

    torch: str | None = Field(None, description="'file.py:function'; the function returns a torch.nn.Module")
    pt2: File | None = Field(None, description="a program saved by torch.export.save")
    onnx: File | None = Field(None, description="an ONNX file; external data lies in the same folder or below")
    weights: File | None = Field(None, description="safetensors loaded into the torch module, strictly")
    arguments: dict[str, Scalar] = Field({}, description="keyword arguments of the torch function")
    opset: int = Field(20, ge=17, le=23, description="ONNX opset that torch sources are exported to")

    @field_validator("torch")
    @classmethod
    def _entry_point(cls, text: str | None) -> str | None:
        if text is None:
            return None
        file, colon, function = text.partition(":")
        if not colon or not file.endswith(".py") or not function.isidentifier():
            raise ValueError("must look like 'model.py:build', a file and a function in it")
        _inside(file)
        return text

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("torch", "pt2", "onnx") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of torch, pt2, onnx; found {', '.join(given) or 'none'}")
        if self.torch is None and (self.weights or self.arguments):
            raise ValueError("weights and arguments belong to a torch source; remove them")
        return self

    @property
    def kind(self) -> Literal["torch", "pt2", "onnx"]:
        """Which of the three it is."""
        return "torch" if self.torch else "pt2" if self.pt2 else "onnx"

    @property
    def file(self) -> str:
        """The main file, relative to the spec."""
        return self.torch.partition(":")[0] if self.torch else self.pt2 or self.onnx or ""

    @property
    def function(self) -> str:
        """The entry point's function; empty for other sources."""
        return self.torch.partition(":")[2] if self.torch else ""


class Input(Part):
    """One input of the model."""

    dtype: Literal["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"] = "float32"
    shape: tuple[Axis, ...] = Field(description="sizes, and names of dims for the dynamic axes")


class DimRange(Part):
    """The sizes a dynamic dimension may take: one range, or buckets that each get their own profile."""

    min: Size = 1
    opt: Size | None = Field(None, description="the size to tune for; defaults to max")
    max: Size | None = Field(None, description="needed unless buckets are given")
    buckets: tuple[Size, ...] | None = Field(None, description="rising upper edges, e.g. [32, 64, 128]")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.buckets is not None:
            self._check_buckets()
        elif self.max is None:
            raise ValueError("has no max; compilers need one; add max, or buckets")
        elif not self.min <= (self.opt or self.max) <= self.max:
            raise ValueError(f"needs min <= opt <= max, found {self.min}, {self.opt or self.max}, {self.max}")
        return self

    def _check_buckets(self) -> None:
        edges = self.buckets or ()
        if self.opt is not None or self.max is not None:
            raise ValueError("has buckets and also opt or max; the buckets say it all, remove the others")
        if not edges or list(edges) != sorted(set(edges)) or edges[0] < self.min:
            raise ValueError(f"buckets must rise from min={self.min}, found {list(edges)}")

    def named(self, name: str) -> Dim:
        """As a `Dim`."""
        if self.buckets:
            return Dim(name, self.min, self.buckets[-1], self.buckets[-1], self.buckets)
        top = self.max or self.min
        return Dim(name, self.min, self.opt or top, top)


class Calibration(Part):
    """Real samples from which int8 and fp8 ranges are measured, and how a range is chosen from what they show."""

    data: str = Field(
        description=".npz or safetensors with one array per input, .npy or a folder of them, or 'file.py:function': a "
        "generator of dicts with one array per input"
    )
    method: Literal["minmax", "percentile", "entropy", "mse", "moving-average"] = "minmax"
    percentile: float | None = Field(
        None, gt=50, le=100, description="for method percentile: the share of values kept; default 99.99"
    )

    @field_validator("data")
    @classmethod
    def _file_or_generator(cls, text: str) -> str:
        file, colon, function = text.partition(":")
        if colon and not (file.endswith(".py") and function.isidentifier()):
            raise ValueError("must be a file, a folder, or 'data.py:samples', a file and a function in it")
        return _inside(file) + colon + function

    @model_validator(mode="after")
    def _own_parameter(self) -> Self:
        if self.percentile is not None and self.method != "percentile":
            raise ValueError(f"method {self.method} has no percentile; remove it, or use method percentile")
        return self

    @property
    def file(self) -> str:
        """The file or folder, or the file that the function is in."""
        return self.data.partition(":")[0]

    @property
    def function(self) -> str | None:
        """The generator's name; None for stored data."""
        return self.data.partition(":")[2] or None


class NodeOverride(Part):
    """The precision of some nodes, by hand."""

    match: str = Field(min_length=1, description="a node's name, an operator type, or a glob over names: '*/attn/*'")
    precision: Literal["fp32", "fp16", "int8"] = Field(
        description="fp32 and fp16 leave the nodes in float; int8 takes back an earlier rule"
    )


class QualityFloor(Part):
    """The least quality of an int8 graph on calibration samples; of several outputs, of the worst."""

    sqnr_db: float | None = Field(None, gt=0, lt=140, description="signal-to-quantization-noise ratio, in decibels")
    cosine: float | None = Field(None, gt=0, lt=1, description="cosine similarity of the outputs")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.sqnr_db is None and self.cosine is None:
            raise ValueError("needs sqnr_db or cosine")
        return self


class Quantization(Part):
    """How a graph is written in another precision, where the default is not wanted."""

    io: Literal["fp32", "native"] = Field(
        "fp32", description="native: an fp16 graph also takes and gives fp16; callers then convert"
    )
    overrides: tuple[NodeOverride, ...] = Field((), description="rules by node; the last one that matches counts")
    smoothing: Literal["none", "auto"] = Field(
        "none", description="auto: int8 moves outliers of activations into weights, with a strength searched per group"
    )
    floor: QualityFloor | None = Field(
        None, description="int8 leaves what costs most in float until this holds, and no more than that"
    )

    @property
    def searches(self) -> bool:
        """Whether int8 is chosen by trial (`pipeline.quantization.choice`)."""
        return self.smoothing != "none" or self.floor is not None


class Metric(Part):
    """A task metric over the golden set, with the lowest value that passes."""

    name: Literal["accuracy"] = "accuracy"
    output: str = Field(description="the output whose argmax over the last axis is the predicted class")
    floor: float = Field(ge=0, le=1, description="lowest value that passes, e.g. 0.95")


class Golden(Part):
    """Real inputs with which every engine is proven. Expected outputs come from the source model itself."""

    data: File
    labels: str | None = Field(None, description="name of the array of class indices in the data file")
    metric: Metric | None = None

    @model_validator(mode="after")
    def _labelled(self) -> Self:
        if self.metric and not self.labels:
            raise ValueError(f"metric {self.metric.name} needs labels; name the array that holds them")
        return self


class LimitValues(Part):
    """Limits of one joint. What is not given keeps its documented default (docs/validation.md); null lifts a limit."""

    max_abs: float | None = Field(None, ge=0)
    max_rel: float | None = Field(None, ge=0)
    sqnr_db: float | None = None
    cosine: float | None = Field(None, ge=-1, le=1)
    argmax_agreement: float | None = Field(None, ge=0, le=1)


class JointLimits(Part):
    """Limits of one precision at the three joints."""

    export: LimitValues = LimitValues()
    quantization: LimitValues = LimitValues()
    engine: LimitValues = LimitValues()


class Validation(Part):
    """What counts as the same function."""

    limits: dict[Precision, JointLimits] = {}


class Build(Part):
    """What each unit's process may use, and which units must not be refused."""

    timeout_s: float = Field(1800, gt=0, le=86400, description="wall clock, per unit")
    memory_mib: int = Field(8192, ge=64, description="resident memory, per unit")
    required: tuple[UnitPattern, ...] = Field(
        (), description="units such as 'sm_89 int8' or 'cpu': a refusal fails the run"
    )


class Publication(Part):
    """Where a finished version goes."""

    registry: str | None = Field(None, description="path or URI; the command line and ENGINERY_REGISTRY come first")
    channel: Channel = Field("candidate", description="channel that points to the new version")


class ModelSpec(Part):
    """One model: source, shapes, precisions, targets, proof and publication."""

    model: ModelName = Field(description="name in the registry: lower-case letters, digits, '.', '_' and '-'")
    version: VersionName | None = Field(None, description="a version name of your own; default: the next number")
    source: Source
    inputs: dict[str, Input] = Field(min_length=1)
    outputs: tuple[str, ...] | None = Field(
        None, description="names of the outputs, in order; default: the model's own"
    )
    dims: dict[DimName, DimRange] = {}
    precisions: tuple[Precision, ...] = Field(("fp32",), min_length=1)
    targets: tuple[TargetName, ...] = Field(min_length=1, description="cpu, sm_89, l4, ampere, gpu, all, ...")
    backends: dict[str, dict[str, Scalar]] = Field(DEFAULT_BACKENDS, description="compilers to use, with their options")
    calibration: Calibration | None = None
    quantization: Quantization = Quantization()
    golden: Golden | None = None
    validation: Validation = Validation()
    build: Build = Build()
    publication: Publication = Publication()

    _path: Path = PrivateAttr(default=Path())

    @field_validator("backends")
    @classmethod
    def _known_backends(cls, chosen: dict[str, dict[str, Scalar]]) -> dict[str, dict[str, Scalar]]:
        for name, options in chosen.items():
            _as_value_error(backends.configure, name, options)
        return chosen

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if mistakes := _mistakes_between(self):
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def path(self) -> Path:
        """The spec file, as it was given."""
        return self._path

    @property
    def folder(self) -> Path:
        """The spec's real folder; every file it names lies inside."""
        return self._path.resolve().parent

    def file(self, relative: str) -> Path:
        """A file the spec names."""
        return self.folder / relative

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs, in order."""
        return tuple(TensorSpec(name, item.dtype, item.shape) for name, item in self.inputs.items())

    def named_dims(self) -> tuple[Dim, ...]:
        """The dynamic dims, in the spec's order."""
        return tuple(item.named(name) for name, item in self.dims.items())

    def target_list(self) -> tuple[Target, ...]:
        """Targets with groups resolved, each once, in the spec's order."""
        found = [target for name in self.targets for target in targets.parse_targets(name)]
        return tuple(dict.fromkeys(found))

    def precision_list(self) -> tuple[Precision, ...]:
        """Precisions, each once, from wide to narrow."""
        return tuple(p for p in PRECISIONS if p in self.precisions)


def _mistakes_between(spec: ModelSpec) -> list[str]:
    """Mistakes that only show when the parts are put side by side."""
    used = {dim for item in spec.inputs.values() for dim in item.shape if isinstance(dim, str)}
    out = [
        f"inputs name dim {name!r}, which dims does not define; add dims.{name}.max"
        for name in sorted(used - set(spec.dims))
    ]
    out += [
        f"dims.{name} is used by no input; remove it or name it in a shape" for name in sorted(set(spec.dims) - used)
    ]
    needy = [precision for precision in CALIBRATED if precision in spec.precisions]
    if needy and spec.calibration is None and spec.source.kind != "onnx":
        out.append(f"precisions has {needy[0]}, which needs real samples; add calibration.data")
    if spec.quantization.searches and spec.calibration is None:
        out.append("quantization.smoothing and floor are searched on real samples; add calibration.data")
    out += [
        f"build.required has {pattern!r}, which covers no unit of this spec; correct it, or add what it names"
        for pattern in spec.build.required
        if not any(matches_unit(pattern, unit) for unit in _units(spec))
    ]
    metric = spec.golden.metric if spec.golden else None
    if metric and spec.outputs and metric.output not in spec.outputs:
        out.append(f"golden.metric.output {metric.output!r} is not one of the outputs {list(spec.outputs)}")
    return out


def _units(spec: ModelSpec) -> list[str]:
    """Every combination of target, precision and backend, some backend's business or not."""
    combinations = itertools.product(spec.target_list(), spec.precision_list(), spec.backends)
    return [f"{target.name} {precision} {backend}" for target, precision, backend in combinations]


def matches_unit(pattern: str, unit: str) -> bool:
    """Whether 'sm_89 int8' covers the unit 'sm_89 int8 tensorrt-rtx'."""
    wanted, have = pattern.split(), unit.split()
    names = {target.name for target in targets.parse_targets(wanted[0])}
    return have[0] in names and wanted[1:] == have[1 : len(wanted)]


def overrides(
    spec: ModelSpec, precision: Precision, joint: Literal["export", "quantization", "engine"]
) -> Mapping[str, float]:
    """The limits the spec sets for a precision at a joint."""
    limits = spec.validation.limits.get(precision, JointLimits())
    values: dict[str, float] = getattr(limits, joint).model_dump(exclude_unset=True)
    return values
