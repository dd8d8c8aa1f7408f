"""Finds nodes that IREE 3.13 compiles into something else, or never ends compiling; the cases were found by running.

IREE makes a counted loop of a Loop whenever it can, and a counted loop runs all its turns, whatever the condition at
its begin and that of its body. So a Loop is taken only where both conditions follow as true from the constants in the
graph. IREE reads and writes a Scan forwards along axis 0, whatever its attributes, and takes 1 for a dynamic size of
its results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from builders.onnx_graphs.bodies import list_bodies
from enginesmith.core.types import Untyped

if TYPE_CHECKING:
    import onnx

_RUNS_ON = (
    "runs for as many turns as its trip count says, also when its condition says stop; give it a condition that is "
    "constantly true"
)
_SCAN_LISTS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
# For others it computes tanh, or another slope.
_ACTIVATIONS = {b"Sigmoid", b"Tanh", b"Relu"}


@dataclass
class Scope:
    """What is known of the values that a graph reads, by name: `TypeProto.Tensor`, and the constants' `TensorProto`."""

    types: dict[str, Untyped] = field(default_factory=dict)
    arrays: dict[str, Untyped] = field(default_factory=dict)

    def inside(self, graph: Untyped) -> "Scope":
        """The scope of a graph in this one."""
        values = (*graph.value_info, *graph.input, *graph.output)
        constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                constants[node.output[0]] = node.attribute[0].t
        types = {value.name: value.type.tensor_type for value in values if value.type.tensor_type.elem_type}
        return Scope({**self.types, **types}, {**self.arrays, **constants})

    def array(self, name: str) -> "np.ndarray | None":
        """A constant's array; None of another value."""
        from onnx import numpy_helper

        return numpy_helper.to_array(self.arrays[name]) if name in self.arrays else None

    def sizes(self, name: str) -> Sequence[int | None] | None:
        """A value's sizes, None for a dynamic one; None when not even its rank is known."""
        if name in self.arrays:
            return tuple(self.arrays[name].dims)
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in self.types[name].shape.dim]

    def dtype(self, name: str) -> "np.dtype | None":
        """A value's dtype; None when it is not known."""
        from onnx import helper

        if name in self.arrays:
            return helper.tensor_dtype_to_np_dtype(self.arrays[name].data_type)
        return helper.tensor_dtype_to_np_dtype(self.types[name].elem_type) if name in self.types else None


def attributes_of(node: Untyped) -> dict[str, Untyped]:
    """A node's attributes by name."""
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def wrong_loops(graph: "onnx.GraphProto", outer: frozenset[str] = frozenset()) -> Iterator[str]:
    """'NODE REASON; REMEDY' of each Loop that IREE gets wrong in a graph, inner graphs included.

    outer: names of values of the graphs around it that are always true.
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


def wrong_scan(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    """'REASON; REMEDY' for each way in which IREE gets a Scan wrong."""
    attributes = attributes_of(node)
    for name in _SCAN_LISTS:
        if any(attributes.get(name, ())):
            yield (
                f"goes forwards along axis 0 whatever {name} says; reverse or transpose the tensor outside of the Scan"
            )
    states = len(node.input) - attributes["num_scan_inputs"]
    for name in filter(None, node.output[states:]):
        if (sizes := scope.sizes(name)) is None or None in sizes:
            yield f"collects {name} of a dynamic size, which is taken for 1; export the model with fixed sizes"


def _sure(graph: "onnx.GraphProto", outer: frozenset[str]) -> frozenset[str]:
    """Names of values in a graph that are always true, or whole numbers other than 0."""
    from onnx import TensorProto

    true_names = {*outer, *(tensor.name for tensor in graph.initializer if _is_true(tensor))}
    for node in graph.node:
        input_flags = [name in true_names for name in node.input]
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if (
            (node.op_type == "Constant" and "value" in attributes and _is_true(attributes["value"].t))
            or (node.op_type in ("Identity", "And") and all(input_flags))
            or (node.op_type == "Or" and any(input_flags))
            or (node.op_type == "Cast" and attributes["to"].i == TensorProto.BOOL and all(input_flags))
        ):
            true_names.add(node.output[0])
    return frozenset(true_names)


def _is_true(tensor: "onnx.TensorProto") -> bool:
    from onnx import TensorProto, numpy_helper

    if tensor.data_type not in (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64):
        return False
    array = numpy_helper.to_array(tensor)
    return array.size == 1 and bool(array.all())


def wrong_operators(graph: "onnx.GraphProto", opset: int, outer: Scope | None = None) -> Iterator[str]:
    """'NODE REASON; REMEDY' of each node that IREE gets wrong in a graph whose shapes are inferred, inner graphs
    included. outer: what is known of the values around it."""
    scope = (outer or Scope()).inside(graph)
    for node in graph.node:
        if node.domain in ("", "ai.onnx"):
            rules = [*_RULES.get(node.op_type, ()), *([_flattens] if opset < 13 else ())]
            for rule in rules:
                for fault in rule(node, scope):
                    yield f"{node.name} {fault}"
        for inner in list_bodies(node):
            yield from wrong_operators(inner, opset, scope)


def _flattens(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if node.op_type == "Hardmax":
        sizes, axis = scope.sizes(node.input[0]), attributes_of(node).get("axis", 1)
        if sizes is None or axis not in (-1, len(sizes) - 1):
            yield "is taken along one axis, as from opset 13 on; export the model with opset 13 or later"


def _find_unsigned(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    for name in node.input[:1]:
        kind = scope.dtype(name)
        if kind is not None and kind.kind == "u":
            yield f"takes {kind.name} for signed numbers; cast {name} to a wider signed type in front of it"


def _recurrent(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    attributes = attributes_of(node)
    lengths, peepholes = (node.input[place] if len(node.input) > place else "" for place in (4, 7))
    if lengths:
        array, sizes = scope.array(lengths), scope.sizes(node.input[0])
        if array is None or sizes is None or array.tolist() != [sizes[0]] * array.size:
            yield "leaves sequence_lens out of account; mask the sequences in the model"
    if peepholes:
        yield "leaves its peephole weights out of account; export the model without them"
    if "clip" in attributes:
        yield "leaves clip out of account; export the model without it"
    if others := [name.decode() for name in attributes.get("activations", ()) if name not in _ACTIVATIONS]:
        yield f"computes another activation than {others[0]}; use Sigmoid, Tanh or Relu"


def _average(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    """Averages with ceil_mode, of windows that reach beyond the padding, or begin there."""
    attributes = attributes_of(node)
    if not attributes.get("ceil_mode") or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return
    kernel = np.array(attributes["kernel_shape"])
    ones = [1] * kernel.size
    pads = np.array(attributes.get("pads", [0, 0] * kernel.size)).reshape(2, -1)
    windows = (kernel - 1) * attributes.get("dilations", ones) + 1
    strides = np.array(attributes.get("strides", ones))
    sizes = (scope.sizes(node.input[0]) or [None] * (kernel.size + 2))[2:]
    # how far the last window reaches beyond the padding; a whole window beyond the entries is none
    room = windows - pads[1]
    beyond = [
        min(stride, space) - 1 if size is None else -(size + sum(pad) - window) % stride
        for size, pad, window, stride, space in zip(sizes, pads.T, windows, strides, room, strict=True)
    ]
    if max(beyond) > (0 if attributes.get("count_include_pad") else 1):
        yield "divides by too much where windows reach beyond the padding (ceil_mode); pad in the model instead"
    elif any(reach and reach >= space for reach, space in zip(beyond, room, strict=True)):
        yield "has windows that begin behind the last entry (ceil_mode), which are to be left out; pad in the model"


def _pad(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if attributes_of(node).get("mode") == b"wrap":
        yield "is never done compiling with mode wrap; write it as slices and Concat"
    amounts = scope.array(node.input[1]) if len(node.input) > 1 else None
    reflects = attributes_of(node).get("mode") == b"reflect"  # of these it gets the ends right
    if amounts is not None and (amounts[: amounts.size // 2 if reflects else None] < 0).any():
        yield "reads elsewhere where an amount is negative; cut off by Slice"


def _quantized_product(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    ranks = [scope.sizes(node.input[place]) for place in (0, 3)]
    if any(sizes is None or len(sizes) > 2 for sizes in ranks):
        yield "is computed wrongly in batches; use DequantizeLinear, MatMul and QuantizeLinear"


def _always(words: str) -> Callable[["onnx.NodeProto", Scope], Iterator[str]]:
    def rule(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:  # noqa: ARG001 - as all rules
        yield words

    return rule


_RULES: dict[str, tuple[Callable[["onnx.NodeProto", Scope], Iterator[str]], ...]] = {
    "AveragePool": (_average,),
    "Det": (_always("divides by zero where an entry of the diagonal comes to 0; compute the determinant outside"),),
    "Div": (_find_unsigned,),
    "GRU": (_recurrent,),
    "GridSample": (_always("reads elsewhere for points far outside of the image; sample outside of the model"),),
    "LSTM": (_recurrent,),
    "MaxPool": (_find_unsigned,),
    "Mod": (_find_unsigned,),
    "Pad": (_pad,),
    "QLinearMatMul": (_quantized_product,),
    "RNN": (_recurrent,),
    "Scan": (wrong_scan,),
    "TopK": (_find_unsigned,),
}
