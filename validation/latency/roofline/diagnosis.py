"""What a time is spent on: arithmetic, moving bytes, or the cost of running anything at all.

Each of the three has a least time on this machine (operations over their rate, bytes over bandwidth, runs and nodes at
what an empty one costs); the one that explains the largest share of the measured time names the bound. What none
explains is said too: kernels that are slower than the machine.

A least time beyond the measured one is no share of it: the limits were measured too slow, as on a machine that others
used meanwhile. Then no share is known, and a bound only where one least time is far larger than the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from validation.latency.roofline.costs import Cost, operations_by_dtype
from validation.latency.roofline.roofs import Roofs

Bound = Literal["compute", "bandwidth", "overhead"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
# A bound that explains less than that share is named with a reservation.
CLEAR = 0.25
# Two measurements of the same thing differ by so much; a least time that exceeds the run by less is all of it.
NOISE = 0.1
# Limits that were measured too slow still say which one it is where it leads by that factor.
CERTAIN = 3.0


@dataclass(frozen=True)
class Diagnosis:
    """Least times over `seconds`. compute: operations at the machine's rate.  bandwidth: bytes at the machine's.

    overhead: what a run and its nodes cost that do nothing.  outside: share of the time that is in no kernel by the
    runtime's profiler; None where that is not known.
    """

    seconds: float
    compute: float
    bandwidth: float
    overhead: float
    outside: float | None = None

    @property
    def sound(self) -> bool:
        """Whether none of them exceeds the whole, so that they are shares of it."""
        return all(ratio <= 1.0 + NOISE for ratio in self._ratios().values())

    @property
    def bound(self) -> Bound | None:
        """The largest of the three; where they are not sound only one that is `CERTAIN` times the others."""
        ratios = self._ratios()
        first, second, _ = sorted(BOUNDS, key=lambda name: -ratios[name])
        return first if self.sound or ratios[first] >= CERTAIN * ratios[second] else None

    @property
    def clear(self) -> bool:
        """Whether the bound explains much of the time."""
        return self.bound is not None and self._ratios()[self.bound] >= CLEAR

    def to_json(self) -> dict[str, Any]:
        """A JSON object: shares of `seconds`, null where they are not sound."""
        told: dict[str, Any] = {"seconds": self.seconds, "outside": self.outside}
        told |= {name: min(ratio, 1.0) if self.sound else None for name, ratio in self._ratios().items()}
        return {**told, "bound": self.bound, "clear": self.clear}

    def _ratios(self) -> dict[Bound, float]:
        return {"compute": self.compute, "bandwidth": self.bandwidth, "overhead": self.overhead}


def diagnose_run(
    seconds: float, costs: Sequence[Cost], roofs: Roofs, footprint_bytes: int, kernels_s: float | None = None
) -> Diagnosis:
    """A whole run. costs: of the nodes that are executed.  footprint_bytes: what it needs at hand: it decides whether
    a cache holds it from run to run.  kernels_s: the time in the nodes, by the profiler."""
    compute = sum(count / roofs.rate(dtype) for dtype, count in operations_by_dtype(costs).items())
    moved = sum(cost.moved_bytes for cost in costs)
    overhead = roofs.run_s + len(costs) * roofs.node_s
    bandwidth = moved / roofs.bandwidth(footprint_bytes)
    outside = _outside(kernels_s, seconds)
    return Diagnosis(seconds, compute / seconds, bandwidth / seconds, overhead / seconds, outside)


def _outside(kernels_s: float | None, seconds: float) -> float | None:
    """What the kernels leave of a run. None where the profiled runs took longer than those that were timed."""
    if kernels_s is None or kernels_s > (1.0 + NOISE) * seconds:
        return None
    return max(0.0, 1.0 - kernels_s / seconds)


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
