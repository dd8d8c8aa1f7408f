"""Nodes that are put into an ONNX graph, in its order, and the constants that it has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from enginery.arrays.arrays import Array

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

PREFIX = "rounding/"


class Nodes:
    """A list of nodes under construction; new ones get names and seeds of their own. numbers: what they read."""

    def __init__(self) -> None:
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self.numbers: dict[bytes, TensorProto] = {}
        self._count = 0

    def know(self, graph: "GraphProto") -> None:
        """Know the constants of a graph."""
        self._constants |= {item.name: item for item in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t

    def constant(self, name: str) -> Array | None:
        """A constant's value; None for a tensor that is computed."""
        from onnx import numpy_helper

        item = self._constants.get(name)
        return None if item is None else numpy_helper.to_array(item)

    @contextmanager
    def collect(self, graph: "GraphProto") -> Iterator[None]:
        """Let what is appended within be the nodes of a graph."""
        outer, self._nodes = self._nodes, []
        yield
        del graph.node[:]
        graph.node.extend(self._nodes)
        self._nodes = outer

    def append(self, node: "NodeProto") -> None:
        """Take a node of the graph itself."""
        self._nodes.append(node)

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and give its output's name."""
        from onnx import helper

        self._count += 1
        name = f"{PREFIX}{self._count}"
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def rename(self, output: str) -> None:
        """Let the node that was added last make a tensor that the graph reads."""
        self._nodes[-1].output[0] = output

    def number(self, value: float | list[int] | Array) -> str:
        """A constant of the whole graph, among `numbers`: int64 of a list, else float32."""
        from onnx import numpy_helper

        array = np.asarray(value, np.int64 if isinstance(value, list) else np.float32)
        item = numpy_helper.from_array(array)
        known = self.numbers.setdefault(item.SerializeToString(), item)
        known.name = known.name or f"{PREFIX}number {len(self.numbers)}"
        return str(known.name)

    def draw(self, like: str, most: float) -> str:
        """Numbers between -most and most, of a tensor's shape."""
        return self.add("RandomUniformLike", like, low=-most, high=most, seed=float(self._count))

    def in_blocks(self, name: str, size: int) -> str:
        """A tensor rounded to 8 bits, symmetrically, in blocks of so many elements of its last axis."""
        parts = self.add("Reshape", name, self.number([-1, size]))
        greatest = self.add("ReduceMax", self.add("Abs", parts), self.number([1]))
        step = self.add("Max", self.add("Mul", greatest, self.number(1 / 127)), self.number(2.0**-126))
        rounded = self.add("Mul", self.add("Round", self.add("Div", parts, step)), step)
        return self.add("Reshape", rounded, self.add("Shape", name))
