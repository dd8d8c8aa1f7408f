"""Loops and scans that IREE 3.13 compiles into something else, found by running them.

A Loop becomes a counted one whenever IREE can, and a counted loop runs every turn: neither the condition that it begins
with nor the one that its body computes is asked. So a Loop is taken only where the condition is true for certain, from
the constants in the graph. A Scan is read and written forwards along axis 0 whatever it says, and where the size of
what it collects is dynamic, IREE takes 1 for it.
"""

from collections.abc import Iterator
from typing import Any

from builders.backends.iree.scope import Scope, attributes_of
from builders.onnx_graphs.bodies import list_bodies

_RUNS_ON = (
    "runs for as many turns as its trip count says, also when its condition says stop; give it a condition that is "
    "constantly true"
)
_SCAN_LISTS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")


def wrong_loops(graph: Any, outer: frozenset[str] = frozenset()) -> Iterator[str]:
    """What IREE gets wrong of each Loop of a graph, inner graphs included, with the name of its node and the remedy.

    outer: values of the graphs around it that are true for certain.
    """
    sure = _sure(graph, outer)
    for node in graph.node:
        for body in list_bodies(node):
            inner = sure
            if node.op_type == "Loop":
                begins = len(node.input) < 2 or not node.input[1] or node.input[1] in sure
                inner = sure | {body.input[1].name} if begins else sure
                if not begins or body.output[0].name not in _sure(body, inner):
                    yield f"{node.name} {_RUNS_ON}"
            yield from wrong_loops(body, inner)


def wrong_scan(node: Any, scope: Scope) -> Iterator[str]:
    """What IREE gets wrong of a Scan."""
    given = attributes_of(node)
    for name in _SCAN_LISTS:
        if any(given.get(name, ())):
            yield (
                f"goes forwards along axis 0 whatever {name} says; reverse or transpose the tensor outside of the Scan"
            )
    states = len(node.input) - given["num_scan_inputs"]
    for name in filter(None, node.output[states:]):
        if (sizes := scope.sizes(name)) is None or None in sizes:
            yield f"collects {name} of a dynamic size, which is taken for 1; export the model with fixed sizes"


def _sure(graph: Any, outer: frozenset[str]) -> frozenset[str]:
    """Names of values in a graph that hold nothing but true, or whole numbers other than 0."""
    from onnx import TensorProto

    found = {*outer, *(tensor.name for tensor in graph.initializer if _is_true(tensor))}
    for node in graph.node:
        known = [name in found for name in node.input]
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if (
            (node.op_type == "Constant" and "value" in attributes and _is_true(attributes["value"].t))
            or (node.op_type in ("Identity", "And") and all(known))
            or (node.op_type == "Or" and any(known))
            or (node.op_type == "Cast" and attributes["to"].i == TensorProto.BOOL and all(known))
        ):
            found.add(node.output[0])
    return frozenset(found)


def _is_true(tensor: Any) -> bool:
    from onnx import TensorProto, numpy_helper

    if tensor.data_type not in (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64):
        return False
    array = numpy_helper.to_array(tensor)
    return array.size == 1 and bool(array.all())
