"""Normalizations, and softmax."""

import math
from collections.abc import Callable
from functools import reduce

from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.table import must, operator


def along_axis(function: Callable[[Array, int], Array], x: Array, axis: int | None, opset: int) -> Array:
    """function(x, axis), from opset 13 on; before it, of x with all axes from `axis` on as one."""
    if opset >= 13:
        return function(x, -1 if axis is None else axis)
    axis = (1 if axis is None else axis) % x.ndim
    flat = x.reshape((*x.shape[:axis], math.prod(x.shape[axis:])))
    return function(flat, -1).reshape(tuple(x.shape))


@operator("Softmax")
def softmax(xp: ArrayLibrary, x: Array, *, axis: int | None = None, opset: int) -> Array:
    """Softmax along an axis."""
    return along_axis(xp.softmax, x, axis, opset)


@operator("LogSoftmax")
def log_softmax(xp: ArrayLibrary, x: Array, *, axis: int | None = None, opset: int) -> Array:
    """The logarithm of softmax along an axis."""
    return along_axis(xp.log_softmax, x, axis, opset)


@operator("BatchNormalization")
def batch_normalization(
    xp: ArrayLibrary, x: Array, scale: Array, bias: Array, mean: Array, variance: Array,
    *, epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0,
) -> Array:  # fmt: skip
    """Batch normalization at inference, with the given mean and variance."""
    del momentum
    must(not training_mode, "it is in training mode; export the model for inference")
    return xp.batch_norm(x, *(xp.astype(part, x.dtype) for part in (mean, variance, scale, bias)), epsilon)


@operator("LayerNormalization")
def layer_normalization(
    xp: ArrayLibrary, x: Array, scale: Array, bias: Array | None = None,
    *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Normalized over the axes from `axis` on; by the library's function where it has one that does the same."""
    axis = axis % x.ndim
    sizes = list(x.shape[axis:])
    plain = all(isinstance(size, int) for size in sizes) and list(scale.shape) == sizes
    if xp.layer_norm is not None and outputs == 1 and plain and (bias is None or list(bias.shape) == sizes):
        return (xp.layer_norm(x, sizes, scale, bias, epsilon),)
    wide = xp.astype(x, xp.dtype(tensor_dtype_to_np_dtype(stash_type)))
    normal, mean, inverse = _standardize(xp, wide, tuple(range(axis, x.ndim)), epsilon)
    made = xp.astype(normal, x.dtype) * scale
    return (made if bias is None else made + bias, mean, inverse)[:outputs]


def _standardize(xp: ArrayLibrary, x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / deviation over some axes, the mean, and 1 / deviation."""
    mean = xp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    inverse = xp.rsqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + epsilon)
    return centred * inverse, mean, inverse


@operator("RMSNormalization")
def rms_normalization(
    xp: ArrayLibrary, x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Array:
    """x over the root of its mean square over the axes from `axis` on, times the scale."""
    wide = xp.astype(x, xp.dtype(tensor_dtype_to_np_dtype(stash_type)))
    axes = tuple(range(axis % x.ndim, x.ndim))
    inverse = xp.rsqrt(xp.mean(wide * wide, axis=axes, keepdims=True) + epsilon)
    return xp.astype(wide * inverse, x.dtype) * scale


@operator("InstanceNormalization")
def instance_normalization(xp: ArrayLibrary, x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5) -> Array:
    """Normalized within each channel of each sample; 16-bit floats are computed in float32."""
    wide = x if x.dtype == xp.float64 else xp.astype(x, xp.float32)
    normal = xp.astype(_by_groups(xp, wide, x.shape[1], epsilon), x.dtype)
    return normal * _channels(scale, x) + _channels(bias, x)


@operator("GroupNormalization")
def group_normalization(
    xp: ArrayLibrary, x: Array, scale: Array, bias: Array,
    *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1, opset: int,
) -> Array:  # fmt: skip
    """Normalized within groups of channels; scale and bias are per group up to opset 20, per channel from 21 on."""
    wide = xp.astype(x, xp.dtype(tensor_dtype_to_np_dtype(stash_type)))
    normal = xp.astype(_by_groups(xp, wide, num_groups, epsilon), x.dtype)
    if opset < 21:
        each = x.shape[1] // num_groups
        scale, bias = xp.repeat_interleave(scale, each, 0), xp.repeat_interleave(bias, each, 0)
    return normal * _channels(scale, x) + _channels(bias, x)


def _by_groups(xp: ArrayLibrary, x: Array, groups: int, epsilon: float) -> Array:
    parts = x.reshape((x.shape[0], groups, -1))
    return _standardize(xp, parts, (2,), epsilon)[0].reshape(x.shape)


def _channels(scale: Array, x: Array) -> Array:
    """A value per channel in the shape that broadcasts along axis 1 of x."""
    return scale.reshape((-1, *[1] * (x.ndim - 2)))


@operator("LRN")
def local_response(
    xp: ArrayLibrary, x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Array:
    """Local response normalization: over a power of the squares of `size` neighbouring channels (for an even `size` one
    more after than before)."""
    squares = xp.pad_axes(x * x, [(0, 0), ((size - 1) // 2, size // 2), *[(0, 0)] * (x.ndim - 2)], 0)
    around = [xp.cut(squares, 1, start, start + x.shape[1]) for start in range(size)]
    return x / (bias + alpha / size * reduce(xp.add, around)) ** beta


@operator("LpNormalization")
def lp_normalization(xp: ArrayLibrary, x: Array, *, axis: int = -1, p: int = 2) -> Array:
    """x over its L1 or L2 norm along an axis; 0 where the norm is 0."""
    sums = xp.sum(xp.abs(x) if p == 1 else x * x, axis=(axis,), keepdims=True)
    norm = sums if p == 1 else xp.sqrt(sums)
    return xp.where(norm == 0, xp.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization")
def mean_variance(xp: ArrayLibrary, x: Array, *, axes: list[int] | None = None) -> Array:
    """Normalized to mean 0 and deviation 1; 1e-9 is added to the deviation, as in ONNX's definition."""
    along = tuple([0, 2, 3] if axes is None else axes)
    mean = xp.mean(x, axis=along, keepdims=True)
    return (x - mean) / (xp.sqrt(xp.mean(x * x, axis=along, keepdims=True) - mean * mean) + 1e-9)
