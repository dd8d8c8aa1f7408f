"""The part of a latency report that says where the time of a run goes. Standard library only, as `report` is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Bound = Literal["compute", "bandwidth", "overhead"]


def product_dtype(dtype: str) -> str:
    """The type whose product is measured for this one: 'int8' or 'float32'."""
    return "int8" if dtype in ("int8", "uint8") else "float32"


@dataclass(frozen=True)
class NodeCost:
    """Of one node or of many. macs: multiply-adds.  operations: two for each of them, and all others.

    dtype: what it computes in.  known: False for an operator whose operations nobody counted: 0, but bytes count.
    intensity: operations for each byte.
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
        """Read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class GraphCost(NodeCost):
    """Of all nodes of a graph. working_bytes: what one run needs at hand.  by_dtype: operations by type.

    uncounted: operators that nobody counted.  unsized: nodes with a tensor whose shape is not known.
    """

    nodes: int
    working_bytes: int
    by_dtype: Mapping[str, int]
    uncounted: tuple[str, ...]
    unsized: tuple[str, ...]


@dataclass(frozen=True)
class MemoryTraffic:
    """Bytes of one run. groups: of nodes, when fused.  source: whose groups: the runtime's, or the greedy model's.

    saved: share of the unfused bytes that is not moved; negative where the runtime added conversions.
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
    """operations_per_s: by type.  memory, cache: bytes a second.  cache_bytes: what counts as held by a cache: half of
    the last-level one.  run_s, node_s: of a run, and of each node in it."""

    operations_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    cache_bytes_per_s: float
    cache_bytes: int
    run_s: float
    node_s: float

    def bandwidth(self, footprint_bytes: float) -> float:
        """Bytes a second at which so many bytes can come and go."""
        return self.cache_bytes_per_s if footprint_bytes <= self.cache_bytes else self.memory_bytes_per_s

    def rate(self, dtype: str) -> float:
        """Operations a second in a type; of float32 where that type was not measured."""
        return self.operations_per_s.get(product_dtype(dtype), self.operations_per_s["float32"])


@dataclass(frozen=True)
class Diagnosis:
    """What bounds a time in seconds. compute, bandwidth, overhead: shares of it that the least time of each explains.

    None, all three, where one exceeded the whole (`diagnose`).  outside: share that is in no kernel by the
    runtime's profiler; None where that is not known.  bound: the largest share; None where the limits do not say.
    clear: whether the bound explains much of the time.
    """

    seconds: float
    compute: float | None
    bandwidth: float | None
    overhead: float | None
    outside: float | None
    bound: Bound | None
    clear: bool

    def share(self, bound: Bound) -> float | None:
        """The share of one of the three."""
        return {"compute": self.compute, "bandwidth": self.bandwidth, "overhead": self.overhead}[bound]


@dataclass(frozen=True)
class TimedNode:
    """A node that the runtime executed. seconds: mean of a run.  cost: None where the runtime tells times alone."""

    name: str
    op_type: str
    seconds: float
    cost: NodeCost | None
    diagnosis: Diagnosis | None


@dataclass(frozen=True)
class OperatorTime:
    """The time of all nodes of one type. share: of the time of all nodes."""

    op_type: str
    nodes: int
    seconds: float
    share: float


@dataclass(frozen=True)
class NodeTimes:
    """What the runtime's profiler told. seconds: of a run under it; kernels_s: of the nodes together.

    nodes: the slowest, slowest first; omitted: how many more there are.  uncounted: as in `GraphCost`.
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
    """Where the time of one run at one bucket goes. graph: that the engine was built from.

    profile: None where the runtime shows no nodes.  roofs, diagnosis: None where the machine's limits were not
    measured.
    """

    bucket: str
    graph: GraphCost
    traffic: MemoryTraffic
    roofs: Roofs | None
    diagnosis: Diagnosis | None
    profile: NodeTimes | None
