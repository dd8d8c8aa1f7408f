"""What operators do to numbers that are known while a graph is traced: sizes, axes, pads.

Any rank, on numpy's object arrays, whose elements may be a library's symbolic sizes.
"""

import math
import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.library import ArrayLibrary
from builders.onnx_ops.table import Known, ObjectArray, on_numbers

_SIZES = (np.dtype(np.int64), np.dtype(np.int32))
_BOOL = np.dtype(bool)
Function = Callable[..., Any]


def _of(array: Any, dtype: Any) -> Known:
    """The array, which numpy gives back as a bare element when it has no axes."""
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
    """Integers, and numbers that were computed from sizes; a float constant is data, rounded in its own type."""
    return value.dtype in _SIZES or value.symbolic


def _arithmetic(name: str, function: Function) -> None:
    @on_numbers(name)
    def run(xp: ArrayLibrary, *values: Known, **_: object) -> Known | None:  # noqa: ARG001
        return _of(_each(function, *values), values[0].dtype) if all(map(_countable, values)) else None


def _truth(name: str, function: Function) -> None:
    @on_numbers(name)
    def run(xp: ArrayLibrary, *values: Known) -> Known:  # noqa: ARG001
        return _of(_each(lambda *numbers: bool(function(*numbers)), *values), _BOOL)


_ARITHMETIC: dict[str, Function] = {
    "Add": python.add,
    "Sub": python.sub,
    "Mul": python.mul,
    "Neg": python.neg,
    "Div": _quotient,
}
_TRUTHS: dict[str, Function] = {
    "Equal": python.eq,
    "Greater": python.gt,
    "GreaterOrEqual": python.ge,
    "Less": python.lt,
    "LessOrEqual": python.le,
    "Not": python.not_,
    "And": lambda a, b: a and b,
    "Or": lambda a, b: a or b,
}
for _name, _function in _ARITHMETIC.items():
    _arithmetic(_name, _function)
for _name, _function in _TRUTHS.items():
    _truth(_name, _function)


def _extreme(name: str, choose: str) -> None:
    @on_numbers(name)
    def run(xp: ArrayLibrary, a: Known, *others: Known) -> Known | None:
        if len(others) != 1 or not _countable(a):
            return None
        return _of(_each(getattr(xp, choose), a, *others), a.dtype)


_extreme("Min", "sym_min")
_extreme("Max", "sym_max")


def _register_rounding(name: str, function: Function) -> None:
    @on_numbers(name)
    def run(xp: ArrayLibrary, x: Known) -> Known | None:  # noqa: ARG001
        return _of(_each(function, x), x.dtype) if x.symbolic else None


_register_rounding("Floor", math.floor)
_register_rounding("Ceil", math.ceil)


@on_numbers("Cast")
def cast(xp: ArrayLibrary, x: Known, *, to: int, **_: object) -> Known | None:  # noqa: ARG001
    """Between integers, bool, and the fractions that torch's sizes can become."""
    dtype = tensor_dtype_to_np_dtype(to)
    if dtype in _SIZES:
        return _of(_each(_whole, x), dtype) if _countable(x) or x.dtype == _BOOL else None
    if dtype == _BOOL:
        return _of(_each(lambda number: bool(number != 0), x), dtype)
    if dtype.name in ("float32", "float64") and x.dtype in _SIZES and x.symbolic:
        return _of(_each(_fraction, x), dtype) if all(hasattr(size, "__float__") for size in x.each) else None
    return None


def _whole(number: Any) -> Any:
    return math.trunc(number) if hasattr(number, "__trunc__") else number  # JAX's sizes are whole, and have none


def _fraction(number: Any) -> Any:
    return number.__sym_float__() if hasattr(number, "__sym_float__") else float(number)


@on_numbers("Where")
def where(xp: ArrayLibrary, condition: Known, a: Known, b: Known) -> Known:  # noqa: ARG001
    """Numpy's."""
    return _of(_each(lambda c, x, y: x if c else y, condition, a, b), a.dtype)


@on_numbers("Identity")
def identity(xp: ArrayLibrary, x: Known) -> Known:  # noqa: ARG001
    """The same."""
    return x


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


@on_numbers("Concat")
def concat(xp: ArrayLibrary, *xs: Known, axis: int) -> Known:  # noqa: ARG001
    """Numpy's."""
    return _of(np.concatenate([x.numbers for x in xs], axis=axis), xs[0].dtype)


@on_numbers("Unsqueeze")
def unsqueeze(xp: ArrayLibrary, x: Known, axes: Known) -> Known:  # noqa: ARG001
    """Numpy's expand_dims."""
    return _of(np.expand_dims(x.numbers, tuple(axes.each)), x.dtype)


@on_numbers("Squeeze")
def squeeze(xp: ArrayLibrary, x: Known, axes: Known | None = None, /, **_: object) -> Known:  # noqa: ARG001
    """Numpy's."""
    return _of(np.squeeze(x.numbers, None if axes is None else tuple(axes.each)), x.dtype)


@on_numbers("Reshape")
def reshape(xp: ArrayLibrary, x: Known, shape: Known, *, allowzero: int = 0) -> Known | None:  # noqa: ARG001
    """Numpy's, with ONNX's 0."""
    if shape.symbolic:
        return None
    sizes = [x.numbers.shape[axis] if size == 0 and not allowzero else size for axis, size in enumerate(shape.each)]
    return _of(x.numbers.reshape(sizes), x.dtype)


@on_numbers("Transpose")
def transpose(xp: ArrayLibrary, x: Known, *, perm: list[int] | None = None) -> Known:  # noqa: ARG001
    """Numpy's."""
    return _of(np.transpose(x.numbers, perm), x.dtype)


@on_numbers("Expand")
def expand(xp: ArrayLibrary, x: Known, shape: Known) -> Known | None:  # noqa: ARG001
    """Numpy's broadcast_to, both ways."""
    if shape.symbolic:
        return None
    target = np.broadcast_shapes(x.numbers.shape, tuple(shape.each))
    return _of(np.broadcast_to(x.numbers, target), x.dtype)


@on_numbers("Tile")
def tile(xp: ArrayLibrary, x: Known, repeats: Known) -> Known | None:  # noqa: ARG001
    """Numpy's."""
    return None if repeats.symbolic else _of(np.tile(x.numbers, tuple(repeats.each)), x.dtype)


@on_numbers("ConstantOfShape")
def constant_of_shape(xp: ArrayLibrary, shape: Known, *, value: Any = None) -> Known | None:  # noqa: ARG001
    """Of integers, when its own shape is known."""
    if shape.symbolic or value is None or value.dtype not in _SIZES or math.prod(shape.each) > 64:
        return None
    filled: ObjectArray = np.full(tuple(shape.each), value.item(), dtype=object)
    return _of(filled, value.dtype)


@on_numbers("ReduceProd")
def reduce_prod(xp: ArrayLibrary, x: Known, axes: Known | None = None, /, **given: Any) -> Known | None:  # noqa: ARG001
    """Of integers."""
    if not _countable(x):
        return None
    along = given["axes"] if axes is None else tuple(axes.each)
    return _of(np.prod(x.numbers, axis=tuple(along) if along else None, keepdims=bool(given["keepdims"])), x.dtype)
