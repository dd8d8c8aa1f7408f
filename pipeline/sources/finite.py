"""Weights that hold NaN or infinities, by name: otherwise the first sample that they spoil is blamed."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from enginery.core.errors import ModelError
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


def check_finite(weights: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Raise ModelError for the first of these that holds NaN or an infinity."""
    told = next((f"weight {name!r} holds {held}" for name, array in weights if (held := describe(array))), None)
    if told:
        raise ModelError(f"{told}; repair it, or train or export the model again")


def nonfinite_constants(model: onnx.ModelProto) -> Iterator[tuple[str, NDArray[Any]]]:
    """The floating-point constants of a model that hold NaN or infinities, by name."""
    for name, tensor in _constants(model):
        if onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).kind not in "iubOSU":
            array = onnx.numpy_helper.to_array(tensor)
            if not np.isfinite(array).all():
                yield name, array


def describe(array: NDArray[Any]) -> str:
    """'nan at [0, 3], and 2 more such values'; '' for finite values."""
    wrong = np.argwhere(~np.isfinite(array))
    if not len(wrong):
        return ""
    more = f", and {len(wrong) - 1} more such values" if len(wrong) > 1 else ""
    return f"{array[tuple(wrong[0])]} at {wrong[0].tolist()}{more}"


def _constants(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for graph in all_graphs(model):
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in all_nodes(model):
        if node.op_type == "Constant":
            yield from ((node.output[0], item.t) for item in node.attribute if item.HasField("t"))


def _without_infinities(array: NDArray[Any]) -> NDArray[Any]:
    return np.where(np.isinf(array), 0, array) if array.size > 1 else np.zeros_like(array)
