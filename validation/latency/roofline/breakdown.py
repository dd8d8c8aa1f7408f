"""Where the time of a run goes: its nodes, what they must do, what the machine could, and what fusing saved."""

from collections.abc import Sequence

from builders.backends.run_profiles import NodeTime, RunProfile
from enginery.core.reports.breakdown import NodeCost, NodeTimes, OperatorTime, Roofs, TimeBreakdown, TimedNode
from validation.latency.roofline.costs import cost_of_node, graph_cost, list_uncounted
from validation.latency.roofline.diagnosis import diagnose_node, diagnose_run
from validation.latency.roofline.fusion import traffic
from validation.latency.roofline.graph_costs import GraphCosts

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
