"""Operators that reduce or normalize along axes."""

import math
from collections.abc import Callable
from functools import partial, reduce

from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.table import Array, ArrayLibrary, Numbers, must, operator


def along_axis(function: Callable[[Array, int], Array], x: Array, axis: int | None, opset: int) -> Array:
    """function(x, axis), from opset 13 on; before it, of x with all axes from `axis` on as one."""
    if opset >= 13:
        return function(x, -1 if axis is None else axis)
    axis = (1 if axis is None else axis) % x.ndim
    matrix = x.reshape((*x.shape[:axis], math.prod(x.shape[axis:])))
    return function(matrix, -1).reshape(tuple(x.shape))


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
    return xp.batch_norm(x, *(xp.astype(parameter, x.dtype) for parameter in (mean, variance, scale, bias)), epsilon)


@operator("LayerNormalization")
def layer_normalization(
    xp: ArrayLibrary, x: Array, scale: Array, bias: Array | None = None,
    *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Normalized over the axes from `axis` on; by the library's function where it has one that does the same."""
    axis = axis % x.ndim
    sizes = list(x.shape[axis:])
    is_plain = all(isinstance(size, int) for size in sizes) and list(scale.shape) == sizes
    if xp.layer_norm is not None and outputs == 1 and is_plain and (bias is None or list(bias.shape) == sizes):
        return (xp.layer_norm(x, sizes, scale, bias, epsilon),)
    values = xp.astype(x, xp.dtype(tensor_dtype_to_np_dtype(stash_type)))
    normalized, mean, inverse_std = _standardize(xp, values, tuple(range(axis, x.ndim)), epsilon)
    output = xp.astype(normalized, x.dtype) * scale
    return (output if bias is None else output + bias, mean, inverse_std)[:outputs]


def _standardize(xp: ArrayLibrary, x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / deviation over some axes, the mean, and 1 / deviation."""
    mean = xp.mean(x, axis=axes, keepdims=True)
    deviations = x - mean
    inverse_std = xp.rsqrt(xp.mean(deviations * deviations, axis=axes, keepdims=True) + epsilon)
    return deviations * inverse_std, mean, inverse_std


@operator("InstanceNormalization")
def instance_normalization(xp: ArrayLibrary, x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5) -> Array:
    """Normalized within each channel of each sample; 16-bit floats are computed in float32."""
    values = x if x.dtype == xp.float64 else xp.astype(x, xp.float32)
    planes = values.reshape((x.shape[0], x.shape[1], -1))
    normalized = xp.astype(_standardize(xp, planes, (2,), epsilon)[0].reshape(x.shape), x.dtype)
    return normalized * _channels(scale, x) + _channels(bias, x)


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
    shifted_squares = [xp.cut(squares, 1, start, start + x.shape[1]) for start in range(size)]
    return x / (bias + alpha / size * reduce(xp.add, shifted_squares)) ** beta


@operator("LpNormalization")
def lp_normalization(xp: ArrayLibrary, x: Array, *, axis: int = -1, p: int = 2) -> Array:
    """x over its L1 or L2 norm along an axis; 0 where the norm is 0."""
    sums = xp.sum(xp.abs(x) if p == 1 else x * x, axis=(axis,), keepdims=True)
    norm = sums if p == 1 else xp.sqrt(sums)
    return xp.where(norm == 0, xp.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization")
def mean_variance(xp: ArrayLibrary, x: Array, *, axes: list[int] | None = None) -> Array:
    """Normalized to mean 0 and deviation 1; 1e-9 is added to the deviation, as in ONNX's definition."""
    mean_axes = tuple([0, 2, 3] if axes is None else axes)
    mean = xp.mean(x, axis=mean_axes, keepdims=True)
    return (x - mean) / (xp.sqrt(xp.mean(x * x, axis=mean_axes, keepdims=True) - mean * mean) + 1e-9)


# Operators that reduce axes: sums, extremes, norms; and running sums, the greatest elements and their places.

# (library, array, axes to reduce, whether they stay with size 1) -> array.
Axes = tuple[int, ...]
Fold = Callable[[ArrayLibrary, Array, Axes, bool], Array]


def _sum(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    return xp.sum(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _mean(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    values = x if xp.is_floating(x) else xp.astype(x, xp.float64)
    return xp.astype(xp.mean(values, axis=axes, keepdims=keep), x.dtype)


def _product(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
    for axis in sorted(axes, reverse=True):
        x = xp.prod(x, axis=axis, keepdims=keep, dtype=x.dtype)
    return x


def _extreme(name: str) -> Fold:
    """The reduction 'amax' or 'amin'; over no elements it gives the type's least or greatest value, as ONNX says."""
    is_max = name == "amax"

    def run(xp: ArrayLibrary, x: Array, axes: Axes, keep: bool) -> Array:
        if not any(isinstance(x.shape[axis], int) and x.shape[axis] == 0 for axis in axes):
            return getattr(xp, name)(x, axis=axes, keepdims=keep)  # type: ignore[no-any-return]
        sizes = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes)
        if xp.is_floating(x):
            return xp.full(sizes, -math.inf if is_max else math.inf, dtype=x.dtype)
        if x.dtype == xp.bool:
            return xp.full(sizes, not is_max, dtype=x.dtype)
        bounds = xp.ends(x.dtype)
        return xp.full(sizes, bounds[0] if is_max else bounds[1], dtype=x.dtype)

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
        xp: ArrayLibrary, x: Array, axes_input: Numbers | None = None,
        *, axes: list[int] | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0,
    ) -> Array:  # fmt: skip
        reduction_axes = axes_input if axes_input is not None else axes
        if not reduction_axes:
            if noop_with_empty_axes:
                return fold(xp, x[None], (0,), False)  # of each element by itself
            reduction_axes = list(range(x.ndim))
        if not reduction_axes:  # an array without axes
            return fold(xp, x.reshape((1,)), (0,), False)
        return fold(xp, x, tuple(axis % x.ndim for axis in reduction_axes), bool(keepdims))


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
    first_step: Callable[..., Array] | None,
    reverse: int,
) -> Array:
    (run_axis,) = axis
    run_axis %= x.ndim
    x = xp.flip(x, (run_axis,)) if reverse else x
    if first_step is not None:
        x = xp.concat([first_step(xp.cut(x, run_axis, 0, 1)), xp.cut(x, run_axis, 0, x.shape[run_axis] - 1)], run_axis)
    cumulative_sums = run(x, axis=run_axis, dtype=x.dtype)
    return xp.flip(cumulative_sums, (run_axis,)) if reverse else cumulative_sums


@operator("Hardmax")
def hardmax(xp: ArrayLibrary, x: Array, *, axis: int | None = None, opset: int) -> Array:
    """1 at the first greatest element along an axis, 0 elsewhere."""
    return along_axis(partial(_hardmax, xp), x, axis, opset)


def _hardmax(xp: ArrayLibrary, x: Array, axis: int) -> Array:
    axis %= x.ndim
    positions = xp.arange(x.shape[axis]).reshape((-1, *[1] * (x.ndim - 1 - axis)))
    return xp.astype(positions == xp.argmax(x, axis=axis, keepdims=True), x.dtype)


@operator("TopK")
def top_k(
    xp: ArrayLibrary, x: Array, k: Numbers, *, axis: int = -1, largest: int = 1, sorted: int = 1  # noqa: A002
) -> tuple[Array, Array]:  # fmt: skip
    """The k greatest or least elements along an axis and their indices; ties in index order."""
    del sorted
    must(len(k) == 1, f"k has {len(k)} numbers; it takes one")
    return xp.top_k(x, k[0], axis, bool(largest))
