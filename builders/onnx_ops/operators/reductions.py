"""Operators that reduce axes: sums, extremes, norms; and running sums, the greatest elements and their places."""

import math
from collections.abc import Callable
from functools import partial

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.operators.normalization import along_axis
from builders.onnx_ops.table import Numbers, must, operator

# (library, array, axes to reduce, whether they stay with size 1) -> array.
Axes = tuple[int, ...]
Fold = Callable[[ArrayLibrary, Array, Axes, bool], Array]


def _sum(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    return xp.sum(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _mean(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    wide = x if xp.is_floating(x) else xp.astype(x, xp.float64)
    return xp.astype(xp.mean(wide, axis=axes, keepdims=keep), x.dtype)


def _product(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    for axis in sorted(axes, reverse=True):
        x = xp.prod(x, axis=axis, keepdims=keep, dtype=x.dtype)
    return x


def _extreme(name: str) -> Fold:
    """The reduction 'amax' or 'amin'; over no elements it gives the type's least or greatest value, as ONNX says."""
    greatest = name == "amax"

    def run(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
        if not any(isinstance(x.shape[axis], int) and x.shape[axis] == 0 for axis in axes):
            return getattr(xp, name)(x, axis=axes, keepdims=keep)  # type: ignore[no-any-return]
        sizes = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes)
        if xp.is_floating(x):
            return xp.full(sizes, -math.inf if greatest else math.inf, dtype=x.dtype)
        if x.dtype == xp.bool:
            return xp.full(sizes, not greatest, dtype=x.dtype)
        ends = xp.ends(x.dtype)
        return xp.full(sizes, ends[0] if greatest else ends[1], dtype=x.dtype)

    return run


def _norm(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    x = _sum(xp, x * x, axes, keep)
    return xp.sqrt(x) if xp.is_floating(x) else xp.astype(xp.sqrt(xp.astype(x, xp.float64)), x.dtype)


_FOLDS: dict[str, Fold] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _product,
    "ReduceMax": _extreme("amax"),
    "ReduceMin": _extreme("amin"),
    "ReduceL1": lambda xp, x, axes, keep: _sum(xp, xp.abs(x), axes, keep),
    "ReduceL2": _norm,
    "ReduceSumSquare": lambda xp, x, axes, keep: _sum(xp, x * x, axes, keep),
    "ReduceLogSum": lambda xp, x, axes, keep: xp.log(_sum(xp, x, axes, keep)),
    "ReduceLogSumExp": lambda xp, x, axes, keep: xp.logsumexp(x, axis=axes, keepdims=keep),
}


def _reduction(name: str, fold: Fold) -> None:
    @operator(name)
    def run(
        xp: ArrayLibrary, x: Array, given: Numbers | None = None,
        *, axes: list[int] | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0,
    ) -> Array:  # fmt: skip
        chosen = given if given is not None else axes
        if not chosen:
            if noop_with_empty_axes:
                return fold(xp, x[None], (0,), False)  # of each element by itself
            chosen = list(range(x.ndim))
        if not chosen:  # an array without axes
            return fold(xp, x.reshape((1,)), (0,), False)
        return fold(xp, x, tuple(axis % x.ndim for axis in chosen), bool(keepdims))


for _name, _fold in _FOLDS.items():
    _reduction(_name, _fold)


@operator("ArgMax")
def arg_max(xp: ArrayLibrary, x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    """The index of the greatest element along an axis: the first of equals, or the last."""
    return _index_of(xp, xp.argmax, x, axis, keepdims, select_last_index)


@operator("ArgMin")
def arg_min(xp: ArrayLibrary, x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    """The index of the least element along an axis: the first of equals, or the last."""
    return _index_of(xp, xp.argmin, x, axis, keepdims, select_last_index)


def _index_of(xp: ArrayLibrary, find: Callable[..., Array], x: Array, axis: int, keepdims: int, last: int) -> Array:
    if not last:
        return find(x, axis=axis, keepdims=bool(keepdims))
    return x.shape[axis] - 1 - find(xp.flip(x, (axis,)), axis=axis, keepdims=bool(keepdims))


@operator("CumSum")
def cum_sum(xp: ArrayLibrary, x: Array, axis: Numbers, *, exclusive: int = 0, reverse: int = 0) -> Array:
    """Running sums along an axis; with `exclusive` of the elements before each."""
    return _accumulate(xp, xp.cumsum, x, axis, xp.zeros_like if exclusive else None, reverse)


@operator("CumProd")
def cum_prod(xp: ArrayLibrary, x: Array, axis: Numbers, *, exclusive: int = 0, reverse: int = 0) -> Array:
    """Running products along an axis; with `exclusive` of the elements before each."""
    return _accumulate(xp, xp.cumprod, x, axis, xp.ones_like if exclusive else None, reverse)


def _accumulate(
    xp: ArrayLibrary,
    run: Callable[..., Array],
    x: Array,
    axis: Numbers,
    first: Callable[..., Array] | None,
    reverse: int,
) -> Array:
    (along,) = axis
    along %= x.ndim
    x = xp.flip(x, (along,)) if reverse else x
    if first is not None:
        x = xp.concat([first(xp.cut(x, along, 0, 1)), xp.cut(x, along, 0, x.shape[along] - 1)], along)
    made = run(x, axis=along, dtype=x.dtype)
    return xp.flip(made, (along,)) if reverse else made


@operator("Hardmax")
def hardmax(xp: ArrayLibrary, x: Array, *, axis: int | None = None, opset: int) -> Array:
    """1 at the first greatest element along an axis, 0 elsewhere."""
    return along_axis(partial(_hardmax, xp), x, axis, opset)


def _hardmax(xp: ArrayLibrary, x: Array, axis: int) -> Array:
    axis %= x.ndim
    places = xp.arange(x.shape[axis]).reshape((-1, *[1] * (x.ndim - 1 - axis)))
    return xp.astype(places == xp.argmax(x, axis=axis, keepdims=True), x.dtype)


@operator("TopK")
def top_k(
    xp: ArrayLibrary, x: Array, k: Numbers, *, axis: int = -1, largest: int = 1, sorted: int = 1  # noqa: A002
) -> tuple[Array, Array]:  # fmt: skip
    """The k greatest or least elements along an axis and their indices; of equals the lower index first."""
    del sorted
    must(len(k) == 1, f"k has {len(k)} numbers; it takes one")
    return xp.top_k(x, k[0], axis, bool(largest))
