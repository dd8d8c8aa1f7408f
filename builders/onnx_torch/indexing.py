"""Operators that read and write by index. Negative indices count from the end, in ONNX as in numpy, not in torch."""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.table import Known, Lookups, Numbers, Value, must, operator

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("Gather")
def gather(data: Tensor, indices: Value, *, axis: int = 0, lookups: Lookups) -> Tensor:
    """Numpy's take."""
    axis = axis % data.dim()
    size = data.shape[axis]
    if isinstance(indices, Known):
        if indices.numbers.ndim == 0:
            return data.select(axis, indices.first)
        at = torch.where((found := indices.on(data.device)) < 0, found + size, found)
    else:
        at = lookups.into(indices, size)
    if axis == 0 and data.dim() == 2 and data.is_floating_point():
        return F.embedding(at, data)
    taken = data.index_select(axis, at.reshape(-1))
    return taken.reshape([*data.shape[:axis], *at.shape, *data.shape[axis + 1 :]])


@operator("GatherElements")
def gather_elements(data: Tensor, indices: Tensor, *, axis: int = 0, lookups: Lookups) -> Tensor:
    """Numpy's take_along_axis."""
    return torch.gather(data, axis, lookups.into(indices, data.shape[axis]))


@operator("GatherND")
def gather_nd(data: Tensor, indices: Tensor, *, batch_dims: int = 0, lookups: Lookups) -> Tensor:
    """The last axis of the indices is a path into the data."""
    depth = indices.shape[-1]
    flat = _flat_index(data.shape[batch_dims : batch_dims + depth], indices, lookups)
    batch, inner = data.shape[:batch_dims], data.shape[batch_dims + depth :]
    rows = data.reshape([*batch, -1, *inner])
    if not batch_dims:
        return rows.index_select(0, flat.reshape(-1)).reshape([*flat.shape, *inner])
    batches, count = math.prod(batch), math.prod(data.shape[batch_dims : batch_dims + depth])
    offset = torch.arange(batches, device=data.device).reshape([*batch, *[1] * (flat.dim() - batch_dims)]) * count
    together = data.reshape([batches * count, *inner])
    return together.index_select(0, (flat + offset).reshape(-1)).reshape([*flat.shape, *inner])


def _flat_index(sizes: Any, indices: Tensor, lookups: Lookups) -> Tensor:
    """Paths of indices into axes of these sizes, as one index into all of them together."""
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device)
    for position, size in enumerate(sizes):
        flat = flat * size + lookups.into(indices[..., position], size)
    return flat


@operator("ScatterElements")
def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none", lookups: Lookups
) -> Tensor:
    """Torch's scatter, or scatter_reduce with what is there."""
    at = lookups.into(indices, data.shape[axis])
    if reduction == "none":
        return data.scatter(axis, at, updates)
    return data.scatter_reduce(axis, at, updates, _REDUCTIONS[reduction], include_self=True)


@operator("ScatterND")
def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none", lookups: Lookups) -> Tensor:
    """Slices written by path; rows of the data seen as one axis."""
    depth = indices.shape[-1]
    inner = data.shape[depth:]
    flat = _flat_index(data.shape[:depth], indices, lookups).reshape(-1)
    rows = data.reshape([math.prod(data.shape[:depth]), *inner])
    new = updates.reshape([flat.shape[0], *inner])
    if reduction == "none":
        made = rows.index_put((flat,), new)
    else:
        at = flat.reshape([-1, *[1] * len(inner)]).expand(new.shape)
        made = rows.scatter_reduce(0, at, new, _REDUCTIONS[reduction], include_self=True)
    return made.reshape(data.shape)


@operator("OneHot")
def one_hot(indices: Tensor, depth: Numbers, values: Tensor, *, axis: int = -1) -> Tensor:
    """off everywhere, on at the index; an index out of range is nowhere."""
    (count,) = depth
    at = torch.where(indices < 0, indices + int(count), indices)
    axis = axis % (indices.dim() + 1)
    places = torch.arange(int(count), device=indices.device).reshape([-1] + [1] * (indices.dim() - axis))
    return torch.where(at.unsqueeze(axis) == places, values[1], values[0])


@operator("NonZero")
def non_zero(x: Tensor) -> Tensor:
    """The indices of what is not zero, an axis a row."""
    return torch.nonzero(x).t()


@operator("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """What the condition is true for, along an axis or of the flat tensor."""
    x, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(along, torch.nonzero(condition).reshape(-1))


@operator("ReverseSequence")
def reverse_sequence(
    x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0, lookups: Lookups
) -> Tensor:
    """The first `length` steps of each row, backwards."""
    must({batch_axis, time_axis} == {0, 1}, f"batch_axis {batch_axis} and time_axis {time_axis} are not 0 and 1")
    time = torch.arange(x.shape[time_axis], device=x.device)
    time, ends = (time.unsqueeze(1), lengths.unsqueeze(0)) if time_axis == 0 else (time, lengths.unsqueeze(1))
    at = lookups.into(torch.where(time < ends, ends - 1 - time, time), x.shape[time_axis])
    return torch.gather(x, time_axis, at.reshape([*at.shape, *[1] * (x.dim() - 2)]).expand(x.shape))


@operator("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    """Torch's, for images and volumes."""
    kinds = {
        "linear": "bilinear",
        "bilinear": "bilinear",
        "nearest": "nearest",
        "cubic": "bicubic",
        "bicubic": "bicubic",
    }
    must(mode in kinds, f"mode {mode!r} is none of ONNX's; use linear, nearest or cubic")
    return F.grid_sample(x, grid, mode=kinds[mode], padding_mode=padding_mode, align_corners=bool(align_corners))


@operator("TensorScatter")
def tensor_scatter(
    past: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
    lookups: Lookups,
) -> Tensor:
    """A cache written at each row's own place; 'circular' goes around its end."""
    axis = axis % past.dim()
    batch, size, count = past.shape[0], past.shape[axis], update.shape[axis]
    start = torch.zeros(batch, dtype=torch.int64, device=past.device) if write_indices is None else write_indices
    at = start.unsqueeze(1) + torch.arange(count, device=past.device)
    at = at.remainder(size) if mode == "circular" else lookups.into(at, size)
    shape = [1] * past.dim()
    shape[0], shape[axis] = batch, count
    return past.scatter(axis, at.reshape(shape).expand(update.shape), update)
