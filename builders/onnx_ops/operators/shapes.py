"""Operators that move elements, give sizes, or make arrays of given sizes."""

import math
from itertools import accumulate
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.table import Array, ArrayLibrary, Known, Numbers, Value, make_known, must, operator


@operator("Shape")
def shape_of(xp: ArrayLibrary, x: Array, *, start: int = 0, end: int | None = None) -> Known:  # noqa: ARG001
    """The sizes of the axes start..end, as numbers."""
    sizes = list(x.shape)[start:end]
    return make_known(sizes, (len(sizes),), np.int64)


@operator("Size")
def size_of(xp: ArrayLibrary, x: Array) -> Known:  # noqa: ARG001
    """The number of elements."""
    return make_known([math.prod(x.shape)], (), np.int64)


@operator("Reshape")
def reshape(xp: ArrayLibrary, x: Array, shape: Numbers, *, allowzero: int = 0) -> Array:  # noqa: ARG001
    """x in another shape, where 0 is the size of x (unless `allowzero`) and -1 is what remains."""
    if allowzero:
        return x.reshape(tuple(shape))
    copies = [axis for axis, size in enumerate(shape) if _is(size, 0)]
    sizes = [x.shape[axis] if axis in copies else size for axis, size in enumerate(shape)]
    dims = [size for axis, size in enumerate(x.shape) if axis not in copies]
    stated_sizes = [size for axis, size in enumerate(shape) if axis not in copies and not _is(size, -1)]
    # The libraries cannot compute -1 if a copied size is 0, as for an empty batch.
    if (
        copies
        and len(stated_sizes) + len(copies) + 1 == len(sizes)
        and all(isinstance(size, int) for size in (*dims, *stated_sizes))
    ):
        remaining_size = math.prod(dims) // math.prod(stated_sizes) if math.prod(stated_sizes) else 0
        sizes = [remaining_size if _is(size, -1) else size for size in sizes]
    return x.reshape(tuple(sizes))


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


@operator("Flatten")
def flatten(xp: ArrayLibrary, x: Array, *, axis: int = 1) -> Array:  # noqa: ARG001
    """x reshaped to two axes: the axes before `axis`, and the rest."""
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Transpose")
def transpose(xp: ArrayLibrary, x: Array, *, perm: list[int] | None = None) -> Array:
    """x with its axes in the order `perm`, by default in reverse."""
    return xp.permute(x, tuple(perm if perm is not None else range(x.ndim)[::-1]))


@operator("Squeeze")
def squeeze(xp: ArrayLibrary, x: Array, axes_input: Numbers | None = None, *, axes: list[int] | None = None) -> Array:
    """x without the given axes, by default without every axis of size 1."""
    squeeze_axes = axes_input if axes_input is not None else axes
    if squeeze_axes is None:
        squeeze_axes = [axis for axis, size in enumerate(x.shape) if size == 1]
    squeezed_axes = {axis % x.ndim for axis in squeeze_axes}
    for axis in squeezed_axes:
        must(x.shape[axis] == 1, f"axis {axis} has size {x.shape[axis]}; only a size of 1 can be squeezed")
    return xp.squeeze(x, tuple(squeezed_axes))


@operator("Unsqueeze")
def unsqueeze(xp: ArrayLibrary, x: Array, axes_input: Numbers | None = None, *, axes: list[int] | None = None) -> Array:
    """x with new axes of size 1, at these places of the result."""
    new_axes = axes_input if axes_input is not None else axes or []
    rank = x.ndim + len(new_axes)
    for axis in sorted(axis % rank for axis in new_axes):
        x = xp.unsqueeze(x, axis)
    return x


@operator("Concat")
def concat(xp: ArrayLibrary, *xs: Array, axis: int) -> Array:
    """Arrays joined along an axis."""
    return xp.concat(xs, axis)


@operator("Split")
def split(
    xp: ArrayLibrary, x: Array, sizes: Numbers | None = None,
    *, axis: int = 0, num_outputs: int | None = None, outputs: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Parts of x along an axis, of given sizes, or of equal ones of which the last may be smaller."""
    if sizes is None:
        count = num_outputs or outputs
        part_size = -(-x.shape[axis] // count)
        sizes = [part_size] * (count - 1) + [x.shape[axis] - part_size * (count - 1)]
    axis, ends = axis % x.ndim, list(accumulate(sizes))
    return tuple(xp.cut(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True))


@operator("Expand")
def expand(xp: ArrayLibrary, x: Array, shape: Numbers) -> Array:
    """x broadcast with a shape; a 1 in the shape takes the size of x."""
    rank = max(x.ndim, len(shape))
    padded_shape = [1] * (rank - x.ndim) + list(x.shape)
    target_shape = [1] * (rank - len(shape)) + list(shape)
    return xp.broadcast_to(x, tuple(a if _is(b, 1) else b for a, b in zip(padded_shape, target_shape, strict=True)))


@operator("Tile")
def tile(xp: ArrayLibrary, x: Array, repeats: Numbers) -> Array:
    """x repeated along each axis."""
    return xp.tile(x, tuple(repeats))


@operator("Slice")
def slice_(
    xp: ArrayLibrary,
    x: Array,
    starts: Numbers,
    ends: Numbers,
    axes: Numbers | None = None,
    steps: Numbers | None = None,
) -> Array:
    """Slices along some axes as in Python, with negative steps too."""
    sliced_axes = [axis % x.ndim for axis in axes] if axes is not None else list(range(len(starts)))
    strides = steps if steps is not None else [1] * len(sliced_axes)
    for axis, start, end, step in zip(sliced_axes, starts, ends, strides, strict=True):
        x = xp.cut(x, axis, start, end, step) if step > 0 else _backwards(xp, x, axis, start, end, -step)
    return x


def _backwards(xp: ArrayLibrary, x: Array, axis: int, start: Any, end: Any, step: int) -> Array:
    """The slice start, start - step, ... down to above `end`: a slice of the mirrored array."""
    size = x.shape[axis]
    backward_start = size - 1 - (start if start >= 0 else xp.sym_max(start + size, -1))
    if not isinstance(end, int) or end >= -(1 << 31):
        backward_end = size - 1 - (end if end >= 0 else xp.sym_max(end + size, -1))
    else:
        backward_end = size
    return xp.cut(xp.flip(x, (axis,)), axis, xp.sym_max(backward_start, 0), xp.sym_max(backward_end, 0), step)


@operator("Pad")
def pad(
    xp: ArrayLibrary, x: Array, pads: Numbers, value: Value | None = None, axes: Numbers | None = None,
    *, mode: str = "constant",
) -> Array:  # fmt: skip
    """x padded with a value, its edge, its reflection, or its other end (wrap). Negative pads cut."""
    padded_axes = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    for axis, low_pad, high_pad in zip(padded_axes, pads[: len(padded_axes)], pads[len(padded_axes) :], strict=True):
        if not (_is(low_pad, 0) and _is(high_pad, 0)):
            x = _pad_axis(xp, x, axis, low_pad, high_pad, mode, value)
    return x


def _pad_axis(xp: ArrayLibrary, x: Array, axis: int, before: Any, after: Any, mode: str, value: Value | None) -> Array:
    size = x.shape[axis]
    if mode == "constant":
        widths = [(0, 0)] * axis + [(before, after)] + [(0, 0)] * (x.ndim - 1 - axis)
        if value is None or isinstance(value, Known):
            return xp.pad_axes(x, widths, 0 if value is None else value.first)
        mask = xp.pad_axes(xp.ones_like(x, dtype=xp.bool), widths, 0)
        return xp.where(mask, xp.pad_axes(x, widths, 0), value.reshape(()))
    source_indices = xp.arange(-before, size + after)
    if mode == "edge":
        source_indices = xp.clip(source_indices, 0, size - 1)
    elif mode == "wrap":
        source_indices = xp.remainder(source_indices, size)
    else:
        must(mode == "reflect", f"mode {mode!r} is not one of ONNX's; use constant, edge, reflect or wrap")
        phase = xp.remainder(source_indices, xp.sym_max(2 * (size - 1), 1))
        source_indices = xp.minimum(phase, 2 * (size - 1) - phase)
    return xp.take(x, source_indices, axis)


@operator("ConstantOfShape")
def constant_of_shape(xp: ArrayLibrary, shape: Numbers, *, value: Any = None) -> Array:
    """An array of one value, by default 0.0 in float32."""
    value = np.zeros(1, np.float32) if value is None else value
    return xp.full(tuple(shape), value.item(), dtype=xp.dtype(value.dtype))


@operator("Range")
def range_(xp: ArrayLibrary, start: Value, limit: Value, delta: Value) -> Array:
    """start, start + delta, ... below limit."""
    begin, end, step = (v.first if isinstance(v, Known) else xp.numbers(v)[0] for v in (start, limit, delta))
    dtype = xp.dtype(start.dtype) if isinstance(start, Known) else start.dtype
    return xp.arange(begin, end, step, dtype=dtype)


@operator("EyeLike")
def eye_like(xp: ArrayLibrary, x: Array, *, dtype: int | None = None, k: int = 0) -> Array:
    """An array in the shape of x with 1 on the k-th diagonal, 0 elsewhere."""
    result_dtype = x.dtype if dtype is None else xp.dtype(tensor_dtype_to_np_dtype(dtype))
    return xp.astype(_above(xp, x) == k, result_dtype)


def _above(xp: ArrayLibrary, x: Array) -> Array:
    """How far each place of the last two axes is above the diagonal, [rows, columns]."""
    return xp.arange(x.shape[-1]) - xp.unsqueeze(xp.arange(x.shape[-2]), 1)


@operator("Trilu")
def trilu(xp: ArrayLibrary, x: Array, k: Numbers | None = None, *, upper: int = 1) -> Array:
    """The upper or the lower triangle of the last two axes, 0 elsewhere."""
    offsets, diagonal = _above(xp, x), k[0] if k else 0
    return xp.where(offsets >= diagonal if upper else offsets <= diagonal, x, xp.zeros((), dtype=x.dtype))


@operator("DepthToSpace")
def depth_to_space(xp: ArrayLibrary, x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Blocks of channels moved to height and width, in the order depth, column, row, or column, row, depth."""
    n, c, h, w = x.shape
    depth = c // (blocksize * blocksize)
    if mode == "DCR":
        blocks = xp.permute(x.reshape((n, blocksize, blocksize, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        blocks = xp.permute(x.reshape((n, depth, blocksize, blocksize, h, w)), (0, 1, 4, 2, 5, 3))
    return blocks.reshape((n, depth, h * blocksize, w * blocksize))


@operator("SpaceToDepth")
def space_to_depth(xp: ArrayLibrary, x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Blocks of height and width moved to channels: the inverse of DepthToSpace."""
    n, c, h, w = x.shape
    blocks = x.reshape((n, c, h // blocksize, blocksize, w // blocksize, blocksize))
    blocks = xp.permute(blocks, (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return blocks.reshape((n, c * blocksize * blocksize, h // blocksize, w // blocksize))
