"""Rewrites integer divisions by data, for compilers whose code leaves them to the processor.

x86 ends the process at an integer division by zero, and at that of the lowest number by -1; ONNX defines neither. Here
a quotient or remainder by zero is 0, as on ARM, and the lowest number divided by -1 is itself, as integers of a fixed
width wrap. Divisors that are constants or computed from shapes stay as they are: compilers read sizes there.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from builders.onnx_graphs.bodies import list_bodies

if TYPE_CHECKING:
    import onnx

_DIVISIONS = ("Div", "Mod")
_SIGNED = (3, 5, 6, 7)  # onnx.TensorProto: INT8, INT16, INT32, INT64
_WHOLE = (*_SIGNED, 2, 4, 12, 13)  # and UINT8, UINT16, UINT32, UINT64
_SIZES = ("Shape", "Size", "Constant")
_MOST_KEPT = 1024  # bytes of a weight that may hold sizes, which inference reads


def guard_divisions(model: "onnx.ModelProto") -> None:
    """Rewrite integer divisions by data in place. New values are named after the quotient, new nodes as the node."""
    import onnx

    found = set(_list_by_data(model.graph, set()))
    if not found:
        return
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if len(tensor.raw_data) > _MOST_KEPT:
            tensor.ClearField("raw_data")
    _rewrite(model.graph, onnx.shape_inference.infer_shapes(light).graph, {}, found)


def _list_by_data(graph: "onnx.GraphProto", outer: set[str]) -> Iterator[str]:
    """Names of the results of divisions by data, those in inner graphs too. outer: names of sizes around the graph."""
    sizes = outer | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        inner = list_bodies(node)
        if node.op_type in _DIVISIONS and node.input[1] not in sizes:
            yield node.output[0]
        elif node.op_type in _SIZES or (node.input and not inner and sizes.issuperset(filter(None, node.input))):
            sizes.update(node.output)
        for each in inner:
            yield from _list_by_data(each, sizes)


def _rewrite(graph: "onnx.GraphProto", typed: "onnx.GraphProto", outer: Mapping[str, int], found: set[str]) -> None:
    """Rewrite the divisions with results in `found`. typed: the same graph with inferred types.  outer: name -> element
    type of values around it."""
    values = (*typed.input, *typed.value_info, *typed.output)
    types = {**outer, **{value.name: value.type.tensor_type.elem_type for value in values}}
    types |= {tensor.name: tensor.data_type for tensor in typed.initializer}
    written: list[onnx.NodeProto] = []
    for node, twin in zip(graph.node, typed.node, strict=True):
        for inner, inner_typed in zip(list_bodies(node), list_bodies(twin), strict=True):
            _rewrite(inner, inner_typed, types, found)
        kind = types.get(node.input[1], 0) if found.intersection(node.output) else 0
        written.extend(_guard_division(node, kind) if kind in _WHOLE else [_copy(node)])
    del graph.node[:]
    graph.node.extend(written)


def _guard_division(node: "onnx.NodeProto", kind: int) -> "list[onnx.NodeProto]":
    """The nodes in the place of a division: by 1 where the divisor is 0 or -1, and for `Div` the quotient times that
    divisor. kind: ONNX's element type."""
    from onnx import helper

    divisor, result = node.input[1], node.output[0]
    special, one, safe = f"{result}_special", f"{result}_one", f"{result}_divisor"

    def make_node(op_type: str, inputs: list[str], output: str) -> "onnx.NodeProto":
        return helper.make_node(op_type, inputs, [output], name=node.name)

    def constant(number: int, output: str) -> "onnx.NodeProto":
        tensor = helper.make_tensor(output, kind, [], [number])
        return helper.make_node("Constant", [], [output], name=node.name, value=tensor)

    nodes = [constant(1, one), constant(0, f"{result}_zero")]
    if kind in _SIGNED:
        nodes += [
            constant(-1, f"{result}_minus"),
            make_node("Equal", [divisor, f"{result}_zero"], f"{result}_by_zero"),
            make_node("Equal", [divisor, f"{result}_minus"], f"{result}_by_minus"),
            make_node("Or", [f"{result}_by_zero", f"{result}_by_minus"], special),
        ]
    else:
        nodes.append(make_node("Equal", [divisor, f"{result}_zero"], special))
    division = _copy(node)
    division.input[1] = safe
    nodes += [make_node("Where", [special, one, divisor], safe), division]
    if node.op_type == "Div":
        division.output[0] = f"{result}_quotient"
        nodes.append(make_node("Where", [special, divisor, one], f"{result}_factor"))
        nodes.append(make_node("Mul", [f"{result}_quotient", f"{result}_factor"], result))
    return nodes


def _copy(node: "onnx.NodeProto") -> "onnx.NodeProto":
    made = type(node)()
    made.CopyFrom(node)
    return made
