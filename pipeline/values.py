"""The values that the steps exchange: small and frozen. Large data is in the artifact store; values have its digest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from enginesmith.core.reports.proof import Check, FreeRunning, Spread
from enginesmith.core.requirements import Library, Requirement
from enginesmith.core.text import pluralize
from enginesmith.core.types import (
    BLOCK_FLOATS,
    BuildFailure,
    BuildRequest,
    Dim,
    Precision,
    QuantizationScheme,
    QuantizedState,
    Target,
    TensorSpec,
    WeightLevels,
)

Json = dict[str, Any]
# Digest and size in bytes of each shard of a graph or an engine (`builders.onnx_graphs.outline`).
Shards = tuple[tuple[str, int], ...]
# Kinds of int8 activations, as in `QuantizationScheme`.
Activation = Literal["int8", "uint8"]


@dataclass(frozen=True)
class OnnxModel:
    """The exported model. digest: of the canonical ONNX file.  carries_qdq: whether its author quantized it (QAT).

    blake3: of that file; None if the worker that uploaded it did not have the library.
    integer_nodes: (operator, count) of the source model's nodes that multiply in int8; every variant has them.
    narrow_share: of a model with Q/DQ, the share of its multiplications with weights that Q/DQ makes narrow.
    library_entries: the function that runtimes call, for each library with operators of the model.
    inputs, outputs: of the model.  opset: of ONNX's own operators.
    """

    digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    carries_qdq: bool
    blake3: str | None = None
    integer_nodes: tuple[tuple[str, int], ...] = ()
    shards: Shards = ()
    narrow_share: float | None = None
    library_entries: tuple[str, ...] = ()

    @property
    def blobs(self) -> list[str]:
        """Digests of the model's file and of its shards."""
        return [self.digest, *dict(self.shards)]

    @property
    def own_int8(self) -> str | None:
        """'23 nodes compute in int8, as in the source model (22 ConvInteger, 1 MatMulInteger)'; or None."""
        if not self.integer_nodes:
            return None
        count_text = pluralize(sum(number for _, number in self.integer_nodes), "node computes", "nodes compute")
        operator_text = ", ".join(f"{number} {operator}" for operator, number in self.integer_nodes)
        return f"{count_text} in int8, as in the source model ({operator_text})"


@dataclass(frozen=True)
class Selection:
    """The part of a spec that a run asks for; empty means all.

    workers: (target, place) of each GPU that the run can build on; place: 'here' or 'on a Ray worker with sm_90'.
    targets, precisions, backends: the requested ones.
    """

    targets: tuple[Target, ...] = ()
    precisions: tuple[Precision, ...] = ()
    backends: tuple[str, ...] = ()
    workers: tuple[tuple[str, str], ...] = ()

    def covers(self, target: Target, precision: Precision, backend: str) -> bool:
        """Whether the run asks for this unit."""
        return (
            (not self.targets or target in self.targets)
            and (not self.precisions or precision in self.precisions)
            and (not self.backends or backend in self.backends)
        )


# The whole spec.
EVERYTHING = Selection()


@dataclass(frozen=True)
class ModelShapes:
    """The inputs of a model, and the dims in their shapes."""

    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class EngineBlob:
    """An engine in the artifact store. digest: of its file.  suffix: of its file's name.  request: what it was built
    from.  libraries: with its operators."""

    request: BuildRequest
    digest: str
    suffix: str
    libraries: tuple[Library, ...] = ()

    @classmethod
    def of(cls, request: BuildRequest, digest: str, suffix: str, requires: Iterable[Requirement]) -> "EngineBlob":
        """An engine with the libraries among its requirements.

        request: what it was built from.  digest, suffix: of its file.  requires: as in `Engine`.
        """
        return cls(request, digest, suffix, tuple(library for library in requires if isinstance(library, Library)))


@dataclass(frozen=True)
class Observed:
    """The observations of calibration samples.  observations: blob: statistics of each tensor, from which all methods
    choose ranges.  inputs: blob: a digest of each sample, which identifies golden samples among them.

    seen: digest of the statistics.  samples: their number.
    """

    observations: str
    inputs: str
    seen: str
    samples: int


@dataclass(frozen=True)
class StepFailure:
    """The failure of a step, in place of its result. kind, log: as in `StepError`."""

    reason: str
    kind: str = "error"
    log: str = ""


@dataclass(frozen=True)
class SearchResult:
    """A search's choice for one kind of int8 or block format.  model, ranges, choice, smoothed: blobs: the float model,
    its ranges, the choice with its reasons, and the statistics of smoothed activations.

    left: nodes that remain in float, with the reason.  share: of the multiplications with weights in this precision.
    summary: for people.  ended: the progress when the time limit ended it; '' if complete.  formats: of `left`.
    """

    model: str
    ranges: str
    choice: str
    smoothed: str
    left: Mapping[str, str]
    share: float
    summary: str
    ended: str = ""
    formats: Mapping[str, Precision] = field(default_factory=dict)


# The note on a unit whose graph failed.
NOT_BUILT = "it was not built, because the graph that it is built from failed its own checks"


@dataclass(frozen=True)
class Recorded:
    """The record of a built engine. build: its build key.  digest, blake3: of its file; blake3 is None if the worker
    did not have the library.  seconds: of the compiler.  requires, notes: as in `Engine`.

    extras: name -> digest of the build's other files (`Engine.extras`).
    refitted_from: digest of the engine whose kernels this one has, with other weights; None if it was compiled.
    shards: files that the engine's file names."""

    build: str
    digest: str
    size_bytes: int
    suffix: str
    seconds: float
    requires: tuple[Requirement, ...]
    notes: tuple[str, ...] = ()
    blake3: str | None = None
    extras: Mapping[str, str] = field(default_factory=dict)
    refitted_from: str | None = None
    shards: Shards = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of the blobs that the engine is made of, by digest."""
        return {self.digest: self.size_bytes, **dict(self.shards)}


@dataclass(frozen=True)
class ReducedWorkspace:
    """The replacement of a request whose build ran out of memory: the same request with a smaller workspace."""

    request: BuildRequest


@dataclass(frozen=True)
class LatestGolden:
    """Digest of the golden set that a registry last recorded for a model."""

    golden: str


@dataclass(frozen=True)
class Proof:
    """The measurements of one stage (export, quantization or engine). metrics: (name, value) of task metrics.
    checks: with their limits.  free_running: drift along sequences."""

    checks: tuple[Check, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    spreads: tuple[Spread, ...] = ()
    free_running: tuple[FreeRunning, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


@dataclass(frozen=True)
class KeptAnswers:
    """The outputs of a graph, run as written, for a golden set.  blob: digest.  machine: that ran the graph
    (`blobs.this_machine`)."""

    blob: str
    machine: str


@dataclass(frozen=True)
class Exported:
    """A model with its golden set, and the parity of framework and ONNX. notes: for people.

    reads: digest of all inputs of the export.  answers: the model's outputs for the golden set; None if large.
    golden_inputs: digest of the digests of the golden samples (`validation.data.joined`); None if they are random.
    """

    model: OnnxModel
    golden: str
    proof: Proof
    notes: tuple[str, ...] = ()
    golden_inputs: str | None = None
    reads: str = ""
    answers: KeptAnswers | None = None


@dataclass(frozen=True)
class GraphVariant:
    """One way to write the model for a precision.

    scheme: only of quantized precisions.  native_io: only of fp16: whether inputs and outputs are fp16, too.
    """

    precision: Precision
    scheme: QuantizationScheme | None = None
    native_io: bool = False

    @property
    def name(self) -> str:
        """'fp16', or 'int8 (uint8 activations, fp32 elsewhere)'. Variants with equal names share a graph."""
        if self.scheme is None:
            return f"{self.precision} ({self.precision} inputs and outputs)" if self.native_io else self.precision
        terms = [f"{self.scheme.activation} activations"] if self.precision == "int8" else []
        # Biases only if they are not the default for the activations.
        terms += (
            ["biases in float"] if terms and self.scheme.activation == "uint8" and not self.scheme.quantize_bias else []
        )
        terms += _of_weights(self.scheme.weight_levels) if self.precision in ("int8", "int8-dynamic") else []
        return f"{self.precision} ({', '.join([*terms, f'{self.scheme.float_precision} elsewhere'])})"

    @property
    def searched(self) -> "Searched | None":
        """The kind of search that this variant needs; None for a precision without a search."""
        if self.precision not in ("int8", "fp8", *BLOCK_FLOATS) or self.scheme is None:
            return None
        return Searched(self.scheme.activation, self.scheme.weight_levels, self.precision)


class Searched(NamedTuple):
    """The subject of a search: a kind of int8, whose fields are those of `QuantizationScheme`, or a block format."""

    activation: Activation
    weight_levels: WeightLevels = 127
    precision: Precision = "int8"

    @property
    def name(self) -> str:
        """'int8 (uint8 activations)', or 'nvfp4'."""
        if self.precision != "int8":
            return self.precision
        return f"int8 ({', '.join([f'{self.activation} activations', *_of_weights(self.weight_levels)])})"


def _of_weights(levels: WeightLevels) -> list[str]:
    return ["7-bit weights"] if levels == 64 else []


@dataclass(frozen=True)
class Recipe:
    """How a graph was written, as blobs. digest: the recipe.  model: the float model that was quantized, if a search
    wrote it; None: the exported model."""

    digest: str
    model: str | None = None


class ModelledFigures(NamedTuple):
    """One figure of a quantized graph, and the same figure of the model in fp32 and in fp16."""

    quantized: float
    fp32: float
    fp16: float


@dataclass(frozen=True)
class Graph:
    """The model in one graph variant. model: digest of the ONNX.  scales: digest of its calibrated ranges.

    inputs, outputs: as this graph declares them.  record: digest of a blob: the quantization of each tensor.
    recipe: of a graph that the pipeline wrote.  idle: why no node computes in the graph's precision; None if one does.
    own_int8, shards: as in `OnnxModel`.  searched: why a search ran without a request, and its result.
    failure: why it could not be observed, searched, written or compared; `model` is then the exported one.
    quantized_states: states that the graph rounds, and that are int8 in its engines.  notes: for users.
    share: the part of the multiplications with weights that is in the graph's precision (`quantization.shares`).
    modelled: milliseconds of a run at peak rates, by name in `rates.PEAKS`; under 'bytes' the size of all weights."""

    variant: GraphVariant
    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scales: str | None = None
    notes: tuple[str, ...] = ()
    proof: Proof = Proof()
    record: str | None = None
    recipe: Recipe | None = None
    idle: str | None = None
    own_int8: str | None = None
    shards: Shards = ()
    searched: str | None = None
    failure: StepFailure | None = None
    share: float | None = None
    quantized_states: tuple[QuantizedState, ...] = ()
    modelled: Mapping[str, ModelledFigures] = field(default_factory=dict)

    @property
    def shard_bytes(self) -> int:
        """Total size of the shards in bytes."""
        return sum(size for _, size in self.shards)


@dataclass(frozen=True)
class Attributed:
    """The node that drifted in a graph or an engine. stage: 'quantization' or 'engine'.  units: that use it.

    digest: of the attribution's blob (`validation.attribution.result`); None without one.  headline: its finding in
    one line, or why it is missing.  snippet: YAML for the spec that repairs the drift, or ''.
    """

    stage: str
    name: str
    units: tuple[str, ...]
    digest: str | None
    headline: str
    snippet: str = ""


@dataclass(frozen=True)
class Unit:
    """One engine of the plan. reason: of the action, for people.

    action: 'build', 'cached', 'refused', or 'failed' if its graph failed; it is then not built.
    request, graph: of the engine.  required: whether the spec's `build.required` names it.
    gain: text on the gain of a quantized engine over floats, or ''.  local: the same text if measured on this machine.
    """

    request: BuildRequest
    graph: Graph
    action: str
    reason: str
    required: bool = False
    gain: str = ""
    local: str = ""

    @property
    def published_reason(self) -> str:
        """The reason without figures that differ from build to build."""
        return self.reason.replace(self.local, "it showed no gain over floats") if self.local else self.reason

    @property
    def name(self) -> str:
        """'sm_89 int8 tensorrt-rtx'."""
        return self.request.unit


@dataclass(frozen=True)
class BuildPlan:
    """Every unit, in the order of the spec."""

    model: str
    units: tuple[Unit, ...]

    @property
    def wanted(self) -> tuple[Unit, ...]:
        """The units that are not refused: to be built, cached, or failed with their graph."""
        return tuple(unit for unit in self.units if unit.action != "refused")

    @property
    def refused(self) -> tuple[Unit, ...]:
        """The units that are not built, each with its reason."""
        return tuple(unit for unit in self.units if unit.action == "refused")


@dataclass(frozen=True)
class Built:
    """A unit with the record of its engine or with the failure of its build; with neither if its graph failed.
    cached: whether the engine existed before this run."""

    unit: Unit
    record: Recorded | None = None
    cached: bool = False
    failure: BuildFailure | None = None

    @property
    def digest(self) -> str | None:
        """Digest of the engine's file; None without one."""
        return self.record.digest if self.record else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the engine, or the note that it was not built."""
        if self.record:
            return self.record.notes
        return (NOT_BUILT,) if self.unit.action == "failed" and not self.failure else ()

    @property
    def blob(self) -> EngineBlob:
        """The engine in the store; without an engine, its digest is ''."""
        if self.record is None:
            return EngineBlob(self.unit.request, "", "")
        return EngineBlob.of(self.unit.request, self.record.digest, self.record.suffix, self.record.requires)
