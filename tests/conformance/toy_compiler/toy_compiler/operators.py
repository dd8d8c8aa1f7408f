"""What the toy knows: ONNX operators as functions of numpy arrays, as of opset 13. An input left out is None."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def div(a: Array, b: Array) -> Array:
    """a / b; of integers towards zero."""
    if a.dtype.kind == "f":
        return a / b
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), a.dtype) if a.dtype.kind == "i" else a // b


def matmul(a: Array, b: Array) -> Array:
    """a @ b; half precision is multiplied in single."""
    wide_float32 = np.float32 if a.dtype == np.float16 else a.dtype
    return np.matmul(a.astype(wide_float32), b.astype(wide_float32)).astype(a.dtype)


def gemm(a: Array, b: Array, c: Array | None = None, alpha=1.0, beta=1.0, transA=0, transB=0) -> Array:
    product = alpha * matmul(a.T if transA else a, b.T if transB else b)
    return (product if c is None else product + beta * c).astype(a.dtype)


def softmax(x: Array, axis: int = -1) -> Array:
    raised_values = np.exp(x - x.max(axis, keepdims=True))
    return raised_values / raised_values.sum(axis, keepdims=True)


def layer_norm(x: Array, scale: Array, bias: Array | None = None, axis: int = -1, epsilon=1e-5, stash_type=1) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, over the axes from `axis` on."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    centred_values = x - x.mean(axes, keepdims=True)
    result = centred_values / np.sqrt((centred_values**2).mean(axes, keepdims=True) + np.float32(epsilon)) * scale
    return (result if bias is None else result + bias).astype(x.dtype)


def reduced(of: Callable[..., Any]) -> Callable[..., Array]:
    """A reduction with its axes as an attribute (up to opset 17) or an input."""

    def reduce(x: Array, axes_input: Array | None = None, axes=None, keepdims=1, noop_with_empty_axes=0) -> Array:
        chosen = axes if axes_input is None else axes_input.tolist()
        if not chosen and noop_with_empty_axes:
            return x
        return np.asarray(of(x, axis=tuple(chosen) if chosen else None, keepdims=bool(keepdims)), x.dtype)

    return reduce


def convolution(
    x: Array, w: Array, b: Array | None = None, strides=(1, 1), pads=(0, 0, 0, 0), kernel_shape=()
) -> Array:
    """A convolution of [n, c, h, w] in one group, without dilation."""
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], (2, 3))[:, :, :: strides[0], :: strides[1]]
    result = np.einsum("nchwij,ocij->nohw", windows, w)
    return (result if b is None else result + b[:, None, None]).astype(x.dtype)


def along(value: Array, x: Array, axis: int) -> Array:
    """A vector of one number for each place of an axis, so that it can be broadcast over the rest."""
    return value.reshape([-1 if index == axis % x.ndim else 1 for index in range(x.ndim)]) if value.ndim == 1 else value


def quantize(x: Array, scale: Array, zero: Array | None = None, axis: int = 1) -> Array:
    """round(x / scale) + zero, within the type of `zero`."""
    kind = np.dtype(np.uint8) if zero is None else zero.dtype
    moved_values = np.rint(x / along(scale, x, axis)) + (0 if zero is None else along(zero.astype(np.float32), x, axis))
    return np.clip(moved_values, np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)


def dequantize(x: Array, scale: Array, zero: Array | None = None, axis: int = 1) -> Array:
    whole_values = x.astype(np.int32) - (0 if zero is None else along(zero.astype(np.int32), x, axis))
    return (whole_values * along(scale, x, axis)).astype(scale.dtype)


def clip(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    result = x if low is None else np.maximum(x, low)
    return result if high is None else np.minimum(result, high)


def reshape(x: Array, shape: Array) -> Array:
    """x in another shape; 0 keeps a size."""
    return x.reshape([x.shape[index] if size == 0 else size for index, size in enumerate(shape.tolist())])


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Cast": lambda x, to: x.astype(to),
    "Clip": clip,
    "Constant": lambda value: value,
    "Conv": convolution,
    "DequantizeLinear": dequantize,
    "Div": div,
    "Flatten": lambda x, axis=1: x.reshape(int(np.prod(x.shape[:axis])), -1),
    "Gather": lambda x, at, axis=0: np.take(x, at, axis),
    "Gemm": gemm,
    "Greater": np.greater,
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1).astype(x.dtype),
    "Identity": lambda x: x,
    "LayerNormalization": layer_norm,
    "MatMul": matmul,
    "Mul": np.multiply,
    "Neg": np.negative,
    "QuantizeLinear": quantize,
    "ReduceMean": reduced(np.mean),
    "ReduceSum": reduced(np.sum),
    "Relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "Reshape": reshape,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softmax": softmax,
    "Squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(axes.tolist())),
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Transpose": lambda x, perm=None: np.transpose(x, perm),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes.tolist())),
    "Where": np.where,
}


def run_step(step: dict[str, Any], values: dict[str, Any]) -> Any:
    """The value of a step. Raises what numpy raises."""
    with np.errstate(all="ignore"):
        arguments = [values[name] if name else None for name in step["inputs"]]
        return np.asarray(OPERATORS[step["op"]](*arguments, **step["given"]))
