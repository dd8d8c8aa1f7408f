"""Operators that gather, scatter or resize."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from builders.onnx_ops.table import Array, ArrayLibrary, Known, Lookups, Numbers, Value, must, operator

# Operators that read and write by index. Negative indices count from the end, in ONNX as in numpy.
#
# `table.Lookups` says what becomes of an index out of range.


@operator("Gather")
def gather(xp: ArrayLibrary, data: Array, indices: Value, *, axis: int = 0, lookups: Lookups) -> Array:
    """data.take(indices, axis), as in numpy."""
    axis = axis % data.ndim
    size = data.shape[axis]
    if not isinstance(indices, Known):
        return xp.take(data, lookups.into(indices, size), axis)
    if indices.numbers.ndim == 0:
        return xp.select(data, axis, indices.first)
    positions = indices.on(xp)
    return xp.take(data, xp.where(positions < 0, positions + size, positions), axis)


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
    return xp.arange(size).reshape(tuple(-1 if dim == axis else 1 for dim in range(rank)))


def _path(sizes: Any, indices: Array, lookups: Lookups) -> tuple[Array, ...]:
    """An array of indices for each axis, read from the last axis of `indices`. sizes: of the axes."""
    return tuple(lookups.into(indices[..., axis], sizes[axis]) for axis in range(indices.shape[-1]))


@operator("ScatterElements", "Scatter")
def scatter_elements(
    xp: ArrayLibrary, data: Array, indices: Array, updates: Array,
    *, axis: int = 0, reduction: str = "none", lookups: Lookups,
) -> Array:  # fmt: skip
    """The data with elements at `indices` of an axis replaced by `updates`, or combined with them by `reduction`."""
    return xp.scatter(data, axis % data.ndim, lookups.into(indices, data.shape[axis]), updates, reduction)


@operator("ScatterND")
def scatter_nd(
    xp: ArrayLibrary, data: Array, indices: Array, updates: Array, *, reduction: str = "none", lookups: Lookups
) -> Array:
    """The data with slices replaced by `updates`, or combined with them by `reduction`; indices as in GatherND."""
    return xp.put(data, _path(data.shape, indices, lookups), updates, reduction)


@operator("OneHot")
def one_hot(xp: ArrayLibrary, indices: Array, depth: Numbers, values: Array, *, axis: int = -1) -> Array:
    """values[1] at the index along a new axis of size `depth`, else values[0]; none for an index out of range."""
    count = int(depth[0])
    positions = xp.where(indices < 0, indices + count, indices)
    axis = axis % (indices.ndim + 1)
    return xp.where(xp.unsqueeze(positions, axis) == _along(xp, count, axis, indices.ndim + 1), values[1], values[0])


@operator("NonZero")
def non_zero(xp: ArrayLibrary, x: Array) -> Array:
    """The indices of elements that are not zero, as [axes, n]."""
    return xp.indices_of(x).T


@operator("Compress")
def compress(xp: ArrayLibrary, x: Array, condition: Array, *, axis: int | None = None) -> Array:
    """The slices along an axis, or the elements of the flat array, for which the condition is true."""
    x, cut_axis = (x.reshape((-1,)), 0) if axis is None else (x, axis % x.ndim)
    return xp.take(x, xp.indices_of(condition).reshape((-1,)), cut_axis)


@operator("ReverseSequence")
def reverse_sequence(
    xp: ArrayLibrary, x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0, lookups: Lookups
) -> Array:
    """x with the first `length` steps of each sample in reverse order."""
    must({batch_axis, time_axis} == {0, 1}, f"batch_axis {batch_axis} and time_axis {time_axis} are not 0 and 1")
    times = _along(xp, x.shape[time_axis], time_axis, 2)
    ends = xp.unsqueeze(lengths, time_axis)
    sources = lookups.into(xp.where(times < ends, ends - 1 - times, times), x.shape[time_axis])
    return xp.take_along(x, xp.broadcast_to(sources.reshape((*sources.shape, *[1] * (x.ndim - 2))), x.shape), time_axis)


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
    modes = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
    kind = modes.get(mode, mode)
    must(kind in modes.values(), f"mode {mode!r} is not one of ONNX's; use linear, nearest or cubic")
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
    positions = xp.unsqueeze(start, 1) + xp.arange(count)
    positions = xp.remainder(positions, size) if mode == "circular" else lookups.into(positions, size)
    shape = tuple(batch if i == 0 else count if i == axis else 1 for i in range(past.ndim))
    return xp.scatter(past, axis, xp.broadcast_to(positions.reshape(shape), update.shape), update, "none")


# Resize: one axis after the other, as a weighted sum of neighbours; sizes may be symbolic, antialiasing is refused.


class _ResizedAxis(NamedTuple):
    """One axis to be resized. size: of the input.  new_size: of the output.  scale: output over input.  start, end: of
    the region of interest, in 0..1."""

    axis: int
    size: int
    new_size: int
    scale: float
    start: float
    end: float


@operator("Resize")
def resize(
    xp: ArrayLibrary,
    x: Array,
    roi: Numbers | None = None,
    scales: Numbers | None = None,
    sizes: Numbers | None = None,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    opset: int,
) -> Array:
    """x in other sizes, by nearest, linear or cubic interpolation with ONNX's coordinate rules."""
    must(opset >= 11, "it is of an opset before 11; use onnx.version_converter")
    must(not antialias, "it asks for antialiasing; leave that out, or use the backend onnxruntime")
    must(coordinate_transformation_mode in _RULES, f"coordinate rule {coordinate_transformation_mode!r} is not known")
    rule = _RULES[coordinate_transformation_mode]
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    outside_mask: Array | None = None
    for spec in _axes(xp, x, roi if crop else None, scales, sizes, axes, keep_aspect_ratio_policy):
        if not crop and isinstance(spec.scale, (int, float)) and spec.scale == 1:
            continue
        with xp.at_once() if isinstance(spec.size, int) and isinstance(spec.new_size, int) else nullcontext():
            # Traced, XLA would divide by multiplying, and round another way.
            points = rule(xp.astype(xp.arange(spec.new_size), xp.float32), spec)
        if mode == "nearest":
            x = _take_clipped(xp, x, spec, _nearest(xp, points, nearest_mode))
        else:
            x = _interpolate(xp, x, spec, points, mode, cubic_coeff_a, bool(exclude_outside))
        if crop:
            is_outside = ((points < 0) | (points > spec.size - 1)).reshape((-1, *[1] * (x.ndim - 1 - spec.axis)))
            outside_mask = is_outside if outside_mask is None else outside_mask | is_outside
    return x if outside_mask is None else xp.where(outside_mask, xp.full_like(x, extrapolation_value), x)


@operator("Upsample")
def upsample(xp: ArrayLibrary, x: Array, scales: Numbers, *, mode: str = "nearest") -> Array:
    """Resize as it was before opset 10."""
    rule = "asymmetric"
    return resize(xp, x, None, scales, mode=mode, coordinate_transformation_mode=rule, nearest_mode="floor", opset=11)


def _axes(
    xp: ArrayLibrary, x: Array, roi: Numbers | None, scales: Numbers | None, sizes: Numbers | None,
    axes: list[int] | None, policy: str,
) -> list[_ResizedAxis]:  # fmt: skip
    resized_axes = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    old_sizes = [x.shape[axis] for axis in resized_axes]
    if sizes:
        factors = [
            1 if xp.same(size, old_size) else size / old_size for size, old_size in zip(sizes, old_sizes, strict=True)
        ]
        if policy != "stretch":
            ratio = min(factors) if policy == "not_larger" else max(factors)
            factors = [ratio] * len(factors)
            sizes = [math.floor(ratio * old_size + 0.5) for old_size in old_sizes]
    else:
        must(bool(scales), "it has neither scales nor sizes")
        factors = list(scales or ())
        sizes = [_scale_size(old_size, factor) for old_size, factor in zip(old_sizes, factors, strict=True)]
    count = len(resized_axes)
    starts, ends = (roi[:count], roi[count:]) if roi else ([0.0] * count, [1.0] * count)
    return [
        _ResizedAxis(*axis_fields)
        for axis_fields in zip(resized_axes, old_sizes, sizes, factors, starts, ends, strict=True)
    ]


def _scale_size(size: Any, factor: Any) -> Any:
    """floor(size * factor), in integers where the factor is one."""
    if isinstance(factor, float) and factor.is_integer():
        return size * int(factor)
    return math.floor(size * factor)


def _crop(points: Array, axis: _ResizedAxis) -> Array:
    if axis.new_size > 1:
        return axis.start * (axis.size - 1) + points * (axis.end - axis.start) * ((axis.size - 1) / (axis.new_size - 1))
    return points * 0.0 + 0.5 * (axis.start + axis.end) * (axis.size - 1)


# ONNX's coordinate rules: places in the output -> places in the input.
_RULES: dict[str, Callable[[Array, _ResizedAxis], Array]] = {
    "half_pixel": lambda at, axis: (at + 0.5) / axis.scale - 0.5,
    "half_pixel_symmetric": lambda at, axis: (
        axis.size / 2 * (1 - axis.new_size / (axis.size * axis.scale)) + (at + 0.5) / axis.scale - 0.5
    ),
    "pytorch_half_pixel": lambda at, axis: (at + 0.5) / axis.scale - 0.5 if axis.new_size > 1 else at * 0.0,
    "align_corners": lambda at, axis: at * ((axis.size - 1) / (axis.new_size - 1)) if axis.new_size > 1 else at * 0.0,
    "asymmetric": lambda at, axis: at / axis.scale,
    "tf_crop_and_resize": _crop,
}


def _nearest(xp: ArrayLibrary, points: Array, mode: str) -> Array:
    if mode == "round_prefer_floor":
        return xp.ceil(points - 0.5)
    if mode == "round_prefer_ceil":
        return xp.floor(points + 0.5)
    must(mode in ("floor", "ceil"), f"nearest_mode {mode!r} is not ONNX's; use floor, ceil or round_prefer_floor/ceil")
    return xp.floor(points) if mode == "floor" else xp.ceil(points)


def _interpolate(
    xp: ArrayLibrary, x: Array, axis: _ResizedAxis, points: Array, mode: str, cubic: float, exclude: bool
) -> Array:
    """The weighted sum of neighbours (2 for 'linear', 4 for 'cubic') at `points`; places outside have the
    edge's value, or with `exclude` no weight."""
    base_indices = xp.floor(points)
    offset = points - base_indices
    taps = (0, 1) if mode == "linear" else (-1, 0, 1, 2)
    weights = [1 - xp.abs(offset - tap) if mode == "linear" else _cubic(xp, offset - tap, cubic) for tap in taps]
    positions = [base_indices + tap for tap in taps]
    if exclude:
        masks = [xp.astype((position >= 0) & (position <= axis.size - 1), xp.float32) for position in positions]
        weights = [weight * mask for weight, mask in zip(weights, masks, strict=True)]
        total = sum(weights[1:], weights[0])
        weights = [weight / total for weight in weights]
    shape = (-1, *[1] * (x.ndim - 1 - axis.axis))
    values = x if xp.is_floating(x) else xp.astype(x, xp.float32)
    terms = [
        _take_clipped(xp, values, axis, position) * xp.astype(weight.reshape(shape), values.dtype)
        for position, weight in zip(positions, weights, strict=True)
    ]
    weighted_sum = sum(terms[1:], terms[0])
    return weighted_sum if xp.is_floating(x) else xp.astype(xp.round(weighted_sum), x.dtype)


def _take_clipped(xp: ArrayLibrary, x: Array, axis: _ResizedAxis, places: Array) -> Array:
    return xp.take(x, xp.astype(xp.clip(places, 0, axis.size - 1), xp.int64), axis.axis)


def _cubic(xp: ArrayLibrary, distance: Array, a: float) -> Array:
    """The weight at a distance by Keys' kernel (IEEE Trans. ASSP 29, 1981) with parameter a."""
    d = xp.abs(distance)
    near_weight = ((a + 2) * d - (a + 3)) * d * d + 1
    far_weight = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return xp.where(d <= 1, near_weight, xp.where(d < 2, far_weight, xp.zeros_like(d)))
