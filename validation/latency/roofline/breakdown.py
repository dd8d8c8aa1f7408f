"""What a time is spent on: arithmetic, moving bytes, or the cost of running anything at all.

Each of the three has a least time on this machine (operations over their rate, bytes over bandwidth, runs and nodes at
what an empty one costs); the one that explains the largest share of the measured time names the bound. What none
explains is said too: kernels that are slower than the machine.

A least time beyond the measured one is no share of it: the limits were measured too slow, as on a machine that others
used meanwhile. Then no share is known, and a bound only where one least time is far larger than the others.

Bytes that fusing saves, by the traffic model: unfused, every node reads its inputs from memory and writes its
outputs there; fused, only what crosses from one group of nodes to another is moved.

The groups are the nodes that the runtime executes, where it shows them. Where it does not, they come from a greedy
model: a dequantization belongs to what reads it, and a node that works value by value (a QuantizeLinear too) joins
what made its input, provided that nobody else reads that. This is the common part of what compilers do ("vertical"
fusion; see Niu et al., DNNFusion, PLDI 2021, for what more there is), so its saving is a lower estimate.

Where the time of a run goes: its nodes, what they must do, what the machine could, and what fusing saved.
"""

from collections.abc import Mapping, Sequence

from builders.backends.optional_methods import NodeTime, RunProfile
from enginery.core.reports.breakdown import (
    Bound,
    Diagnosis,
    MemoryTraffic,
    NodeCost,
    NodeTimes,
    OperatorTime,
    Roofs,
    TimeBreakdown,
    TimedNode,
)
from validation.latency.roofline.costs import ELEMENTWISE, cost_of_node, graph_cost, list_uncounted, operations_by_dtype
from validation.latency.roofline.graph_costs import GraphCosts, GraphNode

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


def traffic(graph: GraphCosts, executed: Sequence[NodeCost] = ()) -> MemoryTraffic:
    """Of the graph that an engine was built from. executed: the nodes that the runtime runs, where it says so."""
    unfused = sum(cost.moved_bytes for cost in graph.costs)
    if executed:
        fused = sum(cost.moved_bytes for cost in executed)
        return MemoryTraffic(unfused, fused, len(graph.nodes), len(executed), "runtime")
    found = greedy_groups(graph)
    return MemoryTraffic(
        unfused, sum(_count_crossing_bytes(group, graph) for group in found), len(graph.nodes), len(found), "model"
    )


def greedy_groups(graph: GraphCosts) -> list[list[GraphNode]]:
    """The nodes in groups, in the order of their first nodes. Dequantizations are in none: their readers read through
    them."""
    through = _map_dequantized(graph)
    readers: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.reads:
            readers[name] = readers.get(name, 0) + 1
    kept = set(graph.outputs)
    group_of: dict[str, int] = {}
    groups: list[list[GraphNode]] = []
    for original in graph.nodes:
        if original.cost.op_type == "DequantizeLinear" and not kept & original.makes.keys():
            continue
        node = _reading_through(original, through)
        joined = [group_of[name] for name in node.reads if name in group_of and readers[name] == 1 and name not in kept]
        fuses = node.cost.op_type in ELEMENTWISE and joined
        at = max(joined) if fuses else len(groups)
        if fuses:
            groups[at].append(node)
        else:
            groups.append([node])
        group_of |= dict.fromkeys(node.makes, at)
    return groups


def _map_dequantized(graph: GraphCosts) -> Mapping[str, Mapping[str, int]]:
    """By the name of a dequantized tensor: what its dequantization reads, with the bytes."""
    return {name: node.reads for node in graph.nodes if node.cost.op_type == "DequantizeLinear" for name in node.makes}


def _reading_through(node: GraphNode, through: Mapping[str, Mapping[str, int]]) -> GraphNode:
    reads: dict[str, int] = {}
    for name, size in node.reads.items():
        reads |= through.get(name, {name: size})
    return GraphNode(node.cost, reads, node.makes)


def _count_crossing_bytes(group: Sequence[GraphNode], graph: GraphCosts) -> int:
    """Bytes that the group reads from outside and that it makes for outside."""
    if all(node.cost.moved_bytes == 0 for node in group):
        return 0
    made = {name: size for node in group for name, size in node.makes.items()}
    inside = {id(node.cost) for node in group}
    wanted = set(graph.outputs) | {name for node in graph.nodes if id(node.cost) not in inside for name in node.reads}
    read = {name: size for node in group for name, size in node.reads.items() if name not in made}
    return sum(read.values()) + sum(size for name, size in made.items() if name in wanted)


# Nodes that are kept of a large model, the slowest first.
MOST_NODES = 200


def break_down(
    bucket: str, seconds: float, graph: GraphCosts, profile: RunProfile | None, roofs: Roofs | None
) -> TimeBreakdown:
    """Put together what was measured. seconds: the median of a run at this bucket, without a profiler.

    profile: None where the runtime shows none.  roofs: None where the machine's limits were not measured.
    """
    executed = executed_costs(profile)
    kernels = sum(node.seconds for node in profile.nodes) if profile else None
    costs = executed or graph.costs
    return TimeBreakdown(
        bucket=bucket,
        graph=graph_cost(graph.costs, graph.working_bytes, graph.unsized),
        traffic=traffic(graph, executed),
        roofs=roofs,
        diagnosis=diagnose_run(seconds, costs, roofs, graph.working_bytes, kernels) if roofs else None,
        profile=_node_times(profile, executed, roofs, graph.working_bytes) if profile else None,
    )


def executed_costs(profile: RunProfile | None) -> list[NodeCost]:
    """What each executed node must do; nothing where the runtime tells times alone."""
    if profile is None or not any(node.outputs for node in profile.nodes):
        return []
    return [cost_of_node(node) for node in profile.nodes]


def _node_times(profile: RunProfile, executed: list[NodeCost], roofs: Roofs | None, footprint: int) -> NodeTimes:
    costs: Sequence[NodeCost | None] = executed or [None] * len(profile.nodes)
    rows = [_timed_node(node, cost, roofs, footprint) for node, cost in zip(profile.nodes, costs, strict=True)]
    kernels = sum(node.seconds for node in profile.nodes)
    return NodeTimes(
        runs=profile.runs,
        seconds=profile.seconds,
        kernels_s=kernels,
        op_types=_by_type(profile.nodes, kernels),
        nodes=tuple(sorted(rows, key=lambda row: -row.seconds)[:MOST_NODES]),
        omitted=max(0, len(rows) - MOST_NODES),
        uncounted=list_uncounted(executed),
    )


def _timed_node(node: NodeTime, cost: NodeCost | None, roofs: Roofs | None, footprint: int) -> TimedNode:
    diagnosis = diagnose_node(node.seconds, cost, roofs, footprint) if roofs and cost else None
    return TimedNode(node.name, node.op_type, node.seconds, cost, diagnosis)


def _by_type(nodes: Sequence[NodeTime], whole: float) -> tuple[OperatorTime, ...]:
    found: dict[str, list[float]] = {}
    for node in nodes:
        found.setdefault(node.op_type, []).append(node.seconds)
    rows = [
        OperatorTime(kind, len(times), sum(times), sum(times) / whole if whole else 0.0)
        for kind, times in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))
