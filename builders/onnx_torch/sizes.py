"""What operators do to numbers that are known while a graph is traced: sizes, axes, pads.

Any rank, on numpy's object arrays, whose elements may be torch's symbolic integers.
"""

import math
import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from builders.onnx_torch.reading import DTYPES
from builders.onnx_torch.table import Known, ObjectArray, greatest, least, on_numbers

_INTEGERS = {torch.int64, torch.int32, torch.int8, torch.uint8, torch.int16}


def _of(array: Any, dtype: torch.dtype) -> Known:
    """The array, which numpy gives back as a bare element when it has no axes."""
    if isinstance(array, np.ndarray):
        return Known(array, dtype)
    single: ObjectArray = np.empty((), dtype=object)
    single[()] = array
    return Known(single, dtype)


def _each(function: Callable[..., Any], *values: Known) -> Any:
    return np.frompyfunc(function, len(values), 1)(*(value.numbers for value in values))


def _quotient(a: Any, b: Any) -> Any:
    """Integers are cut towards zero; sizes are not negative, and // is all they need."""
    if isinstance(a, (float, torch.SymFloat)):
        return a / b
    if isinstance(a, int) and isinstance(b, int) and (a < 0) != (b < 0):
        return -(-a // b)
    return a // b


_ARITHMETIC = {
    "Add": python.add,
    "Sub": python.sub,
    "Mul": python.mul,
    "Div": _quotient,
    "Min": least,
    "Max": greatest,
}
_COMPARISONS = {
    "Equal": python.eq,
    "Greater": python.gt,
    "GreaterOrEqual": python.ge,
    "Less": python.lt,
    "LessOrEqual": python.le,
}


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[..., Known | None]:
    def run(*values: Known, **attributes: Any) -> Known | None:
        del attributes
        if len(values) != 2 or not _countable(values[0]):
            return None
        return _of(_each(function, *values), values[0].dtype)

    return run


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[..., Known | None]:
    def run(a: Known, b: Known) -> Known | None:
        return _of(_each(lambda x, y: bool(function(x, y)), a, b), torch.bool)

    return run


for _name, _function in _ARITHMETIC.items():
    on_numbers(_name)(_arithmetic(_function))
for _name, _function in _COMPARISONS.items():
    on_numbers(_name)(_comparison(_function))


def _countable(value: Known) -> bool:
    """Integers, and numbers that were computed from sizes; a float constant is data, rounded in its own type."""
    return value.dtype in _INTEGERS or value.symbolic


@on_numbers("Cast")
def cast(x: Known, *, to: int, **_: Any) -> Known | None:
    """Between integers, floats and bool. None of fractions to float16 and the like, which round."""
    dtype = DTYPES.get(to)
    if dtype in _INTEGERS:
        return _of(_each(_whole, x), dtype) if dtype in (torch.int64, torch.int32) else None
    if dtype == torch.bool:
        return _of(_each(lambda number: bool(number != 0), x), dtype)
    if dtype in (torch.float32, torch.float64) and x.dtype in _INTEGERS and x.symbolic:
        return _of(_each(torch.sym_float, x), dtype)
    return None


def _whole(number: Any) -> Any:
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return torch.sym_int(number)  # type: ignore[no-untyped-call]
    return int(number)


@on_numbers("Floor")
def floor(x: Known) -> Known | None:
    """Of what was computed from sizes."""
    return _of(_each(math.floor, x), x.dtype) if x.symbolic else None


@on_numbers("Ceil")
def ceil(x: Known) -> Known | None:
    """Of what was computed from sizes."""
    return _of(_each(math.ceil, x), x.dtype) if x.symbolic else None


@on_numbers("Neg")
def negative(x: Known) -> Known | None:
    """Of integers."""
    return _of(_each(python.neg, x), x.dtype) if _countable(x) else None


@on_numbers("Not")
def invert(x: Known) -> Known:
    """Of truths."""
    return _of(_each(lambda number: not number, x), torch.bool)


@on_numbers("And")
def both(a: Known, b: Known) -> Known:
    """Of truths."""
    return _of(_each(lambda x, y: bool(x and y), a, b), torch.bool)


@on_numbers("Or")
def either(a: Known, b: Known) -> Known:
    """Of truths."""
    return _of(_each(lambda x, y: bool(x or y), a, b), torch.bool)


@on_numbers("Where")
def where(condition: Known, a: Known, b: Known) -> Known:
    """Numpy's."""
    return _of(_each(lambda c, x, y: x if c else y, condition, a, b), a.dtype)


@on_numbers("Identity")
def identity(x: Known) -> Known:
    """The same."""
    return x


@on_numbers("Gather")
def gather(data: Known, indices: Known, *, axis: int = 0) -> Known | None:
    """Numpy's take."""
    if indices.symbolic:
        return None
    return _of(np.take(data.numbers, indices.numbers.astype(np.int64), axis=axis), data.dtype)


@on_numbers("Slice")
def slice_(
    data: Known, starts: Known, ends: Known, axes: Known | None = None, steps: Known | None = None
) -> Known | None:
    """Python's slices."""
    given = [value for value in (starts, ends, axes, steps) if value is not None]
    if any(value.symbolic for value in given):
        return None
    where_ = axes.each if axes is not None else list(range(starts.numbers.size))
    strides = steps.each if steps is not None else [1] * len(where_)
    cut: list[slice] = [slice(None)] * data.numbers.ndim
    for axis, start, end, step in zip(where_, starts.each, ends.each, strides, strict=True):
        size = data.numbers.shape[axis]
        cut[axis] = slice(start, None if step < 0 and end < -size else end, step)
    return _of(data.numbers[tuple(cut)], data.dtype)


@on_numbers("Concat")
def concat(*xs: Known, axis: int) -> Known:
    """Numpy's."""
    return _of(np.concatenate([x.numbers for x in xs], axis=axis), xs[0].dtype)


@on_numbers("Unsqueeze")
def unsqueeze(x: Known, axes: Known) -> Known:
    """Numpy's expand_dims."""
    return _of(np.expand_dims(x.numbers, tuple(axes.each)), x.dtype)


@on_numbers("Squeeze")
def squeeze(x: Known, axes: Known | None = None, /, **_: Any) -> Known:
    """Numpy's."""
    return _of(np.squeeze(x.numbers, None if axes is None else tuple(axes.each)), x.dtype)


@on_numbers("Reshape")
def reshape(x: Known, shape: Known, *, allowzero: int = 0) -> Known | None:
    """Numpy's, with ONNX's 0."""
    if shape.symbolic:
        return None
    sizes = [x.numbers.shape[axis] if size == 0 and not allowzero else size for axis, size in enumerate(shape.each)]
    return _of(x.numbers.reshape(sizes), x.dtype)


@on_numbers("Transpose")
def transpose(x: Known, *, perm: list[int] | None = None) -> Known:
    """Numpy's."""
    return _of(np.transpose(x.numbers, perm), x.dtype)


@on_numbers("Expand")
def expand(x: Known, shape: Known) -> Known | None:
    """Numpy's broadcast_to, both ways."""
    if shape.symbolic:
        return None
    target = np.broadcast_shapes(x.numbers.shape, tuple(shape.each))
    return _of(np.broadcast_to(x.numbers, target), x.dtype)


@on_numbers("Tile")
def tile(x: Known, repeats: Known) -> Known | None:
    """Numpy's."""
    return None if repeats.symbolic else _of(np.tile(x.numbers, tuple(repeats.each)), x.dtype)


@on_numbers("ConstantOfShape")
def constant_of_shape(shape: Known, *, value: torch.Tensor | None = None) -> Known | None:
    """Of integers, when its own shape is known."""
    if shape.symbolic or value is None or value.dtype not in _INTEGERS or math.prod(shape.each) > 64:
        return None
    filled: ObjectArray = np.full(tuple(shape.each), value.item(), dtype=object)
    return _of(filled, value.dtype)


@on_numbers("ReduceProd")
def reduce_prod(x: Known, axes: Known | None = None, /, *, keepdims: int = 1, **others: Any) -> Known | None:
    """Of integers, all of them."""
    every = axes is None and not others.get("axes")
    if not every and x.numbers.ndim != 1:
        return None
    if not _countable(x):
        return None
    total: Any = 1
    for number in x.each:
        total = total * number
    return _of(np.array([total], dtype=object) if keepdims and x.numbers.ndim else total, x.dtype)
