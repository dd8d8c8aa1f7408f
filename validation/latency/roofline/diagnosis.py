"""What a time is spent on: arithmetic, moving bytes, or the cost of running anything at all.

Each of the three has a least time on this machine (operations over their rate, bytes over bandwidth, runs and nodes at
what an empty one costs); the one that explains the largest share of the measured time names the bound. What none
explains is said too: kernels that are slower than the machine.

A least time beyond the measured one is no share of it: the limits were measured too slow, as on a machine that others
used meanwhile. Then no share is known, and a bound only where one least time is far larger than the others.
"""

from collections.abc import Sequence

from enginery.core.reports.breakdown import Bound, Diagnosis, NodeCost, Roofs
from validation.latency.roofline.costs import operations_by_dtype

# A bound that explains less than that share is named with a reservation.
CLEAR = 0.25
# Two measurements of the same thing differ by so much; a least time that exceeds the run by less is all of it.
NOISE = 0.1
# Limits that were measured too slow still say which one it is where it leads by that factor.
CERTAIN = 3.0


def diagnose(
    seconds: float, compute: float, bandwidth: float, overhead: float, outside: float | None = None
) -> Diagnosis:
    """What bounds a time. compute, bandwidth: least times, over `seconds`, of its operations and bytes at the machine's
    rates.  overhead: of a run and its nodes that do nothing.  outside: as in `Diagnosis`."""
    ratios: dict[Bound, float] = {"compute": compute, "bandwidth": bandwidth, "overhead": overhead}
    sound = all(ratio <= 1.0 + NOISE for ratio in ratios.values())
    first, second, _ = sorted(ratios, key=lambda name: -ratios[name])
    bound = first if sound or ratios[first] >= CERTAIN * ratios[second] else None
    clear = bound is not None and ratios[bound] >= CLEAR
    compute_share, bandwidth_share, overhead_share = (min(ratio, 1.0) if sound else None for ratio in ratios.values())
    return Diagnosis(seconds, compute_share, bandwidth_share, overhead_share, outside, bound, clear)


def diagnose_run(
    seconds: float, costs: Sequence[NodeCost], roofs: Roofs, footprint_bytes: int, kernels_s: float | None = None
) -> Diagnosis:
    """A whole run. costs: of the nodes that are executed.  footprint_bytes: what it needs at hand: it decides whether
    a cache holds it from run to run.  kernels_s: the time in the nodes, by the profiler."""
    compute = sum(count / roofs.rate(dtype) for dtype, count in operations_by_dtype(costs).items())
    moved = sum(cost.moved_bytes for cost in costs)
    overhead = roofs.run_s + len(costs) * roofs.node_s
    bandwidth = moved / roofs.bandwidth(footprint_bytes)
    outside = _outside(kernels_s, seconds)
    return diagnose(seconds, compute / seconds, bandwidth / seconds, overhead / seconds, outside)


def _outside(kernels_s: float | None, seconds: float) -> float | None:
    """What the kernels leave of a run. None where the profiled runs took longer than those that were timed."""
    if kernels_s is None or kernels_s > (1.0 + NOISE) * seconds:
        return None
    return max(0.0, 1.0 - kernels_s / seconds)


def diagnose_node(seconds: float, cost: NodeCost, roofs: Roofs, footprint_bytes: int) -> Diagnosis:
    """One node. footprint_bytes: what the whole run needs at hand.

    A profiler counts in microseconds; a time under one counts as one.
    """
    seconds = max(seconds, 1e-6)
    parts = (
        cost.operations / roofs.rate(cost.dtype),
        cost.moved_bytes / roofs.bandwidth(footprint_bytes),
        roofs.node_s,
    )
    return diagnose(seconds, *(part / seconds for part in parts))
