"""Breaks down the time of a run: time and cost of its nodes, its bound, and the memory traffic that fusion saves.

A time is bound by arithmetic, by moving bytes, or by overhead. Each of the three has a least time on this machine
(operations over their rate, bytes over bandwidth, the cost of an empty run and of each node). The bound is the one with
the longest least time. The unexplained rest is due to kernels that use the machine badly.

If a least time is longer than the measured time, the machine's limits were measured too slow, for example because
others used the machine. Then there are no shares, and a bound only if one least time is far longer than the others.

Memory traffic: unfused, every node reads its inputs from memory and writes its outputs there; fused, only tensors that
cross from one group of nodes to another are moved. The groups are the nodes that the runtime executes, if it reports
them. Otherwise a greedy model forms them: a dequantization is part of its readers, and an elementwise node (also a
QuantizeLinear) joins the node that computes its input, if it is the only reader. All compilers do at least this
("vertical" fusion; Niu et al., DNNFusion, PLDI 2021, has more): the saving is a lower estimate.
"""

from collections import Counter
from collections.abc import Sequence

from builders.backends.optional_methods import RunProfile
from enginesmith.core.reports.breakdown import (
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
from validation.latency.roofline.costs import (
    ELEMENTWISE,
    GraphCosts,
    GraphNode,
    cost_of,
    graph_cost,
    list_uncounted,
    operations_by_dtype,
)

# A bound must explain at least this share of the time to be clear.
CLEAR = 0.25
# Relative noise of a measurement: a least time that exceeds the run's time by less counts as the whole time.
NOISE = 0.1
# If the limits were measured too slow, one least time must exceed the others by this factor to be the bound.
CERTAIN = 3.0
# The number of nodes to report for a large model, the slowest first.
MOST_NODES = 200


def diagnose(
    seconds: float, compute: float, bandwidth: float, overhead: float, outside: float | None = None
) -> Diagnosis:
    """The bound of a time. compute, bandwidth, overhead: least times of the operations, of the bytes and of an empty
    run with as many nodes, each over `seconds`.  outside: as in `Diagnosis`."""
    ratios: dict[Bound, float] = {"compute": compute, "bandwidth": bandwidth, "overhead": overhead}
    is_fit = all(ratio <= 1.0 + NOISE for ratio in ratios.values())
    nearest_bound, next_bound, _ = sorted(ratios, key=lambda name: -ratios[name])
    bound = nearest_bound if is_fit or ratios[nearest_bound] >= CERTAIN * ratios[next_bound] else None
    is_clear = bound is not None and ratios[bound] >= CLEAR
    compute_share, bandwidth_share, overhead_share = (min(ratio, 1.0) if is_fit else None for ratio in ratios.values())
    return Diagnosis(seconds, compute_share, bandwidth_share, overhead_share, outside, bound, is_clear)


def diagnose_run(
    seconds: float, costs: Sequence[NodeCost], roofs: Roofs, footprint_bytes: int, kernels_s: float | None = None
) -> Diagnosis:
    """The bound of a run. costs: of the executed nodes.  kernels_s: the time in these nodes, by the profiler.

    footprint_bytes: the working set of the run, which determines whether it stays in a cache from run to run.
    """
    compute_s = sum(count / roofs.rate(dtype) for dtype, count in operations_by_dtype(costs).items())
    moved_bytes = sum(cost.moved_bytes for cost in costs)
    overhead_s = roofs.run_s + len(costs) * roofs.node_s
    bandwidth_s = moved_bytes / roofs.bandwidth(footprint_bytes)
    outside_share = None  # also if the profiled runs took longer than the timed ones
    if kernels_s is not None and kernels_s <= (1.0 + NOISE) * seconds:
        outside_share = max(0.0, 1.0 - kernels_s / seconds)
    return diagnose(seconds, compute_s / seconds, bandwidth_s / seconds, overhead_s / seconds, outside_share)


def diagnose_node(seconds: float, cost: NodeCost, roofs: Roofs, footprint_bytes: int) -> Diagnosis:
    """The bound of a node. seconds: at least 1 µs, a profiler's unit, is used.  footprint_bytes: of the run."""
    seconds = max(seconds, 1e-6)
    bandwidth_s = cost.moved_bytes / roofs.bandwidth(footprint_bytes)
    bounds_s = (cost.operations / roofs.rate(cost.dtype), bandwidth_s, roofs.node_s)
    return diagnose(seconds, *(bound_s / seconds for bound_s in bounds_s))


def traffic(graph: GraphCosts, run_costs: Sequence[NodeCost] = ()) -> MemoryTraffic:
    """The memory traffic of a run, fused and unfused. graph: the engine's source.

    run_costs: of the nodes that the runtime runs; if empty, `greedy_groups` forms the groups.
    """
    unfused_bytes = sum(cost.moved_bytes for cost in graph.costs)
    if run_costs:
        fused_bytes = sum(cost.moved_bytes for cost in run_costs)
        return MemoryTraffic(unfused_bytes, fused_bytes, len(graph.nodes), len(run_costs), "runtime")
    groups = greedy_groups(graph)
    fused_bytes = sum(count_crossing_bytes(group, graph) for group in groups)
    return MemoryTraffic(unfused_bytes, fused_bytes, len(graph.nodes), len(groups), "model")


def greedy_groups(graph: GraphCosts) -> list[list[GraphNode]]:
    """Groups of nodes that a compiler would fuse, in the order of their first nodes.

    Dequantizations are in no group: their readers read the quantized tensors.
    """
    dequantizers = [node for node in graph.nodes if node.cost.op_type == "DequantizeLinear"]
    dequantized_reads = {name: node.reads for node in dequantizers for name in node.makes}
    reader_counts = Counter(name for node in graph.nodes for name in node.reads)
    output_names = set(graph.outputs)
    tensor_groups: dict[str, int] = {}
    groups: list[list[GraphNode]] = []
    for original_node in graph.nodes:
        if original_node.cost.op_type == "DequantizeLinear" and not output_names & original_node.makes.keys():
            continue
        read_bytes: dict[str, int] = {}
        for name, size in original_node.reads.items():
            read_bytes |= dequantized_reads.get(name, {name: size})
        node = GraphNode(original_node.cost, read_bytes, original_node.makes)
        sole_names = [name for name in node.reads if reader_counts[name] == 1 and name not in output_names]
        joined_groups = [tensor_groups[name] for name in sole_names if name in tensor_groups]
        if node.cost.op_type in ELEMENTWISE and joined_groups:
            group_index = max(joined_groups)
        else:
            group_index = len(groups)
            groups.append([])
        groups[group_index].append(node)
        tensor_groups |= dict.fromkeys(node.makes, group_index)
    return groups


def count_crossing_bytes(group: Sequence[GraphNode], graph: GraphCosts) -> int:
    """Bytes that a group of nodes reads from other nodes and writes for them."""
    if all(node.cost.moved_bytes == 0 for node in group):
        return 0
    produced_bytes = {name: size for node in group for name, size in node.makes.items()}
    group_ids = {id(node.cost) for node in group}
    other_nodes = (node for node in graph.nodes if id(node.cost) not in group_ids)
    outside_names = set(graph.outputs).union(*(node.reads for node in other_nodes))
    input_bytes = {name: size for node in group for name, size in node.reads.items() if name not in produced_bytes}
    return sum(input_bytes.values()) + sum(size for name, size in produced_bytes.items() if name in outside_names)


def break_down(
    bucket: str, seconds: float, graph: GraphCosts, profile: RunProfile | None, roofs: Roofs | None
) -> TimeBreakdown:
    """The breakdown of a run. seconds: the median of runs at this bucket, without a profiler.

    profile: None if the runtime has none.  roofs: None if the machine's limits were not measured.
    """
    run_costs = executed_costs(profile)
    kernels_s = sum(node.seconds for node in profile.nodes) if profile else None
    costs = run_costs or graph.costs
    return TimeBreakdown(
        bucket=bucket,
        graph=graph_cost(graph.costs, graph.working_bytes, graph.unsized),
        traffic=traffic(graph, run_costs),
        roofs=roofs,
        diagnosis=diagnose_run(seconds, costs, roofs, graph.working_bytes, kernels_s) if roofs else None,
        profile=_node_times(profile, run_costs, roofs, graph.working_bytes) if profile else None,
    )


def executed_costs(profile: RunProfile | None) -> list[NodeCost]:
    """The cost of each executed node; [] if the runtime reports no shapes."""
    if profile is None or not any(node.outputs for node in profile.nodes):
        return []
    return [cost_of(node.name, node.op_type, node.inputs, node.outputs) for node in profile.nodes]


def _node_times(profile: RunProfile, run_costs: list[NodeCost], roofs: Roofs | None, footprint: int) -> NodeTimes:
    costs: Sequence[NodeCost | None] = run_costs or [None] * len(profile.nodes)
    rows = []
    for node, cost in zip(profile.nodes, costs, strict=True):
        diagnosis = diagnose_node(node.seconds, cost, roofs, footprint) if roofs and cost else None
        rows.append(TimedNode(node.name, node.op_type, node.seconds, cost, diagnosis))
    total_s = sum(node.seconds for node in profile.nodes)
    times: dict[str, list[float]] = {}
    for node in profile.nodes:
        times.setdefault(node.op_type, []).append(node.seconds)
    types = [
        OperatorTime(op, len(times_s), sum(times_s), sum(times_s) / total_s if total_s else 0.0)
        for op, times_s in times.items()
    ]
    return NodeTimes(
        runs=profile.runs,
        seconds=profile.seconds,
        kernels_s=total_s,
        op_types=tuple(sorted(types, key=lambda row: -row.seconds)),
        nodes=tuple(sorted(rows, key=lambda row: -row.seconds)[:MOST_NODES]),
        omitted=max(0, len(rows) - MOST_NODES),
        uncounted=list_uncounted(run_costs),
    )
