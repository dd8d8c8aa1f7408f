"""Operators on numbers that are known while a graph is traced: sizes, axes, pads.

Each function gives a `Known`, or None where the operator has to be done on arrays. The numbers are in numpy's object
arrays of any rank, whose elements may be a library's symbolic sizes.
"""

import math
import operator as python
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.library import ArrayLibrary
from builders.onnx_ops.table import ON_NUMBERS, Known, ObjectArray, on_numbers

_SIZES = (np.dtype(np.int64), np.dtype(np.int32))
_BOOL = np.dtype(bool)
Function = Callable[..., Any]


def _of(array: Any, dtype: Any) -> Known:
    """A `Known` of an array, which numpy gives as a bare element when it has no axes."""
    if isinstance(array, np.ndarray):
        return Known(array, dtype)
    single: ObjectArray = np.empty((), dtype=object)
    single[()] = array
    return Known(single, dtype)


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


def _axes(given: Known | None, axes: list[int] | None) -> Any:
    """The axes of an input, or of the attribute that it was before opset 13; None: those of size 1."""
    return tuple(given.each) if given is not None else axes and tuple(axes)


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
    Unsqueeze=lambda _xp, x, given=None, axes=None: _of(np.expand_dims(x.numbers, _axes(given, axes)), x.dtype),
    Squeeze=lambda _xp, x, given=None, axes=None: _of(np.squeeze(x.numbers, _axes(given, axes)), x.dtype),
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
    along = axes.each if axes is not None else list(range(starts.numbers.size))
    strides = steps.each if steps is not None else [1] * len(along)
    cut: list[slice] = [slice(None)] * data.numbers.ndim
    for axis, start, end, step in zip(along, starts.each, ends.each, strides, strict=True):
        size = data.numbers.shape[axis]
        cut[axis] = slice(start, None if step < 0 and end < -size else end, step)
    return _of(data.numbers[tuple(cut)], data.dtype)


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
    filled: ObjectArray = np.full(tuple(shape.each), value.item(), dtype=object)
    return _of(filled, value.dtype)


@on_numbers("ReduceProd")
def reduce_prod(xp: ArrayLibrary, x: Known, axes: Known | None = None, /, **given: Any) -> Known | None:  # noqa: ARG001
    """The product of integers, or of numbers computed from sizes."""
    if not _countable(x):
        return None
    along = given["axes"] if axes is None else tuple(axes.each)
    return _of(np.prod(x.numbers, axis=tuple(along) if along else None, keepdims=bool(given["keepdims"])), x.dtype)
