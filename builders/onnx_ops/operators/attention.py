"""Attention, and the sizes that operators compute."""

import math
import operator as python
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.table import ON_NUMBERS, Array, ArrayLibrary, Known, ObjectArray, must, on_numbers, operator


@operator("Attention")
def attention(
    xp: ArrayLibrary, q: Array, k: Array, v: Array, mask: Array | None = None, past_key: Array | None = None,
    past_value: Array | None = None, filled: Array | None = None,
    *, is_causal: int = 0, kv_num_heads: int | None = None, left_window_size: int = -1, q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0, right_window_size: int = -1, scale: float | None = None, softcap: float = 0.0,
    softmax_precision: int | None = None, outputs: int,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Attention of [batch, heads, length, size] or [batch, length, heads * size]; 0 for a query without keys.

    filled: how many keys of each sample are no padding, where the caller keeps the cache.
    """
    is_flat = q.ndim == 3
    if is_flat:
        must(bool(q_num_heads and kv_num_heads), "its inputs have 3 axes and it does not say how many heads there are")
        head_counts = ((q, q_num_heads or 1), (k, kv_num_heads or 1), (v, kv_num_heads or 1))
        q, k, v = (xp.swapaxes(x.reshape((x.shape[0], x.shape[1], n, -1)), 1, 2) for x, n in head_counts)
    k = k if past_key is None else xp.concat([past_key, k], 2)
    v = v if past_value is None else xp.concat([past_value, v], 2)
    group_count = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x if group_count == 1 else xp.repeat_interleave(x, group_count, 1) for x in (k, v))
    window = _Window(bool(is_causal), left_window_size, right_window_size)
    bias = _bias(xp, q, k, mask, 0 if past_key is None else past_key.shape[2], filled, window)
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    scores: Array | None = None
    if bias is None and not softcap and outputs < 4 and softmax_precision in (None, 1):
        output = xp.attention(q, wide_k, wide_v, factor)
    else:
        root = math.sqrt(factor)
        product = xp.matmul(q * root, xp.swapaxes(wide_k * root, 2, 3))
        stages = _weights(xp, product, bias, softcap, softmax_precision)
        output, scores = xp.matmul(stages[-1], wide_v), stages[qk_matmul_output_mode]
    if is_flat:
        output = xp.swapaxes(output, 1, 2).reshape((output.shape[0], output.shape[2], -1))
    return (output, k, v, scores)[:outputs]


def _weights(
    xp: ArrayLibrary, scores: Array, bias: Array | None, softcap: float, precision: int | None
) -> tuple[Array, ...]:
    """The scores at the four stages that `qk_matmul_output_mode` names: twice capped, with the bias, as weights."""
    capped_scores = softcap * xp.tanh(scores / softcap) if softcap else scores
    biased_scores = capped_scores if bias is None else capped_scores + bias
    logits = xp.astype(biased_scores, xp.dtype(tensor_dtype_to_np_dtype(precision))) if precision else biased_scores
    weights = xp.softmax(logits, -1)
    if bias is not None:
        empty_rows = xp.amax(bias, axis=(-1,), keepdims=True) == -math.inf
        weights = xp.where(empty_rows, xp.zeros_like(weights), weights)
    # Mode 0 is documented as the bare product, and the reference gives it capped.
    return capped_scores, capped_scores, biased_scores, xp.astype(weights, scores.dtype)


class _Window(NamedTuple):
    """Which keys a query sees. left, right: how far from its own place; -1 is without end."""

    causal: bool
    left: int
    right: int


def _bias(
    xp: ArrayLibrary, q: Array, k: Array, mask: Array | None, past: int, filled: Array | None, window: _Window
) -> Array | None:
    """The bias of the scores: 0 or the mask's value where a query attends, -inf elsewhere; None without a bias."""
    minus_infinity, zero = xp.full((), -math.inf, dtype=q.dtype), xp.zeros((), dtype=q.dtype)
    bias: Array | None = None
    if mask is not None:
        bias = xp.where(mask, zero, minus_infinity) if mask.dtype == xp.bool else mask
        gap = k.shape[2] - mask.shape[-1]
        if not isinstance(gap, int) or gap:
            bias = xp.pad_axes(bias, [(0, 0)] * (bias.ndim - 1) + [(0, gap)], -math.inf)
    key_positions = xp.arange(k.shape[2])
    positions = xp.unsqueeze(xp.arange(q.shape[2]), 1) + past
    valid_lengths = None if filled is None else filled.reshape((-1, 1, 1, 1))
    if valid_lengths is not None and not past:
        positions = positions + (valid_lengths - q.shape[2])
    visibility_masks = [key_positions < valid_lengths] if valid_lengths is not None else []
    visibility_masks += [key_positions <= positions] if window.causal else []
    visibility_masks += [key_positions >= positions - window.left] if window.left >= 0 else []
    visibility_masks += [key_positions <= positions + window.right] if window.right >= 0 else []
    for mask_part in visibility_masks:
        bias = xp.where(mask_part, zero if bias is None else bias, minus_infinity)
    return bias


# Operators on numbers that are known while a graph is traced: sizes, axes, pads.
#
# Each function gives a `Known`, or None where the operator has to be done on arrays. The numbers are in numpy's object
# arrays of any rank, whose elements may be a library's symbolic sizes.

_SIZES = (np.dtype(np.int64), np.dtype(np.int32))
_BOOL = np.dtype(bool)
Function = Callable[..., Any]


def _of(array: Any, dtype: Any) -> Known:
    """A `Known` of an array, which numpy gives as a bare element when it has no axes."""
    if isinstance(array, np.ndarray):
        return Known(array, dtype)
    scalar_array: ObjectArray = np.empty((), dtype=object)
    scalar_array[()] = array
    return Known(scalar_array, dtype)


def _each(function: Function, *values: Known) -> Any:
    return np.frompyfunc(function, len(values), 1)(*(value.numbers for value in values))


def _quotient(a: Any, b: Any) -> Any:
    """Integers are cut towards zero; sizes are not negative, and // is all they need."""
    if isinstance(a, int) and isinstance(b, int) and (a < 0) != (b < 0):
        return -(-a // b)
    return a / b if isinstance(a, float) or hasattr(a, "is_integer") else a // b


def _countable(value: Known) -> bool:
    """Whether it is of integers, or computed from sizes; a float constant is data, rounded in its own type."""
    return value.dtype in _SIZES or value.symbolic


def _arithmetic(function: Function, _xp: ArrayLibrary, *values: Known, **_: object) -> Known | None:
    return _of(_each(function, *values), values[0].dtype) if all(map(_countable, values)) else None


def _truth(function: Function, _xp: ArrayLibrary, *values: Known) -> Known:
    return _of(_each(lambda *numbers: bool(function(*numbers)), *values), _BOOL)


def _extreme(choose: str, xp: ArrayLibrary, a: Known, *others: Known) -> Known | None:
    if len(others) != 1 or not _countable(a):
        return None
    return _of(_each(getattr(xp, choose), a, *others), a.dtype)


def _round_sizes(function: Function, _xp: ArrayLibrary, x: Known) -> Known | None:
    return _of(_each(function, x), x.dtype) if x.symbolic else None


def _axes(axes_input: Known | None, axes: list[int] | None) -> Any:
    """The axes of an input, or of the attribute that it was before opset 13; None: those of size 1."""
    return tuple(axes_input.each) if axes_input is not None else axes and tuple(axes)


ON_NUMBERS.update(
    Add=partial(_arithmetic, python.add),
    Sub=partial(_arithmetic, python.sub),
    Mul=partial(_arithmetic, python.mul),
    Neg=partial(_arithmetic, python.neg),
    Div=partial(_arithmetic, _quotient),
    Equal=partial(_truth, python.eq),
    Greater=partial(_truth, python.gt),
    GreaterOrEqual=partial(_truth, python.ge),
    Less=partial(_truth, python.lt),
    LessOrEqual=partial(_truth, python.le),
    Not=partial(_truth, python.not_),
    And=partial(_truth, lambda a, b: a and b),
    Or=partial(_truth, lambda a, b: a or b),
    Min=partial(_extreme, "sym_min"),
    Max=partial(_extreme, "sym_max"),
    Floor=partial(_round_sizes, math.floor),
    Ceil=partial(_round_sizes, math.ceil),
    Identity=lambda _xp, x: x,
    Where=lambda _xp, condition, a, b: _of(_each(lambda c, x, y: x if c else y, condition, a, b), a.dtype),
    Concat=lambda _xp, *xs, axis: _of(np.concatenate([x.numbers for x in xs], axis=axis), xs[0].dtype),
    Transpose=lambda _xp, x, perm=None: _of(np.transpose(x.numbers, perm), x.dtype),
    Unsqueeze=lambda _xp, x, axes_input=None, axes=None: _of(
        np.expand_dims(x.numbers, _axes(axes_input, axes)), x.dtype
    ),
    Squeeze=lambda _xp, x, axes_input=None, axes=None: _of(np.squeeze(x.numbers, _axes(axes_input, axes)), x.dtype),
    Tile=lambda _xp, x, repeats: None if repeats.symbolic else _of(np.tile(x.numbers, tuple(repeats.each)), x.dtype),
)


@on_numbers("Cast")
def cast(xp: ArrayLibrary, x: Known, *, to: int, **_: object) -> Known | None:  # noqa: ARG001
    """Between integers and bool, and to floating point of torch's sizes."""
    dtype = tensor_dtype_to_np_dtype(to)
    if dtype in _SIZES:
        return _of(_each(_whole, x), dtype) if _countable(x) or x.dtype == _BOOL else None
    if dtype == _BOOL:
        return _of(_each(lambda number: bool(number != 0), x), dtype)
    if dtype.name in ("float32", "float64") and x.dtype in _SIZES and x.symbolic:
        return _of(_each(_fraction, x), dtype) if all(hasattr(size, "__float__") for size in x.each) else None
    return None


def _whole(number: Any) -> Any:
    """A number cut towards zero. Sizes are whole: torch would take trunc(size) for another number than the size."""
    if hasattr(number, "__index__") or not hasattr(number, "__trunc__"):
        return int(number) if isinstance(number, bool) else number
    return math.trunc(number)


def _fraction(number: Any) -> Any:
    return number.__sym_float__() if hasattr(number, "__sym_float__") else float(number)


@on_numbers("Gather")
def gather(xp: ArrayLibrary, data: Known, indices: Known, *, axis: int = 0) -> Known | None:  # noqa: ARG001
    """Numpy's take."""
    if indices.symbolic:
        return None
    return _of(np.take(data.numbers, indices.numbers.astype(np.int64), axis=axis), data.dtype)


@on_numbers("Slice")
def slice_(xp: ArrayLibrary, data: Known, starts: Known, ends: Known, *more: Known | None) -> Known | None:  # noqa: ARG001
    """Python's slices. more: axes, steps."""
    if any(value.symbolic for value in (starts, ends, *more) if value is not None):
        return None
    axes, steps = (*more, None, None)[:2]
    sliced_axes = axes.each if axes is not None else list(range(starts.numbers.size))
    strides = steps.each if steps is not None else [1] * len(sliced_axes)
    slices: list[slice] = [slice(None)] * data.numbers.ndim
    for axis, start, end, step in zip(sliced_axes, starts.each, ends.each, strides, strict=True):
        size = data.numbers.shape[axis]
        slices[axis] = slice(start, None if step < 0 and end < -size else end, step)
    return _of(data.numbers[tuple(slices)], data.dtype)


@on_numbers("Reshape")
def reshape(xp: ArrayLibrary, x: Known, shape: Known, *, allowzero: int = 0) -> Known | None:  # noqa: ARG001
    """Numpy's, with ONNX's 0."""
    if shape.symbolic:
        return None
    sizes = [x.numbers.shape[axis] if size == 0 and not allowzero else size for axis, size in enumerate(shape.each)]
    return _of(x.numbers.reshape(sizes), x.dtype)


@on_numbers("Expand")
def expand(xp: ArrayLibrary, x: Known, shape: Known) -> Known | None:  # noqa: ARG001
    """Numpy's broadcast_to, both ways."""
    if shape.symbolic:
        return None
    target = np.broadcast_shapes(x.numbers.shape, tuple(shape.each))
    return _of(np.broadcast_to(x.numbers, target), x.dtype)


@on_numbers("ConstantOfShape")
def constant_of_shape(xp: ArrayLibrary, shape: Known, *, value: Any = None) -> Known | None:  # noqa: ARG001
    """An array of up to 64 integers, when its shape is known."""
    if shape.symbolic or value is None or value.dtype not in _SIZES or math.prod(shape.each) > 64:
        return None
    filled_array: ObjectArray = np.full(tuple(shape.each), value.item(), dtype=object)
    return _of(filled_array, value.dtype)


@on_numbers("ReduceProd")
def reduce_prod(xp: ArrayLibrary, x: Known, axes: Known | None = None, /, **attributes: Any) -> Known | None:  # noqa: ARG001
    """The product of integers, or of numbers computed from sizes."""
    if not _countable(x):
        return None
    dims = attributes["axes"] if axes is None else tuple(axes.each)
    return _of(np.prod(x.numbers, axis=tuple(dims) if dims else None, keepdims=bool(attributes["keepdims"])), x.dtype)
