"""Operators that read and write by index. Negative indices count from the end, in ONNX as in numpy.

`table.Lookups` says what becomes of an index out of range.
"""

from typing import Any

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.table import Known, Lookups, Numbers, Value, must, operator


@operator("Gather")
def gather(xp: ArrayLibrary, data: Array, indices: Value, *, axis: int = 0, lookups: Lookups) -> Array:
    """data.take(indices, axis), as in numpy."""
    axis = axis % data.ndim
    size = data.shape[axis]
    if not isinstance(indices, Known):
        return xp.take(data, lookups.into(indices, size), axis)
    if indices.numbers.ndim == 0:
        return xp.select(data, axis, indices.first)
    found = indices.on(xp)
    return xp.take(data, xp.where(found < 0, found + size, found), axis)


@operator("GatherElements")
def gather_elements(xp: ArrayLibrary, data: Array, indices: Array, *, axis: int = 0, lookups: Lookups) -> Array:
    """Numpy's take_along_axis."""
    return xp.take_along(data, lookups.into(indices, data.shape[axis]), axis)


@operator("GatherND")
def gather_nd(xp: ArrayLibrary, data: Array, indices: Array, *, batch_dims: int = 0, lookups: Lookups) -> Array:
    """Slices of the data; the last axis of the indices holds the index of each slice, one number an axis."""
    batch = [_along(xp, data.shape[axis], axis, indices.ndim - 1) for axis in range(batch_dims)]
    return xp.at(data, (*batch, *_path(data.shape[batch_dims:], indices, lookups)))


def _along(xp: ArrayLibrary, size: Any, axis: int, rank: int) -> Array:
    """0, 1, ... size - 1 along `axis` of an array of `rank` axes, the others of size 1."""
    return xp.arange(size).reshape(tuple(-1 if at == axis else 1 for at in range(rank)))


def _path(sizes: Any, indices: Array, lookups: Lookups) -> tuple[Array, ...]:
    """An array of indices for each axis, from the last axis of `indices`; sizes: of the axes."""
    return tuple(lookups.into(indices[..., at], sizes[at]) for at in range(indices.shape[-1]))


@operator("ScatterElements", "Scatter")
def scatter_elements(
    xp: ArrayLibrary, data: Array, indices: Array, updates: Array,
    *, axis: int = 0, reduction: str = "none", lookups: Lookups,
) -> Array:  # fmt: skip
    """The data with updates at the indices along an axis, or with `reduction` their sum, product and the like."""
    return xp.scatter(data, axis % data.ndim, lookups.into(indices, data.shape[axis]), updates, reduction)


@operator("ScatterND")
def scatter_nd(
    xp: ArrayLibrary, data: Array, indices: Array, updates: Array, *, reduction: str = "none", lookups: Lookups
) -> Array:
    """The data with slices replaced, or with `reduction` added to and the like; indices as of GatherND."""
    return xp.put(data, _path(data.shape, indices, lookups), updates, reduction)


@operator("OneHot")
def one_hot(xp: ArrayLibrary, indices: Array, depth: Numbers, values: Array, *, axis: int = -1) -> Array:
    """values[1] at the index along a new axis of size `depth`, else values[0]; none for an index out of range."""
    count = int(depth[0])
    at = xp.where(indices < 0, indices + count, indices)
    axis = axis % (indices.ndim + 1)
    return xp.where(xp.unsqueeze(at, axis) == _along(xp, count, axis, indices.ndim + 1), values[1], values[0])


@operator("NonZero")
def non_zero(xp: ArrayLibrary, x: Array) -> Array:
    """The indices of elements that are not zero, as [axes, n]."""
    return xp.indices_of(x).T


@operator("Compress")
def compress(xp: ArrayLibrary, x: Array, condition: Array, *, axis: int | None = None) -> Array:
    """The slices along an axis, or the elements of the flat array, for which the condition is true."""
    x, along = (x.reshape((-1,)), 0) if axis is None else (x, axis % x.ndim)
    return xp.take(x, xp.indices_of(condition).reshape((-1,)), along)


@operator("ReverseSequence")
def reverse_sequence(
    xp: ArrayLibrary, x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0, lookups: Lookups
) -> Array:
    """x with the first `length` steps of each sample in reverse order."""
    must({batch_axis, time_axis} == {0, 1}, f"batch_axis {batch_axis} and time_axis {time_axis} are not 0 and 1")
    time = _along(xp, x.shape[time_axis], time_axis, 2)
    ends = xp.unsqueeze(lengths, time_axis)
    at = lookups.into(xp.where(time < ends, ends - 1 - time, time), x.shape[time_axis])
    return xp.take_along(x, xp.broadcast_to(at.reshape((*at.shape, *[1] * (x.ndim - 2))), x.shape), time_axis)


@operator("GridSample")
def grid_sample(
    xp: ArrayLibrary,
    x: Array,
    grid: Array,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Array:
    """The library's sampling of images and volumes at the grid's points."""
    kinds = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
    kind = kinds.get(mode, mode)
    must(kind in kinds.values(), f"mode {mode!r} is none of ONNX's; use linear, nearest or cubic")
    return xp.grid_sample(x, grid, mode=kind, padding_mode=padding_mode, align_corners=bool(align_corners))


@operator("TensorScatter")
def tensor_scatter(
    xp: ArrayLibrary, past: Array, update: Array, write_indices: Array | None = None,
    *, axis: int = -2, mode: str = "linear", lookups: Lookups,
) -> Array:  # fmt: skip
    """A cache with the update written from each sample's index on; in mode 'circular' from its end on to its start."""
    axis = axis % past.ndim
    batch, size, count = past.shape[0], past.shape[axis], update.shape[axis]
    start = xp.zeros((batch,), dtype=xp.int64) if write_indices is None else write_indices
    at = xp.unsqueeze(start, 1) + xp.arange(count)
    at = xp.remainder(at, size) if mode == "circular" else lookups.into(at, size)
    shape = tuple(batch if i == 0 else count if i == axis else 1 for i in range(past.ndim))
    return xp.scatter(past, axis, xp.broadcast_to(at.reshape(shape), update.shape), update, "none")
