"""Nodes that IREE 3.13 compiles into something else, written as nodes that compute the same and that it gets right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# What exporters write for 'from the end', whatever the size.
_BEYOND = 2**31 - 1


@dataclass
class Scope:
    """What is known of the values that a graph sees: types and shapes, and the arrays of the constants."""

    types: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)

    def inside(self, graph: Any) -> "Scope":
        """The scope of a graph in this one."""
        values = (*graph.value_info, *graph.input, *graph.output)
        constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                constants[node.output[0]] = node.attribute[0].t
        types = {value.name: value.type.tensor_type for value in values}
        return Scope({**self.types, **types}, {**self.arrays, **constants})

    def array(self, name: str) -> "np.ndarray[Any, Any] | None":
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


def rewrite(graph: Any, outer: Scope | None = None) -> None:
    """Rewrite a graph whose shapes are inferred, inner graphs included, in place."""
    scope = (outer or Scope()).inside(graph)
    written = []
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                rewrite(inner, scope)
        rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        new = rule(_Writer(node), scope) if rule else None
        written.extend([node] if new is None else new)
    del graph.node[:]
    graph.node.extend(written)


class _Writer:
    """Writes nodes in the place of one, under its name, so that what a compiler says of them is said of it."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.nodes: list[Any] = []

    def constant(self, array: Any) -> str:
        """The name of a constant."""
        from onnx import numpy_helper

        return self("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The name of a node's output."""
        return self.last(operator, inputs, [f"{self.node.output[0]}_{len(self.nodes)}"], **attributes)

    def last(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> str:
        """The same, with these outputs."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, outputs, name=self.node.name, **attributes))
        return outputs[0]


def _slice(write: _Writer, scope: Scope) -> list[Any] | None:
    """A slice backwards from beyond the end reads memory in front of the tensor: it begins at the last entry instead."""
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


def _begin(start: Any, step: Any, scope: Scope, data: str, axes: str) -> Any:
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

    wide = scope.types[starts].elem_type == TensorProto.INT64 if starts in scope.types else True
    if (start := scope.array(starts)) is not None:
        wide = start.dtype == np.int64
    count = scope.sizes(starts)
    size = write("Shape", data) if axes or not count else write("Shape", data, end=count[0])
    if axes:
        size = write("Gather", size, axes)
    if not wide:
        size = write("Cast", size, to=TensorProto.INT32)
    kind = np.int64 if wide else np.int32
    last = write("Sub", size, write.constant(np.array([1], kind)))
    back = write("Less", steps, write.constant(np.array([0], kind)))
    return write("Where", back, write("Min", starts, last), starts)


_RULES: dict[str, Callable[[_Writer, Scope], list[Any] | None]] = {"Slice": _slice}
