"""Weights that hold NaN or infinities, by name: otherwise the first sample that they spoil is blamed."""

from collections.abc import Iterator

import numpy as np
import onnx

from enginery.arrays.arrays import Array
from enginery.user_code.finite import check_finite
from pipeline.sources.walk import all_graphs, all_nodes

# Operators that multiply with their constants, where no infinity is meant. Elsewhere one may be a mask or a bound.
_WEIGHTED = frozenset(
    {
        "BatchNormalization", "Conv", "ConvTranspose", "Div", "GRU", "Gemm", "GroupNormalization",
        "InstanceNormalization", "LSTM", "LayerNormalization", "MatMul", "Mul", "PRelu", "RNN", "RMSNormalization",
    }
)  # fmt: skip


def check_weights(model: onnx.ModelProto) -> None:
    """Raise ModelError for a weight with NaN, or with an infinity that is multiplied with. A lone NaN, which may mark
    what is missing, counts where it is multiplied with."""
    weights = {name for node in all_nodes(model) if node.op_type in _WEIGHTED for name in node.input}
    check_finite(
        (name, array if name in weights else _without_infinities(array)) for name, array in nonfinite_constants(model)
    )


def nonfinite_constants(model: onnx.ModelProto) -> Iterator[tuple[str, Array]]:
    """The floating-point constants of a model that hold NaN or infinities, by name."""
    for name, tensor in _constants(model):
        if onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).kind not in "iubOSU":
            array = onnx.numpy_helper.to_array(tensor)
            if not np.isfinite(array).all():
                yield name, array


def _constants(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for graph in all_graphs(model):
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in all_nodes(model):
        if node.op_type == "Constant":
            yield from ((node.output[0], item.t) for item in node.attribute if item.HasField("t"))


def _without_infinities(array: Array) -> Array:
    return np.where(np.isinf(array), 0, array) if array.size > 1 else np.zeros_like(array)
