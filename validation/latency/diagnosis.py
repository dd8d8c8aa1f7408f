"""What a time is spent on: arithmetic, moving bytes, or the cost of running anything at all.

Each of the three has a least time on this machine (operations over their rate, bytes over bandwidth, runs and nodes at
what an empty one costs); the one that explains the largest share of the measured time names the bound. What none
explains is said too: kernels that are slower than the machine.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from validation.latency.costs import Cost, operations_by_dtype
from validation.latency.roofs import Roofs

Bound = Literal["compute", "bandwidth", "overhead"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
# A bound that explains less than that share is named with a reservation.
CLEAR = 0.25


@dataclass(frozen=True)
class Diagnosis:
    """Shares of `seconds`. compute: its operations at the machine's rate.  bandwidth: its bytes at the machine's.

    overhead: what a run and its nodes cost that do nothing.  outside: of the time, not in any kernel by the runtime's
    profiler; None where it has none.
    """

    seconds: float
    compute: float
    bandwidth: float
    overhead: float
    outside: float | None = None

    @property
    def bound(self) -> Bound:
        """The largest of the three."""
        return max(BOUNDS, key=lambda name: float(getattr(self, name)))

    @property
    def share(self) -> float:
        """What the bound explains."""
        return float(getattr(self, self.bound))

    @property
    def clear(self) -> bool:
        """Whether that is much of it."""
        return self.share >= CLEAR

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "bound": self.bound, "clear": self.clear}


def diagnose_run(
    seconds: float, costs: Sequence[Cost], roofs: Roofs, footprint_bytes: int, kernels_s: float | None = None
) -> Diagnosis:
    """A whole run. costs: of the nodes that are executed.  footprint_bytes: what it needs at hand: it decides whether
    a cache holds it from run to run.  kernels_s: the time in the nodes, by the profiler."""
    compute = sum(count / roofs.rate(dtype) for dtype, count in operations_by_dtype(costs).items())
    moved = sum(cost.moved_bytes for cost in costs)
    overhead = roofs.run_s + len(costs) * roofs.node_s
    outside = None if kernels_s is None else max(0.0, 1.0 - kernels_s / seconds)
    bandwidth = moved / roofs.bandwidth(footprint_bytes)
    return Diagnosis(seconds, compute / seconds, bandwidth / seconds, overhead / seconds, outside)


def diagnose_node(seconds: float, cost: Cost, roofs: Roofs, footprint_bytes: int) -> Diagnosis:
    """One node. footprint_bytes: what the whole run needs at hand.

    A profiler counts in microseconds; a time under one counts as one.
    """
    seconds = max(seconds, 1e-6)
    parts = (
        cost.operations / roofs.rate(cost.dtype),
        cost.moved_bytes / roofs.bandwidth(footprint_bytes),
        roofs.node_s,
    )
    return Diagnosis(seconds, *(part / seconds for part in parts))
