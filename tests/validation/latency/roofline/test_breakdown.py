from types import SimpleNamespace
from typing import Any

from validation.latency.roofline.breakdown import greedy_groups
from validation.latency.roofline.costs import GraphCosts, GraphNode


def node(op_type: str, reads: dict[str, int], makes: str) -> GraphNode:
    cost: Any = SimpleNamespace(op_type=op_type)
    return GraphNode(cost, reads, {makes: 4})


def groups(outputs: list[str], *nodes: GraphNode) -> list[list[str]]:
    return [[item.cost.op_type for item in group] for group in greedy_groups(GraphCosts(nodes, outputs))]


def test_an_elementwise_node_joins_its_only_input() -> None:
    nodes = node("MatMul", {"x": 4}, "a"), node("Relu", {"a": 4}, "b"), node("MatMul", {"b": 4}, "c")
    assert groups(["c"], *nodes) == [["MatMul", "Relu"], ["MatMul"]]
    assert groups(["c", "a"], *nodes) == [["MatMul"], ["Relu"], ["MatMul"]], "a is an output too"
    assert groups(["c", "d"], *nodes, node("MatMul", {"a": 4}, "d"))[:2] == [["MatMul"], ["Relu"]], "two read a"


def test_dequantized_tensors_are_read_as_stored() -> None:
    stored_node = node("DequantizeLinear", {"q": 1, "scale": 4}, "w")
    (group,) = greedy_groups(GraphCosts([stored_node, node("MatMul", {"x": 4, "w": 4}, "y")], ["y"]))
    assert [dict(item.reads) for item in group] == [{"x": 4, "q": 1, "scale": 4}]
