"""JAX's functions under the names and with the arguments that the ONNX operators use; see `ArrayLibrary`.

Functions that JAX itself has under the same name are not here. An index out of range is an error in ONNX and cannot be
one in XLA: floats then become NaN, which never passes validation, integers their least or greatest value.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
from jax import lax
from jax.core import max_dim, min_dim

from builders.onnx_ops.table import ArrayLibrary, must
from enginesmith.core.errors import ModelError

sym_max, sym_min = max_dim, min_dim
to_numpy = np.asarray
concat = jnp.concatenate
permute = jnp.transpose
at_once = jax.ensure_compile_time_eval
unsqueeze = jnp.expand_dims
repeat_interleave = jnp.repeat
rsqrt = lax.rsqrt
hardswish = jax.nn.hard_swish
softsign = jax.nn.soft_sign
layer_norm = None
branch = lax.cond
scan = lax.scan
Sizes = Sequence[int]
Widths = list[tuple[Any, Any]]
Where = tuple[jax.Array, ...]
_METHODS = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}


def dtype(numpy_dtype: np.dtype[Any], narrow: bool = False) -> np.dtype[Any]:  # noqa: ARG001 - torch's
    """JAX's dtype for numpy's. Raises ModelError for strings."""
    must(numpy_dtype.kind not in "OSU", "it has strings, which XLA does not support")
    return numpy_dtype


def asarray(array: np.ndarray[Any, Any]) -> jax.Array:
    """The array on JAX's device. Raises ModelError as `dtype` does."""
    dtype(array.dtype)
    return jnp.asarray(array)


def full(shape: Sequence[Any], value: Any, dtype: np.dtype[Any]) -> jax.Array:
    """One value everywhere, which may be a symbolic size."""
    return jnp.broadcast_to(jnp.asarray(value).astype(dtype), tuple(shape))


def is_floating(x: jax.Array) -> bool:
    """Whether its elements are floating-point numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_signed(x: jax.Array) -> bool:
    """Whether its elements can be negative."""
    return not jnp.issubdtype(x.dtype, jnp.unsignedinteger)


def ends(of: Any) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    return int(jnp.iinfo(of).min), int(jnp.iinfo(of).max)


def exact_dtype(terms: object) -> Any:  # noqa: ARG001 - torch's
    """The type in which sums of products of 8-bit integers are exact."""
    return jnp.int32


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are the same at every size of the dynamic dims."""
    return bool(a == b)


def numbers(x: jax.Array) -> list[Any]:
    """The numbers of x in a flat list. Raises ModelError where they depend on data."""
    _require_known(x, "a size or an axis depends on the data of the inputs, and XLA needs it ahead of time")
    return list(np.asarray(x).ravel().tolist())


def _require_known(x: jax.Array, words: str) -> None:
    must(not isinstance(x, jax.core.Tracer), words)


def gelu(x: jax.Array, approximate: str) -> jax.Array:
    """GELU by erf, or by its approximation with tanh. approximate: 'none' or 'tanh'."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def truncated_quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """The quotient of integers, rounded towards zero."""
    return lax.div(*jnp.broadcast_arrays(a, b))


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x @ weight^T + bias."""
    product = jnp.matmul(x, weight.T)
    return product if bias is None else product + bias


def cut(x: jax.Array, axis: int, start: Any, end: Any, step: int = 1) -> jax.Array:
    """A slice along an axis, with Python's rules."""
    slice_start = None if isinstance(start, int) and start == 0 else start
    slice_stop = None if isinstance(end, int) and end >= (1 << 31) - 1 else end
    return x[(slice(None),) * axis + (slice(slice_start, slice_stop, step),)]


def pad_axes(x: jax.Array, widths: Widths, value: float) -> jax.Array:
    """x padded with `value`. widths: elements to add before and after each axis; a negative width cuts elements."""
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low_pad, high_pad, 0) for low_pad, high_pad in widths])


def top_k(x: jax.Array, k: int, axis: int, largest: bool) -> tuple[jax.Array, jax.Array]:
    """The k greatest or least values along an axis, and their int64 indices; of equal values the lower index first."""
    rows = jnp.moveaxis(x, axis, -1)
    if largest:
        values, indices = lax.top_k(rows, k)
    else:
        indices = jnp.argsort(rows, axis=-1, stable=True)[..., :k]
        values = jnp.take_along_axis(rows, indices, axis=-1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(jnp.int64)


def take(x: jax.Array, indices: jax.Array, axis: int) -> jax.Array:
    """Numpy's take. Indices are from 0 on."""
    return jnp.take(x, indices, axis=axis, mode="fill")


def take_along(x: jax.Array, indices: jax.Array, axis: int) -> jax.Array:
    """Numpy's take_along_axis. Indices are from 0 on."""
    return jnp.take_along_axis(x, indices, axis=axis, mode="fill")


def select(x: jax.Array, axis: int, index: Any) -> jax.Array:
    """The elements at one index of an axis, which is removed. A negative index counts from the end."""
    positions = jnp.asarray(index)
    return take(x, jnp.where(positions < 0, positions + x.shape[axis], positions), axis)


def at(x: jax.Array, where: Where) -> jax.Array:
    """x[where], indexed by arrays as in numpy."""
    return x.at[where].get(mode="fill")


def put(x: jax.Array, where: Where, updates: jax.Array, reduction: str) -> jax.Array:
    """The array with x[where] replaced by `updates`, or combined with them by `reduction`."""
    updated_array: jax.Array = getattr(x.at[where], _METHODS[reduction])(updates, mode="drop")
    return updated_array


def scatter(x: jax.Array, axis: int, indices: jax.Array, updates: jax.Array, reduction: str) -> jax.Array:
    """The array with elements along an axis replaced by `updates`, or combined with them by `reduction`."""
    coordinates = jnp.meshgrid(*map(jnp.arange, indices.shape), indexing="ij", sparse=True)
    coordinates[axis] = indices
    return put(x, tuple(coordinates), updates, reduction)


def indices_of(x: jax.Array) -> jax.Array:
    """The indices of elements that are not zero, [n, axes]. Raises ModelError where they depend on data."""
    _require_known(x, "the shape of its output depends on data")
    return jnp.stack(jnp.nonzero(x), axis=-1)


def batch_norm(
    x: jax.Array, mean: jax.Array, variance: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
    """Batch normalization at inference."""
    shape = (-1, *[1] * (x.ndim - 2))
    factor = scale / jnp.sqrt(variance + epsilon)
    return x * factor.reshape(shape) + (bias - mean * factor).reshape(shape)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """softmax(q @ k^T * scale) @ v."""
    root = math.sqrt(scale)
    return jnp.matmul(jax.nn.softmax(jnp.matmul(q * root, jnp.swapaxes(k * root, 2, 3)), -1), v)


def conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, strides: Sizes, before: Sizes, after: Sizes,
    dilations: Sizes, group: int,
) -> jax.Array:  # fmt: skip
    """XLA's convolution."""
    pads = list(zip(before, after, strict=True))
    convolution = lax.conv_general_dilated(x, weight, strides, pads, rhs_dilation=dilations, feature_group_count=group)
    return _add_bias(convolution, bias)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.reshape((-1, *[1] * (x.ndim - 2)))


def conv_transpose(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, strides: Sizes, before: Sizes, after: Sizes,
    extra: Sizes, dilations: Sizes, group: int,
) -> jax.Array:  # fmt: skip
    """A convolution over the spread-out input."""
    channels, out_channels, *kernel = weight.shape
    # [in, out/group, ...] -> [out, in/group, ...], turned round.
    weight = jnp.swapaxes(weight.reshape((group, channels // group, out_channels, *kernel)), 1, 2)
    weight = jnp.flip(weight.reshape((group * out_channels, channels // group, *kernel)), tuple(range(2, x.ndim)))
    extents = [(size - 1) * dilation for size, dilation in zip(kernel, dilations, strict=True)]
    pads_by_axis = zip(extents, before, after, extra, strict=True)
    pads = [(width - low, width - high + extra_size) for width, low, high, extra_size in pads_by_axis]
    ones = [1] * len(kernel)
    convolution = lax.conv_general_dilated(
        x, weight, ones, pads, lhs_dilation=strides, rhs_dilation=dilations, feature_group_count=group
    )
    return _add_bias(convolution, bias)


def _windows(
    x: jax.Array, initial: Any, run: Any, kernel: Sizes, strides: Sizes, pads: Widths, dilations: Sizes
) -> jax.Array:
    initial = np.asarray(initial, x.dtype)
    pads = [(0, 0), (0, 0), *pads]
    return lax.reduce_window(
        x, initial, run, (1, 1, *kernel), (1, 1, *strides), pads, window_dilation=(1, 1, *dilations)
    )


def max_pool(x: jax.Array, kernel: Sizes, strides: Sizes, before: Sizes, after: Sizes, dilations: Sizes) -> jax.Array:
    """The greatest of each window."""
    lowest_value = -np.inf if is_floating(x) else ends(x.dtype)[0]
    return _windows(x, lowest_value, lax.max, kernel, strides, list(zip(before, after, strict=True)), dilations)


def max_pool_indices(*_: object) -> tuple[jax.Array, jax.Array]:
    """Raise ModelError: XLA's window reductions give no indices, so a graph that uses them is refused by its node."""
    raise ModelError("the graph uses its second output (the indices), which XLA cannot compute")


def avg_pool(x: jax.Array, kernel: Sizes, strides: Sizes, pads: Sizes, count_pads: bool) -> jax.Array:
    """The mean of each window."""
    ones = [1] * len(kernel)
    sums = window_sums(x, kernel, strides, pads, pads, ones)
    if count_pads or not any(pads):
        return sums / math.prod(kernel)
    return sums / window_sums(jnp.ones_like(x[:1, :1]), kernel, strides, pads, pads, ones)


def window_sums(
    x: jax.Array, kernel: Sizes, strides: Sizes, before: Sizes, after: Sizes, dilations: Sizes
) -> jax.Array:
    """The sum of each window, each channel by itself."""
    return _windows(x, 0, lax.add, kernel, strides, list(zip(before, after, strict=True)), dilations)


JAX = ArrayLibrary("XLA", sys.modules[__name__], jnp, jax.nn, jax.scipy.special, lacks=["GridSample"])
