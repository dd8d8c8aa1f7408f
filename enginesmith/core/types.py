"""The values that describe a build, and the protocols of backends and sessions. Standard library only.

Every value is frozen and small. Bytes (models, engines, reports) are in an artifact store, named by digest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from annotated_types import Interval

from enginesmith.core.codec import encode
from enginesmith.core.errors import digest_of, digest_of_file
from enginesmith.core.requirements import MAX_COUNT, Count, GpuMemory, Requirement

if TYPE_CHECKING:
    import numpy as np

    from enginesmith.core.capabilities import Capabilities

# The type of objects of libraries without type hints: TensorRT, TVM, IREE, JAX, ONNX Runtime and Ray, functions of C
# libraries, and values of ONNX attributes, whose type depends on the operator. mypy does not check their use.
Untyped = Any

Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int8-dynamic", "int4", "mxfp8", "nvfp4-weights", "nvfp4"]


class PrecisionLimits(NamedTuple):
    """The default limits on the drift of graphs and engines in a precision, used where nothing was measured on the
    model: fields of `validation.limits.budget.Budget`."""

    max_rel: float
    sqnr_db: float
    centered_sqnr_db: float
    slice_sqnr_db: float


@dataclass(frozen=True)
class PrecisionTraits:
    """The properties of a precision. A new precision needs a row of `TRAITS`, and code that writes its graphs
    (`pipeline.quantization.schemes`).

    bits: minimum size of a weight in an engine.  error: rank by expected error: first by the significant bits of the
    factors, then ranges from each input before calibrated ranges.
    quantized: whether graphs are written in the backend's scheme.  calibrated: whether that needs measured ranges.
    in_blocks: whether weights have one scale per block.  narrow_floats: whether products are of floats of 8 bits or
    fewer, which no CPU multiplies.
    limits: of the drift of its graphs and engines.
    """

    bits: int
    error: int
    limits: PrecisionLimits
    quantized: bool = False
    calibrated: bool = False
    in_blocks: bool = False
    narrow_floats: bool = False


# From wide to narrow.
TRAITS: Mapping[Precision, PrecisionTraits] = {
    "fp32": PrecisionTraits(32, 0, PrecisionLimits(1e-3, 80.0, 60.0, 60.0)),
    "fp16": PrecisionTraits(16, 1, PrecisionLimits(0.03, 45.0, 30.0, 30.0)),
    "bf16": PrecisionTraits(16, 2, PrecisionLimits(0.2, 25.0, 15.0, 15.0)),
    "fp8": PrecisionTraits(
        8, 5, PrecisionLimits(0.6, 15.0, 10.0, 8.0), quantized=True, calibrated=True, narrow_floats=True
    ),
    "mxfp8": PrecisionTraits(
        8, 4, PrecisionLimits(0.6, 15.0, 10.0, 8.0), quantized=True, in_blocks=True, narrow_floats=True
    ),
    "int8": PrecisionTraits(8, 6, PrecisionLimits(0.6, 15.0, 10.0, 8.0), quantized=True, calibrated=True),
    "int8-dynamic": PrecisionTraits(8, 3, PrecisionLimits(0.6, 15.0, 10.0, 8.0), quantized=True),
    "int4": PrecisionTraits(4, 7, PrecisionLimits(0.9, 10.0, 6.0, 4.0), quantized=True, in_blocks=True),
    "nvfp4-weights": PrecisionTraits(
        4, 8, PrecisionLimits(0.9, 10.0, 6.0, 4.0), quantized=True, in_blocks=True, narrow_floats=True
    ),
    "nvfp4": PrecisionTraits(
        4, 9, PrecisionLimits(0.9, 10.0, 6.0, 4.0), quantized=True, calibrated=True, in_blocks=True, narrow_floats=True
    ),
}


def accuracy_order(precision: str) -> int:
    """The rank of a precision by accuracy, from the most to the least accurate; an unknown precision is last."""
    return next((traits.error for name, traits in TRAITS.items() if name == precision), len(TRAITS))


PRECISIONS = tuple(TRAITS)
QUANTIZED = tuple(name for name in PRECISIONS if TRAITS[name].quantized)
CALIBRATED = tuple(name for name in PRECISIONS if TRAITS[name].calibrated)
IN_BLOCKS = tuple(name for name in PRECISIONS if TRAITS[name].in_blocks)
NARROW_FLOATS = tuple(name for name in PRECISIONS if TRAITS[name].narrow_floats)
BLOCK_FLOATS = tuple(name for name in NARROW_FLOATS if TRAITS[name].in_blocks)

# The toolchain entry of a CPU engine with the kind of CPU that it is built for (`hardware.cpu_kinds.CpuKind`).
CPU_KIND = "enginesmith-cpu"
# The prefix of the note of an engine whose layers are not recorded; the reason follows.
NO_LAYERS = "layers and tactics are not on record"

Scalar = str | int | float | bool
WeightLevels = Literal[64, 127]
Shape = tuple[Count, ...]
Multiple = Annotated[int, Interval(ge=1, le=MAX_COUNT)]
Tensors = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class Dim:
    """A named dynamic dimension. `edges` are the upper ends of its buckets, rising; the last one is `max`.

    Without edges there is one bucket, min..max, tuned for `opt`. Every size is a multiple of `multiple`, and so are all
    of these numbers.

    name: as in the shapes of inputs and outputs.
    """

    name: str
    min: int
    opt: int
    max: int
    edges: tuple[int, ...] = ()
    multiple: int = 1

    @property
    def static(self) -> bool:
        """Whether only one size is allowed."""
        return self.min == self.max

    @property
    def sizes(self) -> range:
        """All allowed sizes, rising."""
        return range(self.min, self.max + 1, self.multiple)

    @property
    def words(self) -> str:
        """The sizes as text: '1..8', or '64..160 in steps of 32'."""
        return f"{self.min}..{self.max}" + (f" in steps of {self.multiple}" if self.multiple > 1 else "")

    def buckets(self) -> tuple[tuple[int, int, int], ...]:
        """The (min, opt, max) of each bucket. With explicit edges each bucket is tuned for its upper edge."""
        if not self.edges:
            return ((self.min, self.opt, self.max),)
        lower_edges = (self.min, *(edge + self.multiple for edge in self.edges[:-1]))
        return tuple((low, high, high) for low, high in zip(lower_edges, self.edges, strict=True))

    def test_sizes(self) -> tuple[int, ...]:
        """The sizes that validation must try: both ends of every bucket, and `opt`."""
        return tuple(sorted({size for bucket in self.buckets() for size in bucket}))


# The separator of the terms in a sum of dims.
PLUS = " + "


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    """The size of a dim, or of a sum of dims and numbers. Raises KeyError for a dim without a size."""
    return sum(int(term) if term.isdecimal() else sizes[term] for term in dim.split(PLUS))


def rename_dims(dim: str, new_names: Mapping[str, str]) -> str:
    """A dim, or a sum of dims, with new names; dims without a new name keep theirs."""
    return PLUS.join(new_names.get(term, term) for term in dim.split(PLUS))


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. shape: sizes, names of `Dim`s, and for inputs also sums of these ('past + tokens').  dtype:
    numpy's name, or 'bfloat16'."""

    name: str
    dtype: str
    shape: tuple[Count | str, ...]

    def at(self, sizes: Mapping[str, int]) -> Shape:
        """The concrete shape for the given sizes of the named dims. Raises KeyError for a dim without a size."""
        return tuple(dim if isinstance(dim, int) else size_of(dim, sizes) for dim in self.shape)

    @property
    def sums(self) -> tuple[tuple[int, str], ...]:
        """(axis, sum) of each axis whose size is a sum of dims."""
        return tuple((axis, dim) for axis, dim in enumerate(self.shape) if isinstance(dim, str) and PLUS in dim)


def list_sums(specs: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, int, str]]:
    """(tensor, axis, sum) of each axis whose size is a sum of dims."""
    return ((spec, axis, sum_dim) for spec in specs for axis, sum_dim in spec.sums)


@dataclass(frozen=True)
class ShapeProfile:
    """One optimization profile: for each input its (min, opt, max) shapes, in the order of the model's inputs.

    multiples: input -> the divisor of the size on each axis, for inputs where one is not 1. Compilers do not know this
    rule; sessions refuse other sizes.
    """

    inputs: tuple[tuple[str, Shape, Shape, Shape], ...]
    multiples: tuple[tuple[str, tuple[Multiple, ...]], ...] = ()


@dataclass(frozen=True)
class Target:
    """The hardware that an engine is built for: a CPU (`compute_capability` None), a GPU generation, or one product.

    name: for a CPU 'cpu' (this machine's), or the name of a `hardware.cpu_kinds.CpuKind`.
    """

    name: str
    compute_capability: tuple[int, int] | None = None
    product: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU."""
        return self.compute_capability is None

    @property
    def sm(self) -> str:
        """The generation's name, 'sm_89', or 'cpu'."""
        return "cpu" if self.compute_capability is None else "sm_{}{}".format(*self.compute_capability)


@dataclass(frozen=True)
class QuantizationScheme:
    """The form of a quantized graph that a backend compiles.

    activation: of int8 graphs: 'int8' is symmetric with zero point 0 (TensorRT), 'uint8' asymmetric (onnxruntime's VNNI
    kernels).
    quantize_bias: whether biases of int8 graphs become int32 with their own dequantization (TensorRT refuses that).
    Only with 'uint8' activations: ValueError otherwise.
    float_precision: of the operators that stay in floating point.
    weight_levels: the largest magnitude of int8 weights. With 64 ("reduced range") the sum of two products with uint8
    stays within 16 bits.
    """

    activation: Literal["int8", "uint8"]
    quantize_bias: bool
    float_precision: Literal["fp32", "fp16"]
    weight_levels: WeightLevels = 127

    def __post_init__(self) -> None:
        if self.quantize_bias and self.activation == "int8":
            raise ValueError("a scheme with int8 activations leaves biases in floating point: quantize_bias=False")


@dataclass(frozen=True)
class QuantizedState:
    """A state that an engine reads and writes as int8: value / `scale`, rounded half to even. input, output: names."""

    input: str
    output: str
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0.0:
            raise ValueError(f"scale is {self.scale}; it must be above 0")


@dataclass(frozen=True)
class BuildRequest:
    """Everything that determines an engine. Engines of equal requests are interchangeable.

    model: digest of the ONNX model that is compiled: its attributes, edges and weights, Q/DQ scales included.
    options: the backend's options, with every default.  toolchain: versions of compiler and runtime that matter, and
    the backend's revision (`builders.backends.discovery.toolchain_of`).
    quantized_states: states that are int8 in the engine; `inputs` and `outputs` have float32.
    profiles: sizes of each named dim to tune for, one per bucket.
    """

    model: str
    precision: Precision
    target: Target
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    options: tuple[tuple[str, Scalar], ...] = ()
    toolchain: tuple[tuple[str, str], ...] = ()
    quantized_states: tuple[QuantizedState, ...] = ()

    @cached_property
    def key(self) -> str:
        """The build key: the digest of all fields. The kind of CPU is in the toolchain, whatever the target's name."""
        if self.target.is_cpu and CPU_KIND in dict(self.toolchain):
            return digest_of(encode(replace(self, target=replace(self.target, name="cpu"))))
        return digest_of(encode(self))

    @property
    def seed(self) -> int:
        """A random seed derived from the build key: equal keys give equal seeds."""
        return int(self.key[:8], 16)

    @property
    def unit(self) -> str:
        """The unit's short name, for people: 'sm_89 int8 tensorrt-rtx'."""
        return f"{self.target.name} {self.precision} {self.backend}"

    @property
    def multiples(self) -> dict[str, int]:
        """The divisor of a dim's sizes, by the dim's name, for each named dim of the inputs where it is not 1."""
        multiples_by_input = dict(self.profiles[0].multiples) if self.profiles else {}
        pairs = (
            pair
            for spec in self.inputs
            for pair in zip(spec.shape, multiples_by_input.get(spec.name, ()), strict=False)
        )
        return {dim: multiple for dim, multiple in pairs if isinstance(dim, str) and multiple > 1}

    def with_option(self, name: str, value: Scalar) -> "BuildRequest":
        """A copy of this request with another value of an existing option."""
        return replace(self, options=tuple((key, value if key == name else option) for key, option in self.options))


@dataclass(frozen=True)
class Engine:
    """A compiled model on disk.

    path: the file.  digest: SHA-256 of its bytes.  size_bytes: their number.  suffix: of the file, as '.onnx'.
    requires: requirements on a machine that runs it (`enginesmith.core.requirements`).
    notes: remarks of the compiler for people (a layer left in fp32, a fallback).
    extras: other files of the build by name, such as the compiler's description of its layers.
    weights: the ONNX model with the weights if the engine's own file has none; needed to open it.
    """

    request: BuildRequest
    path: Path
    digest: str
    size_bytes: int
    suffix: str
    requires: tuple[Requirement, ...] = ()
    notes: tuple[str, ...] = ()
    extras: tuple[tuple[str, Path], ...] = ()
    weights: Path | None = None

    @classmethod
    def of_file(
        cls,
        backend: "Backend",
        request: BuildRequest,
        path: Path,
        notes: tuple[str, ...] = (),
        also: tuple[Requirement, ...] = (),
    ) -> "Engine":
        """The engine that a backend wrote to `path`. also: requirements that only the file shows."""
        size = path.stat().st_size
        memory_requirements = () if request.target.is_cpu else (GpuMemory(size),)
        requirements = (*backend.requires(request), *memory_requirements, *also)
        return cls(request, path, digest_of_file(path), size, path.suffix, requirements, notes)


@dataclass(frozen=True)
class BuildFailure:
    """A unit whose build failed.

    kind: 'error' (the compiler refused), or another kind of `errors.StepError`.
    log: end of the compiler's output.  command: shell line that reproduces the failure.
    unit: target, precision and backend.  reason: what went wrong, and the remedy.
    """

    unit: str
    kind: str
    reason: str
    log: str = ""
    command: str = ""


class Session(Protocol):
    """An engine opened for running. Subclasses override the methods that return None here if they know the value."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]

    def run(self, inputs: Tensors) -> dict[str, "np.ndarray"]:
        """Run once. Raises DataError for wrong names, dtypes or shapes."""

    def prepare_call(self, inputs: Tensors) -> Callable[[], object] | None:  # noqa: ARG002
        """A function that makes the runtime's own call on these inputs, which were run before and are checked here, to
        time it without the overhead of `run`. None if there is none. Raises DataError like `run`."""
        return None

    def used_bytes(self) -> int | None:
        """Bytes of device memory in use by all processes; None for an engine in the host's memory."""
        return None

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float] | None:  # noqa: ARG002
        """Seconds of each of `runs` runs on the device, by its own clock and without copies to and from it; None if
        unknown. Raises DataError like `run`."""
        return None


class Backend(Protocol):
    """A compiler. Implementations are frozen dataclasses whose fields are their typed options.

    revision: increase it when a change of `build` makes the same request give other engines. It is part of the
    build key; the backend's code is not.
    install: how to install it.  runtime: the module that opens engines.
    scheme: the form of quantized graph that it compiles best (`optional_methods.SchemesByTarget`).
    """

    name: ClassVar[str]
    revision: ClassVar[int]
    install: ClassVar[str]
    runtime: ClassVar[str]
    scheme: "ClassVar[QuantizationScheme]"
    capabilities: "ClassVar[Capabilities]"

    def serves(self, target: Target) -> bool:
        """Whether this backend compiles for this kind of target (CPU or GPU) at all."""

    def versions(self) -> dict[str, str]:
        """Versions of compiler and runtime that matter, without importing them; empty when not installed."""

    def refuses(self, request: BuildRequest) -> str | None:
        """The reason why this request cannot be built, with the remedy; None if it can. Imports no compiler."""

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The requirements on a machine that runs an engine of this request, as far as the request shows: its processor
        first (`core.requirements.for_target`), then the runtime versions that open it. Imports no compiler."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into a file under `workdir` (`Engine.of_file`).

        Raises EnginesmithError with the compiler's own reason.
        """

    def runs(self, target: Target) -> str | None:
        """The reason why engines for `target` cannot run on this machine; None if they can."""

    def open(self, engine: Engine) -> AbstractContextManager[Session]:
        """Load an engine for running. Raises EnginesmithError if it does not fit this machine."""


def sizes_product(dims: Sequence[Dim], per_dim: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Every combination of the sizes that `per_dim` has for each dim, by its name; the last dim varies fastest."""
    dim_names = [dim.name for dim in dims]
    return (dict(zip(dim_names, sizes, strict=True)) for sizes in product(*(per_dim[name] for name in dim_names)))


# The place of the rows that a graph selects (`onnx_graphs.structure.find_selected`) in an output: along its first axis,
# behind the batch axis, or as a count per sample.
Rows = Literal["all", "each", "count"]
