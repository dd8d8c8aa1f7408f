"""Bytes that fusing saves, by the traffic model: unfused, every node reads its inputs from memory and writes its
outputs there; fused, only what crosses from one group of nodes to another is moved.

The groups are the nodes that the runtime executes, where it shows them. Where it does not, they come from a greedy
model: a dequantization belongs to what reads it, and a node that works value by value (a QuantizeLinear too) joins
what made its input, provided that nobody else reads that. This is the common part of what compilers do ("vertical"
fusion; see Niu et al., DNNFusion, PLDI 2021, for what more there is), so its saving is a lower estimate.
"""

from collections.abc import Mapping, Sequence

from enginery.core.reports.breakdown import MemoryTraffic, NodeCost
from validation.latency.roofline.costs import ELEMENTWISE
from validation.latency.roofline.graph_costs import GraphCosts, GraphNode


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
