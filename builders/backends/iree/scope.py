"""What is known of a graph's values before it is compiled: types, shapes, and the arrays of constants."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


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
        types = {value.name: value.type.tensor_type for value in values if value.type.tensor_type.elem_type}
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

    def dtype(self, name: str) -> "np.dtype[Any] | None":
        """A value's dtype; None when it is not known."""
        from onnx import helper

        if name in self.arrays:
            return helper.tensor_dtype_to_np_dtype(self.arrays[name].data_type)
        return helper.tensor_dtype_to_np_dtype(self.types[name].elem_type) if name in self.types else None


def attributes_of(node: Any) -> dict[str, Any]:
    """A node's attributes by name."""
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
