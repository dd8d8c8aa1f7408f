"""Which nodes of a model compute in int8 because its author quantized it, without Q/DQ nodes that a compiler reads.

Such nodes stay what they are in every graph variant: an 'fp32' engine of such a model computes in int8 there.
"""

from collections import Counter

from onnx import ModelProto

from builders.onnx_graphs.bodies import walk_nodes

# ONNX's own operators, and ONNX Runtime's.
INTEGER_OPS = frozenset(
    {
        *("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
        *("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QGemm"),
    }
)


def count_integer_nodes(model: ModelProto) -> tuple[tuple[str, int], ...]:
    """(operator, how many) of the nodes that multiply in int8 in a model, inner graphs included, by operator."""
    return tuple(
        sorted(Counter(node.op_type for node in walk_nodes(model.graph) if node.op_type in INTEGER_OPS).items())
    )
