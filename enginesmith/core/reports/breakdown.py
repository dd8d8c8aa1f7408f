"""The times of one run, by node and by limiting resource, and the quantization record of a graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from enginesmith.core.requirements import Format

Bound = Literal["compute", "bandwidth", "overhead"]


def product_dtype(dtype: str) -> str:
    """The dtype whose measured matrix-product rate is used for `dtype`: 'int8' for int8 and uint8, else 'float32'."""
    return "int8" if dtype in ("int8", "uint8") else "float32"


@dataclass(frozen=True)
class NodeCost:
    """Computation and memory traffic of one node, or the sum over several. macs: multiply-adds.  operations: two per
    multiply-add, and all others.

    dtype: of the computation.  known: False if the operator has no counting rule; its operations are then 0.
    intensity: operations per byte moved.
    """

    name: str
    op_type: str
    dtype: str
    macs: int
    operations: int
    read_bytes: int
    written_bytes: int
    known: bool = True
    intensity: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "intensity", self.operations / self.moved_bytes if self.moved_bytes else 0.0)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class GraphCost(NodeCost):
    """The sum over all nodes of a graph. working_bytes: size of all tensors of one run.  by_dtype: operations by dtype.

    uncounted: operator types without a counting rule.  unsized: nodes with a tensor of unknown shape.
    """

    nodes: int
    working_bytes: int
    by_dtype: Mapping[str, int]
    uncounted: tuple[str, ...]
    unsized: tuple[str, ...]


@dataclass(frozen=True)
class MemoryTraffic:
    """Bytes that one run moves, without and with operator fusion. groups: number of fused groups of nodes.
    source: 'runtime' if the runtime reported the groups, 'model' if the greedy fusion model computed them.

    saved: share of the unfused bytes that fusion avoids; negative if the runtime added conversions.
    unfused_bytes, fused_bytes: if each node accesses memory, and if only each group does.
    """

    unfused_bytes: int
    fused_bytes: int
    nodes: int
    groups: int
    source: Literal["runtime", "model"]
    saved: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved", 1.0 - self.fused_bytes / self.unfused_bytes if self.unfused_bytes else 0.0)


@dataclass(frozen=True)
class Roofs:
    """Measured limits of a machine. operations_per_s: by dtype.  memory_bytes_per_s, cache_bytes_per_s: bandwidths.
    cache_bytes: footprints up to this size fit the cache: half of the last-level cache.  run_s, node_s: fixed cost of a
    run, and of each node in it, in seconds."""

    operations_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    cache_bytes_per_s: float
    cache_bytes: int
    run_s: float
    node_s: float

    def bandwidth(self, footprint_bytes: float) -> float:
        """Bandwidth in bytes per second for a footprint: that of the cache or of the memory."""
        return self.cache_bytes_per_s if footprint_bytes <= self.cache_bytes else self.memory_bytes_per_s

    def rate(self, dtype: str) -> float:
        """Operations per second in a dtype; those in float32 if that dtype was not measured."""
        return self.operations_per_s.get(product_dtype(dtype), self.operations_per_s["float32"])


@dataclass(frozen=True)
class Diagnosis:
    """What limits a measured time. compute, bandwidth, overhead: the share of `seconds` that each lower bound explains;
    all None if one lower bound exceeds `seconds` (`diagnose`).

    outside: share of the time outside kernels, from the runtime's profiler; None if unknown.  bound: the largest share;
    None if the limits do not decide.  clear: whether the bound explains much of the time.
    """

    seconds: float
    compute: float | None
    bandwidth: float | None
    overhead: float | None
    outside: float | None
    bound: Bound | None
    clear: bool

    def share(self, bound: Bound) -> float | None:
        """The share of the time that one bound explains; None if unknown."""
        return {"compute": self.compute, "bandwidth": self.bandwidth, "overhead": self.overhead}[bound]


@dataclass(frozen=True)
class TimedNode:
    """A node that the runtime executed. seconds: mean per run.  cost: None if only times are known.

    name, op_type: as the runtime names them.  diagnosis: what limits the node; None without cost or limits.
    """

    name: str
    op_type: str
    seconds: float
    cost: NodeCost | None
    diagnosis: Diagnosis | None


@dataclass(frozen=True)
class OperatorTime:
    """The time of all nodes of one operator type. seconds: mean per run.  share: of the time of all nodes."""

    op_type: str
    nodes: int
    seconds: float
    share: float


@dataclass(frozen=True)
class NodeTimes:
    """Times measured by the runtime's profiler. seconds: of a profiled run; kernels_s: of all its nodes.

    nodes: the slowest, slowest first; omitted: the number of other nodes.  uncounted: as in `GraphCost`.
    """

    runs: int
    seconds: float
    kernels_s: float
    op_types: tuple[OperatorTime, ...]
    nodes: tuple[TimedNode, ...]
    omitted: int
    uncounted: tuple[str, ...]


@dataclass(frozen=True)
class TimeBreakdown:
    """The times of one run at one bucket. graph: cost of the graph that the engine was built from.

    profile: None if the runtime reports no nodes.  roofs, diagnosis: None if the machine's limits were not measured.
    """

    bucket: str
    graph: GraphCost
    traffic: MemoryTraffic
    roofs: Roofs | None
    diagnosis: Diagnosis | None
    profile: NodeTimes | None


# The quantization record of one graph: the error of each quantized tensor, and the nodes left in float.
#
# `pipeline.quantization.record` creates it; a registry stores it as JSON (`core.codec`). SQNR is in decibels.

Span = tuple[float, float]


@dataclass(frozen=True)
class FloatNode:
    """A node that stays in float (in fp32 if the graph is fp16 or bf16), or that has a wider format; and the reason."""

    node: str
    op_type: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op_type}): {self.reason}"


@dataclass(frozen=True)
class TensorHistogram:
    """A histogram of a tensor's values: counts in bins of equal width from the lower to the upper end of `span`."""

    span: Span
    counts: tuple[float, ...]


@dataclass(frozen=True)
class QuantizedTensor:
    """The quantization of one tensor. role: 'activation' or 'weight'.  readers: nodes that consume it.

    range: smallest and largest representable value; for an int8 weight, those that its scheme uses.  scale: for a
    weight, the largest of its channels.  seen: smallest and largest float value.  clipped: share of the values that
    saturate.  sqnr_db: if only this tensor is quantized; None without any error, or if not measured.  measured:
    'histogram' (over all samples), 'rows' (over some rows of a smoothed activation) or 'weight' (against the float
    weight, value by value).  histogram: only for the activations with the largest errors.
    """

    name: str
    role: str
    format: str
    readers: tuple[str, ...]
    range: Span
    scale: float
    seen: Span | None = None
    clipped: float | None = None
    sqnr_db: float | None = None
    measured: str | None = None
    histogram: TensorHistogram | None = None


@dataclass(frozen=True)
class SearchPoint:
    """A point of a mixed-precision search. share: of the multiplications with weights in the searched precision.

    predicted_db: SQNR predicted from the errors of single groups.  sqnr_db, cosine: measured on the whole model, or
    None.  left: number of groups that stay in float.  argmax_agreement: share of unchanged decisions.  accuracy: share
    of correct ones, if there are labels.  ms: duration of a run.  weight_bytes: size of the weights.
    """

    share: float
    predicted_db: float | None
    sqnr_db: float | None
    cosine: float | None
    left: int
    argmax_agreement: float | None = None
    accuracy: float | None = None
    ms: float | None = None
    weight_bytes: int | None = None


@dataclass(frozen=True)
class RecordedSearch:
    """The summary of a mixed-precision search. floor_db: the required SQNR.  chosen: the point that was built.

    table: points that were run, with their cost, the fastest first.  latency: whether times are measured or modelled,
    and the source.  rule: the reason for `chosen`.
    """

    floor_db: float | None
    frontier: tuple[SearchPoint, ...]
    chosen: SearchPoint
    table: tuple[SearchPoint, ...] = ()
    latency: str = ""
    rule: str = ""


@dataclass(frozen=True)
class QuantizationRecord:
    """The quantization of one graph. method, dataset, samples: of the calibration.  quantized: number of nodes that
    compute in `precision`.

    macs_share: share of the multiplications with weights in `precision`; None if there are none.
    tensors: the largest error first.  left: nodes that stay in float.  choice: the mixed-precision search, if any.
    """

    format: Annotated[int, Format(1)]
    precision: str
    method: str
    samples: int
    dataset: str
    quantized: int
    macs_share: float | None
    tensors: tuple[QuantizedTensor, ...]
    left: tuple[FloatNode, ...]
    choice: RecordedSearch | None
