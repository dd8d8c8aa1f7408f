"""Operators that move elements or count them, and those that make tensors out of sizes."""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.reading import dtype_of
from builders.onnx_torch.table import Known, Numbers, Value, greatest, known, must, operator


@operator("Shape")
def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Known:
    """The sizes, as numbers."""
    sizes = list(x.shape)[start:end]
    return known(sizes, (len(sizes),), torch.int64)


@operator("Size")
def size_of(x: Tensor) -> Known:
    """The number of elements."""
    return known([math.prod(x.shape)], (), torch.int64)


@operator("Reshape")
def reshape(x: Tensor, shape: Numbers, *, allowzero: int = 0) -> Tensor:
    """0 takes the size over, unless `allowzero`; -1 is what remains."""
    if allowzero:
        return x.reshape(shape)
    copied = [axis for axis, size in enumerate(shape) if isinstance(size, int) and size == 0]
    sizes = [x.shape[axis] if axis in copied else size for axis, size in enumerate(shape)]
    rest = [size for axis, size in enumerate(x.shape) if axis not in copied]
    said = [
        size for axis, size in enumerate(shape) if axis not in copied and not (isinstance(size, int) and size == -1)
    ]
    # Torch cannot tell what -1 is when a copied size is 0, as that of an empty batch.
    if copied and len(said) + len(copied) + 1 == len(sizes) and all(isinstance(size, int) for size in (*rest, *said)):
        remains = math.prod(rest) // math.prod(said) if math.prod(said) else 0
        sizes = [remains if isinstance(size, int) and size == -1 else size for size in sizes]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """Two axes: what is before `axis`, and the rest."""
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose")
def transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    """By default the axes in reverse."""
    return x.permute(perm if perm is not None else list(range(x.dim()))[::-1])


@operator("Squeeze")
def squeeze(x: Tensor, given: Numbers | None = None, *, axes: list[int] | None = None) -> Tensor:
    """Without axes: every one of size 1."""
    chosen = given if given is not None else axes
    if chosen is None:
        return x.squeeze()
    gone = {axis % x.dim() for axis in chosen}
    for axis in sorted(gone, reverse=True):
        must(x.shape[axis] == 1, f"axis {axis} has size {x.shape[axis]}; only a size of 1 can be squeezed")
        x = x.squeeze(axis)
    return x


@operator("Unsqueeze")
def unsqueeze(x: Tensor, axes: Numbers) -> Tensor:
    """Axes count in the result."""
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Concat")
def concat(*xs: Tensor, axis: int) -> Tensor:
    """Torch's."""
    return torch.cat(xs, axis)


@operator("Split")
def split(
    x: Tensor, sizes: Numbers | None = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Tensor, ...]:
    """In given sizes, or in equal ones of which the last may be smaller."""
    if sizes is None:
        parts = num_outputs or outputs
        each = -(-x.shape[axis] // parts)
        sizes = [each] * (parts - 1) + [x.shape[axis] - each * (parts - 1)]
    return torch.split(x, sizes, axis)


@operator("Expand")
def expand(x: Tensor, shape: Numbers) -> Tensor:
    """Broadcasting both ways: a 1 takes the tensor's own size."""
    rank = max(x.dim(), len(shape))
    own = [1] * (rank - x.dim()) + list(x.shape)
    asked = [1] * (rank - len(shape)) + list(shape)
    sizes = [a if isinstance(b, int) and b == 1 else b for a, b in zip(own, asked, strict=True)]
    return x.expand(sizes)


@operator("Tile")
def tile(x: Tensor, repeats: Numbers) -> Tensor:
    """Torch's repeat."""
    return x.repeat(repeats)


@operator("Slice")
def slice_(
    x: Tensor, starts: Numbers, ends: Numbers, axes: Numbers | None = None, steps: Numbers | None = None
) -> Tensor:
    """Python's slices, steps backwards too."""
    along = [axis % x.dim() for axis in axes] if axes is not None else list(range(len(starts)))
    strides = steps if steps is not None else [1] * len(along)
    for axis, start, end, step in zip(along, starts, ends, strides, strict=True):
        x = torch.ops.aten.slice(x, axis, start, end, step) if step > 0 else _backwards(x, axis, start, end, -step)
    return x


def _backwards(x: Tensor, axis: int, start: Any, end: Any, step: int) -> Tensor:
    """The slice start, start - step, ... down to above `end`: a slice of the mirrored tensor."""
    size = x.shape[axis]
    first = size - 1 - (start if start >= 0 else greatest(start + size, -1))
    if not isinstance(end, int) or end >= -(1 << 31):
        last = size - 1 - (end if end >= 0 else greatest(end + size, -1))
    else:
        last = size
    cut: Tensor = torch.ops.aten.slice(torch.flip(x, [axis]), axis, greatest(first, 0), greatest(last, 0), step)
    return cut


@operator("Pad")
def pad(
    x: Tensor, pads: Numbers, value: Value | None = None, axes: Numbers | None = None, *, mode: str = "constant"
) -> Tensor:
    """With a value, the edge, a reflection, or around (wrap). Negative pads cut."""
    along = [axis % x.dim() for axis in axes] if axes is not None else list(range(x.dim()))
    count = len(along)
    for axis, before, after in zip(along, pads[:count], pads[count:], strict=True):
        if isinstance(before, int) and isinstance(after, int) and before == 0 and after == 0:
            continue
        x = _padded(x, axis, before, after, mode, value)
    return x


def _padded(x: Tensor, axis: int, before: Any, after: Any, mode: str, value: Value | None) -> Tensor:
    if mode == "constant":
        widths = [0, 0] * (x.dim() - 1 - axis) + [before, after]
        if value is None or isinstance(value, Known):
            fill = 0 if value is None else value.first
            if x.dtype == torch.bool:
                return F.pad(x.to(torch.uint8), widths, value=int(fill)).to(torch.bool)
            return F.pad(x, widths, value=fill)
        inside = F.pad(torch.ones_like(x, dtype=torch.uint8), widths).to(torch.bool)
        return torch.where(inside, F.pad(x, widths), value.reshape(()))
    size = x.shape[axis]
    at = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        at = at.clamp(0, size - 1)
    elif mode == "wrap":
        at = at.remainder(size)
    else:
        must(mode == "reflect", f"mode {mode!r} is none of ONNX's; use constant, edge, reflect or wrap")
        turned = at.remainder(greatest(2 * (size - 1), 1))
        at = torch.minimum(turned, 2 * (size - 1) - turned)
    return x.index_select(axis, at)


@operator("ConstantOfShape")
def constant_of_shape(shape: Numbers, *, value: Tensor | None = None, device: torch.device) -> Tensor:
    """Zeros of float32 unless told otherwise."""
    if value is None:
        return torch.zeros(shape, device=device)
    return torch.full(shape, value.item(), dtype=value.dtype, device=device)


@operator("Range")
def range_(start: Value, limit: Value, delta: Value, *, device: torch.device) -> Tensor:
    """From start to before limit."""
    first, last, step = (value.first if isinstance(value, Known) else value.item() for value in (start, limit, delta))
    return torch.arange(first, last, step, dtype=start.dtype, device=device)


@operator("EyeLike")
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    """Ones on the k-th diagonal."""
    made = x.dtype if dtype is None else dtype_of(dtype, "the result of EyeLike")
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return (torch.arange(x.shape[1], device=x.device) - rows == k).to(made)


@operator("Trilu")
def trilu(x: Tensor, k: Numbers | None = None, *, upper: int = 1) -> Tensor:
    """The upper or the lower triangle of the last two axes."""
    diagonal = k[0] if k else 0
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(1)
    above = torch.arange(x.shape[-1], device=x.device) - rows
    return torch.where(
        above >= diagonal if upper else above <= diagonal, x, torch.zeros((), dtype=x.dtype, device=x.device)
    )


@operator("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Depth-column-row or column-row-depth."""
    n, c, h, w = x.shape
    depth = c // (blocksize * blocksize)
    if mode == "DCR":
        parts = x.reshape(n, blocksize, blocksize, depth, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, depth, blocksize, blocksize, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, depth, h * blocksize, w * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Its inverse."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.permute(order).reshape(n, c * blocksize * blocksize, h // blocksize, w // blocksize)


@operator("CenterCropPad")
def center_crop_pad(x: Tensor, shape: Numbers, *, axes: list[int] | None = None) -> Tensor:
    """Cut or filled with zeros on both sides alike, the odd one at the end of a pad and the start of a cut's rest."""
    for axis, size in zip(axes if axes is not None else range(x.dim()), shape, strict=True):
        axis, have = axis % x.dim(), x.shape[axis]
        if have > size:
            x = x.narrow(axis, (have - size) // 2, size)
        elif have < size:
            before = (size - have) // 2
            x = _padded(x, axis, before, size - have - before, "constant", None)
    return x
