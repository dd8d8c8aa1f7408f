"""Multiplications that a node does: the one place where they are counted, for quantization and for the roofline."""

import math
from collections.abc import Sequence

from enginery.core.types import Shape

# Where the weight stands among a node's inputs. The names are those of ONNX and of ONNX Runtime's own operators.
CONVOLUTIONS = {
    "Conv": 1,
    "FusedConv": 1,
    "NhwcFusedConv": 1,
    "ConvInteger": 1,
    "QLinearConv": 3,
    "NhwcQLinearConv": 3,
}
TRANSPOSED_CONVOLUTIONS = {"ConvTranspose": 1, "QLinearConvTranspose": 3}
PRODUCTS = {
    "MatMul": 1,
    "Gemm": 1,
    "FusedMatMul": 1,
    "FusedGemm": 1,
    "MatMulInteger": 1,
    "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3,
    "QGemm": 3,
}
RECURRENT = ("LSTM", "GRU", "RNN")


def per_value(op_type: str, weight: Sequence[int], transposed: bool = False) -> int:
    """Multiplications for each value that comes out of a node with this weight (that goes in, for a ConvTranspose).

    weight: its sizes: (out, in / groups, kernel...), or the matrix.  transposed: whether the matrix is (out, in).
    """
    if op_type in CONVOLUTIONS or op_type in TRANSPOSED_CONVOLUTIONS:
        return math.prod(weight[1:])
    return weight[-1] if transposed or len(weight) == 1 else weight[-2]


def multiplications(
    op_type: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], equation: str = ""
) -> int | None:
    """Multiply-adds of one execution of a node; None for an operator that is none of those that multiply.

    equation: of an Einsum. A shape of None is an input that is left out, or unknown. Raises nothing: what cannot be
    counted, for want of a shape, is 0.
    """
    if op_type in CONVOLUTIONS:
        weight = _at(inputs, CONVOLUTIONS[op_type])
        return math.prod(outputs[0]) * per_value(op_type, weight) if weight and outputs else 0
    if op_type in TRANSPOSED_CONVOLUTIONS:
        weight, given = _at(inputs, TRANSPOSED_CONVOLUTIONS[op_type]), _at(inputs, 0)
        return math.prod(given) * per_value(op_type, weight) if weight and given else 0
    if op_type in PRODUCTS:
        return _product(op_type, inputs, outputs)
    if op_type in RECURRENT:
        return _recurrent(inputs)
    if op_type == "MatMulNBits":  # the weight is packed: its sizes are not the matrix's
        given = _at(inputs, 0)
        return math.prod(outputs[0]) * given[-1] if given and outputs else 0
    if op_type == "Attention":
        return _attention(inputs)
    if op_type == "Einsum":
        return _einsum(equation, inputs)
    return None


def _at(shapes: Sequence[Shape | None], index: int) -> Shape | None:
    return shapes[index] if index < len(shapes) else None


def _product(op_type: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape]) -> int:
    left, right = _at(inputs, 0), _at(inputs, PRODUCTS[op_type])
    if not left or not right or not outputs:
        return 0
    # Whether the matrix is transposed is an attribute; which of its sizes is the result's last one says the same.
    transposed = len(right) > 1 and right[-1] != outputs[0][-1]
    return math.prod(outputs[0]) * per_value(op_type, right, transposed)


def _recurrent(inputs: Sequence[Shape | None]) -> int:
    """Every step multiplies both weights (directions, gates * hidden, in or hidden) with every sample."""
    given, weight, again = (_at(inputs, index) for index in range(3))
    if not given or not weight or not again:
        return 0
    return given[0] * given[1] * (math.prod(weight) + math.prod(again))


def _attention(inputs: Sequence[Shape | None]) -> int:
    """ONNX Runtime's fused one: input (batch, length, in), weight (in, 3 * hidden); then scores and their sums."""
    given, weight = _at(inputs, 0), _at(inputs, 1)
    if not given or not weight or len(given) != 3 or len(weight) != 2:
        return 0
    batch, length, _ = given
    return batch * length * math.prod(weight) + 2 * batch * length * length * (weight[1] // 3)


def _einsum(equation: str, inputs: Sequence[Shape | None]) -> int:
    """Every combination of all indices, once for each product."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) != len(inputs) or "." in equation:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=True):
        if shape is None or len(shape) != len(term):
            return 0
        sizes |= dict(zip(term, shape, strict=True))
    return math.prod(sizes.values()) * max(1, len(terms) - 1)
