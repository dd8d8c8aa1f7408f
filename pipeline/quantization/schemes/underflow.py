"""Which tensors a 16-bit float type makes zero where that shows: x / 0 is NaN or infinite, and a small factor vanishes.

A single small weight among large ones adds nothing that a rounded sum could hold, and is cast with them. Kept in fp32
are

- a constant that loses more to zero than rounding takes from it (2^-11 of its norm): a factor of 1e-9;
- a constant with any such value that something divides by, or takes the root or the logarithm of: directly, or after it
  was added or compared, as the epsilon of a normalization is;
- a tensor that was measured, and stayed below the type's normal numbers.

Biases of weighted nodes are added to large sums, and scales of Q/DQ are raised instead (`cast`).
"""

import math
from collections.abc import Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from builders.onnx_graphs.weights import to_array
from enginesmith.arrays import Array
from pipeline.quantization.graph import constants, consumers
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.half_floats import HalfFormat

# The share of a constant's norm that rounding to fp16 takes at most.
_ROUNDING = 2.0**-11
# Operator -> the place of the operand that must not be zero.
_SENSITIVE = {"Div": 1, "Log": 0, "Reciprocal": 0, "Sqrt": 0}
# Operators that a small summand or bound passes, as the least of what they give.
_ADDING = {"Add", "Clip", "Max", "Sum", "Where"}
_MOVING = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_CARRYING = _MOVING | {"Abs", "Clip", "Max"}
_SCALING = _MOVING | {"Mul", "Neg"}
_BIASED = {"Conv", "ConvTranspose", "Gemm"}
_SCALED = {"DequantizeLinear", "QuantizeLinear"}


def find_too_small(model: ModelProto, half: HalfFormat, ranges: Ranges | None) -> dict[str, str]:
    """The tensors of a tidy model that `half` would make zero where that shows, each with the reason."""
    search = _UnderflowSearch(model.graph, half, ranges)
    for item in model.graph.initializer:
        if item.data_type == TensorProto.FLOAT:
            search.judge_constant(item)
    for name in [*(value.name for value in model.graph.input), *(n for node in model.graph.node for n in node.output)]:
        search.judge_measured(name)
    search.spread(model.graph.node)
    return search.found


class _UnderflowSearch:
    """Collects the tensors to keep. found: tensor -> the reason.  faded: those that are small throughout."""

    def __init__(self, graph: GraphProto, half: HalfFormat, ranges: Ranges | None) -> None:
        self.half, self.ranges = half, ranges
        self.readers = consumers(graph)
        self.given = constants(graph)
        self.found: dict[str, str] = {}
        self.faded: dict[str, str] = {}

    def judge_constant(self, item: TensorProto) -> None:
        """Keep a constant that vanishes, and the path from an epsilon to what divides by it."""
        values = to_array(item)
        lost = (values != 0) & (self.half.narrow(values) == 0)
        if not lost.any():
            return
        reason = f"{np.count_nonzero(lost)} of {values.size} values of constant {item.name!r} underflow to 0"
        least = float(np.abs(values[lost]).min())
        for node in self.readers.get(item.name, ()):
            kept = self._follow(item.name, node, least)
            if not kept and _is_factor(item.name, node) and _norm(values[lost]) > _ROUNDING * _norm(values):
                kept, self.faded[item.name] = {item.name}, reason
            self.found |= dict.fromkeys(kept, f"{reason} in {self.half.name}")

    def judge_measured(self, name: str) -> None:
        """Keep a tensor whose largest measured magnitude is below the normal numbers."""
        reach = self.ranges.reach(name) if self.ranges else None
        if reach is not None and 0 < reach < self.half.tiny:
            least = f"{self.half.name} is exact from {self.half.tiny:.3g} on"
            self.found[name] = f"tensor {name!r} reached only {reach:.3g} in calibration, {least}"

    def spread(self, nodes: Sequence[NodeProto]) -> None:
        """Keep what is made of factors that vanish, as far as it was not measured."""
        for node in nodes:
            reason = next((self.faded[name] for name in node.input if name in self.faded), None)
            divided = node.op_type == "Div" and node.input[0] in self.faded
            if reason is None or not (node.op_type in _SCALING or divided):
                continue
            for name in node.output:
                if self.ranges is None or self.ranges.reach(name) is None:
                    self.faded[name] = reason
                    self.found.setdefault(name, f"{reason} in {self.half.name}")

    def _follow(self, name: str, node: NodeProto, least: float, left: int = 12) -> set[str]:
        """The tensors from `name`, read by a node, up to one that must not be zero; none where there is no such one.

        least: the smallest magnitude that the tensor then has.
        """
        if _SENSITIVE.get(node.op_type, -1) in [i for i, read in enumerate(node.input) if read == name]:
            root = math.sqrt(least)
            if node.op_type == "Sqrt" and self.half.narrow(np.array(root, np.float32)) == 0:
                return {name, node.output[0]} | self._follow_readers(node.output[0], root, left - 1)
            return {name}
        passed = _ADDING if name in self.given else _CARRYING
        if node.op_type not in passed or left == 0 or self._stays_large(node.output[0]):
            return set()
        beyond = self._follow_readers(node.output[0], least, left - 1)
        return {name} | beyond if beyond else set()

    def _follow_readers(self, name: str, least: float, left: int) -> set[str]:
        return {each for node in self.readers.get(name, ()) for each in self._follow(name, node, least, left)}

    def _stays_large(self, name: str) -> bool:
        """Whether a tensor was measured, and never came near zero."""
        if self.ranges is None or name not in self.ranges.tensors:
            return False
        source = self.ranges.sources.get(name)
        low, high = source.seen if source else self.ranges.tensors[name]
        return low > 2 * self.half.tiny or high < -2 * self.half.tiny


def _is_factor(name: str, node: NodeProto) -> bool:
    """Whether a node multiplies by a constant, or works with it in another way than adding it."""
    place = list(node.input).index(name) if name in node.input else 0
    if node.op_type in _SCALED or (node.op_type in _BIASED and place == 2):
        return False
    return node.op_type not in {*_ADDING, "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sub"}


def _norm(values: Array) -> float:
    finite = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.square(finite).sum()))
