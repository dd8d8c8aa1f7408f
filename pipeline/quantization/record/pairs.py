"""The Q/DQ pairs of a written graph: which tensor each one rounds, to what, and who reads the result."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from pipeline.graphs.graph import constants, consumers
from pipeline.quantization.record.levels import NAMES

# What moves or converts values and keeps their distribution: a pair behind one is the pair of the tensor before it.
_TRANSPARENT = ("Cast", "SpaceToDepth", "DepthToSpace", "Reshape", "Transpose", "Identity")


@dataclass(frozen=True, eq=False)
class Pair:
    """One DequantizeLinear, with its QuantizeLinear or its stored values.

    names: the tensor's, the likeliest first: insertion may rename what it rounds.  weight: whether it is a constant.
    element_type: ONNX's.  scales, zero_point: of one tensor, or per channel along `axis`.
    readers: names of the nodes that compute with the result.
    """

    names: tuple[str, ...]
    weight: bool
    element_type: int
    scales: NDArray[np.float64]
    zero_point: float
    axis: int
    readers: tuple[str, ...]

    @property
    def format(self) -> str:
        """'int8', 'uint8' or 'fp8'."""
        return NAMES[self.element_type]


def pairs(model: ModelProto) -> tuple[Pair, ...]:
    """Every pair of 8 bits, in the graph's order. Biases, which are stored in 32 bits, are left out."""
    return tuple(_PairReader(model).found())


class _PairReader:
    def __init__(self, model: ModelProto) -> None:
        self.nodes = model.graph.node
        self.given = constants(model.graph)
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.consumers: Mapping[str, list[NodeProto]] = consumers(model.graph)

    def found(self) -> Iterator[Pair]:
        for node in self.nodes:
            if node.op_type == "DequantizeLinear" and (pair := self._pair(node)):
                yield pair

    def _pair(self, node: NodeProto) -> Pair | None:
        kind = self._element_type(node)
        scales = self._constant(node, 1)
        if kind not in NAMES or scales is None:
            return None
        *_, stored = self._before(node.input[0])  # bytes may be moved between the two
        maker = self.makers.get(stored)
        rounded = maker.input[0] if maker is not None else stored
        axis = next((item.i for item in node.attribute if item.name == "axis"), 1)
        zero = self._constant(node, 2)
        return Pair(
            names=tuple(dict.fromkeys([node.output[0], *self._before(rounded)])),
            weight=rounded in self.given,
            element_type=kind,
            scales=scales,
            zero_point=0.0 if zero is None else float(zero.reshape(-1)[0]),
            axis=axis,
            readers=tuple(self._readers(node.output[0])),
        )

    def _element_type(self, node: NodeProto) -> int:
        zero = self.given.get(node.input[2]) if len(node.input) > 2 else None
        stored = self.given.get(node.input[0], zero)
        return TensorProto.UINT8 if stored is None else int(stored.data_type)

    def _constant(self, node: NodeProto, index: int) -> NDArray[np.float64] | None:
        found = self.given.get(node.input[index]) if len(node.input) > index else None
        return None if found is None else numpy_helper.to_array(found).astype(np.float64)

    def _before(self, tensor: str) -> Iterator[str]:
        yield tensor
        while (maker := self.makers.get(tensor)) is not None and maker.op_type in _TRANSPARENT:
            tensor = maker.input[0]
            yield tensor

    def _readers(self, tensor: str) -> Iterator[str]:
        for node in self.consumers.get(tensor, ()):
            if node.op_type in ("Cast", "QuantizeLinear"):
                yield from self._readers(node.output[0])
            else:
                yield node.name
