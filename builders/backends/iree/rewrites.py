"""Nodes that IREE 3.13 compiles into something else, written as nodes that compute the same and that it gets right."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from builders.backends.iree.miscompilations import Scope, attributes_of
from builders.onnx_graphs.bodies import list_bodies
from enginesmith.arrays import Array
from enginesmith.core.types import Untyped

if TYPE_CHECKING:
    import onnx

# What exporters write for 'from the end', whatever the size.
_BEYOND = 2**31 - 1


def rewrite(graph: "onnx.GraphProto", opset: int, outer: Scope | None = None) -> None:
    """Rewrite a graph whose shapes are inferred, inner graphs included, in place."""
    scope = (outer or Scope()).inside(graph)
    written: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in list_bodies(node):
            rewrite(inner, opset, scope)
        if node.op_type == "Loop":
            _state_carried(node)
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        new = rule(_Writer(node, opset), scope) if rule else None
        written.extend([node] if new is None else new)
    del graph.node[:]
    graph.node.extend(written)


def _state_carried(loop: "onnx.NodeProto") -> None:
    """Give the values that a Loop's body hands to its next turn the shapes that it takes them in.

    Shape inference finds none for them, as a turn may change them, and IREE, which can do that in no loop, takes a
    tensor without a shape for a scalar.
    """
    for body in list_bodies(loop):
        # The body takes the turn's number and the condition first, and gives the condition.
        for taken, given in zip(body.input[2:], body.output[1:], strict=False):
            if not given.type.tensor_type.HasField("shape") and taken.type.tensor_type.HasField("shape"):
                given.type.tensor_type.shape.CopyFrom(taken.type.tensor_type.shape)


class _Writer:
    """Makes the nodes that take the place of one, under its name, so that the compiler's errors name that node.

    Called with an operator, its inputs and attributes it adds a node and gives the name of its output.
    """

    def __init__(self, node: "onnx.NodeProto", opset: int) -> None:
        self.node = node
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []

    def constant(self, array: object) -> str:
        """The name of a constant."""
        from onnx import numpy_helper

        return self("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def __call__(self, operator: str, *inputs: str, **attributes: Untyped) -> str:
        """The name of a new node's output."""
        return self.last(operator, inputs, [f"{self.node.output[0]}_{len(self.nodes)}"], **attributes)

    def last(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Untyped) -> str:
        """Add a node with these outputs; the name of the first."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, outputs, name=self.node.name, **attributes))
        return outputs[0]


def _slice(write: _Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """Backwards from beyond the end it reads memory in front of the tensor: it begins at the last entry instead."""
    data, starts, _, axes, steps = (*write.node.input, "", "")[:5]
    step, start = scope.array(steps), scope.array(starts)
    if not steps or (step is not None and (step > 0).all()) or (start is not None and (start < 0).all()):
        return None
    if step is not None and start is not None and (begin := _begin(start, step, scope, data, axes)) is not None:
        begins = write.constant(begin)
    else:
        begins = _computed_begin(write, scope, data, starts, axes, steps)
    write.last("Slice", [data, begins, *write.node.input[2:]], list(write.node.output))
    return write.nodes


def _begin(start: Array, step: Array, scope: Scope, data: str, axes: str) -> Array | None:
    """Where a slice begins on each axis; None when the sizes that this depends on are not known."""
    axis, sizes = scope.array(axes) if axes else np.arange(start.size), scope.sizes(data)
    if axis is None or sizes is None:
        return None
    found = start.copy()
    for place in np.flatnonzero((step < 0) & (start >= 0)):
        size = sizes[axis[place]]
        if size is None and start[place] < _BEYOND:
            return None
        found[place] = -1 if start[place] >= _BEYOND or size is None else min(start[place], size - 1)
    return found


def _computed_begin(write: _Writer, scope: Scope, data: str, starts: str, axes: str, steps: str) -> str:
    from onnx import TensorProto

    wide = scope.dtype(starts) != np.int32
    size, count = write("Shape", data), scope.sizes(starts)
    if not axes and count and count[0]:
        axes = write.constant(np.arange(count[0]))
    if axes:
        size = write("Gather", size, axes)
    if not wide:
        size = write("Cast", size, to=TensorProto.INT32)
    kind = np.int64 if wide else np.int32
    last = write("Sub", size, write.constant(np.array([1], kind)))
    back = write("Less", steps, write.constant(np.array([0], kind)))
    beyond = write("And", back, write("Less", last, starts))
    return write("Where", beyond, last, starts)


def _clip(write: _Writer, scope: Scope) -> "list[onnx.NodeProto] | None":  # noqa: ARG001 - the same of all types
    """It takes NaN for the lower bound, and unsigned numbers for signed: as Max and Min it does not, in this order."""
    value, low, high = (*write.node.input, "", "")[:3]
    if not low and not high:
        return None
    raised = value if not low else write("Max", low, value) if high else ""
    last = ("Min", [high, raised]) if high else ("Max", [low, value])
    write.last(*last, list(write.node.output))
    return write.nodes


def _normalize(write: _Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """It divides zeros by their norm of zero."""
    given, kind = attributes_of(write.node), scope.dtype(write.node.input[0])
    if kind is None:
        return None
    value, axes, norm_of = write.node.input[0], [given.get("axis", -1)], f"ReduceL{given.get('p', 2)}"
    if write.opset < 18:
        norm = write(norm_of, value, axes=axes)
    else:
        norm = write(norm_of, value, write.constant(np.array(axes, np.int64)))
    empty = write("Equal", norm, write.constant(np.zeros((), kind)))
    divisor = write("Where", empty, write.constant(np.ones((), kind)), norm)
    write.last("Div", [value, divisor], list(write.node.output))
    return write.nodes


def _power(write: _Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """By exponents that are not one constant it takes logarithms: NaN for numbers below zero, and for 0 by 0."""
    from onnx import helper

    base, exponent = write.node.input
    kind, constant = scope.dtype(base), scope.array(exponent)
    if kind is None or kind.kind not in "fV" or (constant is not None and constant.size == 1):
        return None
    if (above := scope.array(base)) is not None and (above > 0).all():
        return None
    if scope.dtype(exponent) != kind:
        exponent = write("Cast", exponent, to=helper.np_dtype_to_tensor_dtype(kind))
    zero, one, two = (write.constant(np.array(number, kind)) for number in (0, 1, 2))
    size = write("Where", write("Equal", exponent, zero), one, write("Pow", write("Abs", base), exponent))
    below = write("Less", base, zero)
    odd = write("Equal", write("Abs", write("Mod", exponent, two, fmod=1)), one)
    signed = write("Where", write("And", below, odd), write("Neg", size), size)
    part = write("Not", write("Equal", write("Floor", exponent), exponent))
    nothing = write.constant(np.array(np.nan, kind))
    write.last("Where", [write("And", below, part), nothing, signed], list(write.node.output))
    return write.nodes


def _multiply_integers(write: _Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """Without zero points it takes unsigned numbers for signed where both are unsigned."""
    if len(write.node.input) > 2 or any(scope.dtype(name) != np.uint8 for name in write.node.input):
        return None
    zeros = [write.constant(np.zeros((), np.uint8)) for _ in range(2)]
    write.last("MatMulInteger", [*write.node.input, *zeros], list(write.node.output))
    return write.nodes


_RULES: dict[str, Callable[[_Writer, Scope], "list[onnx.NodeProto] | None"]] = {
    "Clip": _clip,
    "LpNormalization": _normalize,
    "MatMulInteger": _multiply_integers,
    "Pow": _power,
    "Slice": _slice,
}
