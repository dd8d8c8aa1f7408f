"""Where the time of a run goes: its nodes, what they must do, what the machine could, and what fusing saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builders.backends.run_profiles import NodeTime, RunProfile
from validation.latency.roofline.costs import Cost, cost_of_node, operations_by_dtype, total, uncounted
from validation.latency.roofline.diagnosis import Diagnosis, diagnose_node, diagnose_run
from validation.latency.roofline.fusion import Traffic, traffic
from validation.latency.roofline.graph_costs import GraphCosts
from validation.latency.roofline.roofs import Roofs

# Nodes that are kept of a large model, the slowest first.
MOST_NODES = 200


@dataclass(frozen=True)
class Anatomy:
    """One run at one bucket. costs: of the graph that the engine was built from.  executed: of the engine's own nodes;
    none where the runtime shows none.  roofs and diagnosis: None where the machine's limits were not measured."""

    bucket: str
    graph: GraphCosts
    profile: RunProfile | None
    traffic: Traffic
    roofs: Roofs | None
    diagnosis: Diagnosis | None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        whole = total(self.graph.costs)
        return {
            "bucket": self.bucket,
            "graph": {
                **whole.to_json(),
                "nodes": len(self.graph.nodes),
                "working_bytes": self.graph.working_bytes,
                "by_dtype": dict(operations_by_dtype(self.graph.costs)),
                "uncounted": uncounted(self.graph.costs),
                "unsized": list(self.graph.unsized),
            },
            "traffic": self.traffic.to_json(),
            "roofs": None if self.roofs is None else self.roofs.to_json(),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_json(),
            "profile": None if self.profile is None else _profile(self.profile, self.roofs, self.graph.working_bytes),
        }


def anatomy(bucket: str, seconds: float, graph: GraphCosts, profile: RunProfile | None, roofs: Roofs | None) -> Anatomy:
    """Put together what was measured. seconds: the median of a run at this bucket, without a profiler."""
    executed = executed_costs(profile)
    moved = traffic(graph, executed)
    kernels = sum(node.seconds for node in profile.nodes) if profile else None
    costs = executed or graph.costs
    diagnosis = diagnose_run(seconds, costs, roofs, graph.working_bytes, kernels) if roofs else None
    return Anatomy(bucket, graph, profile, moved, roofs, diagnosis)


def executed_costs(profile: RunProfile | None) -> list[Cost]:
    """What each executed node must do; nothing where the runtime tells times alone."""
    if profile is None or not any(node.outputs for node in profile.nodes):
        return []
    return [cost_of_node(node) for node in profile.nodes]


def _profile(profile: RunProfile, roofs: Roofs | None, footprint: int) -> dict[str, Any]:
    costs: Sequence[Cost | None] = executed_costs(profile) or [None] * len(profile.nodes)
    rows = [_row(node, cost, roofs, footprint) for node, cost in zip(profile.nodes, costs, strict=True)]
    kernels = sum(node.seconds for node in profile.nodes)
    return {
        "runs": profile.runs,
        "seconds": profile.seconds,
        "kernels_s": kernels,
        "op_types": _by_type(profile.nodes, kernels),
        "nodes": sorted(rows, key=lambda row: -float(row["seconds"]))[:MOST_NODES],
        "omitted": max(0, len(rows) - MOST_NODES),
        "uncounted": uncounted([cost for cost in costs if cost]),
    }


def _row(node: NodeTime, cost: Cost | None, roofs: Roofs | None, footprint: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": node.name, "op_type": node.op_type, "seconds": node.seconds}
    if cost is None:
        return {**row, "cost": None, "diagnosis": None}
    told = diagnose_node(node.seconds, cost, roofs, footprint).to_json() if roofs else None
    return {**row, "cost": cost.to_json(), "diagnosis": told}


def _by_type(nodes: Sequence[NodeTime], whole: float) -> list[Mapping[str, Any]]:
    found: dict[str, list[float]] = {}
    for node in nodes:
        found.setdefault(node.op_type, []).append(node.seconds)
    rows: list[dict[str, Any]] = [
        {"op_type": kind, "nodes": len(times), "seconds": sum(times), "share": sum(times) / whole if whole else 0.0}
        for kind, times in found.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))
