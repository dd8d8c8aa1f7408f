"""Convolutions, and the geometry that pooling shares with them."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.table import greatest, must, operator

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def window_pads(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    pads: list[int] | None,
    auto_pad: str,
) -> tuple[list[int], list[int]]:
    """How much is added before and after each spatial axis, in elements."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        given = pads or [0] * 2 * rank
        return given[:rank], given[rank:]
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    must(auto_pad in ("SAME_UPPER", "SAME_LOWER"), f"auto_pad {auto_pad!r} is none of ONNX's; write the pads out")
    before, after = [], []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        covered = (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1
        total = greatest(covered - size, 0)
        less, more = total // 2, total - total // 2
        before.append(less if auto_pad == "SAME_UPPER" else more)
        after.append(more if auto_pad == "SAME_UPPER" else less)
    return before, after


def padded(x: Tensor, before: list[int], after: list[int], value: float = 0.0) -> Tensor:
    """The tensor with its spatial axes padded."""
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    if all(isinstance(width, int) and width == 0 for width in widths):
        return x
    return F.pad(x, widths, value=value)


def spatial_rank(x: Tensor) -> int:
    """The number of spatial axes. Raises ModelError for what torch has no kernel for."""
    rank = x.dim() - 2
    must(rank in _CONVOLUTIONS, f"{rank} spatial axes; torch has 1 to 3")
    return rank


@operator("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Torch's; pads that differ before and after are added first."""
    rank = spatial_rank(x)
    dilations, strides = dilations or [1] * rank, strides or [1] * rank
    kernel = kernel_shape or list(weight.shape[2:])
    before, after = window_pads(x, kernel, strides, dilations, pads, auto_pad)
    run = _CONVOLUTIONS[rank]
    if before == after and all(width >= 0 for width in before):
        return run(x, weight, bias, strides, before, dilations, group)
    return run(padded(x, before, after), weight, bias, strides, 0, dilations, group)


@operator("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Torch's without pads, of which the pads are then cut; where `output_shape` is beyond it, zeros are added."""
    rank = spatial_rank(x)
    dilations, strides = dilations or [1] * rank, strides or [1] * rank
    extra = output_padding or [0] * rank
    kernel = kernel_shape or list(weight.shape[2:])
    full = [
        stride * (size - 1) + more + (width - 1) * dilation + 1
        for size, stride, more, width, dilation in zip(x.shape[2:], strides, extra, kernel, dilations, strict=True)
    ]
    before, after = _cuts(full, x, strides, pads, auto_pad, output_shape)
    if before == after and all(more < max(s, d) for more, s, d in zip(extra, strides, dilations, strict=True)):
        return _TRANSPOSED[rank](x, weight, bias, strides, before, extra, group, dilations)
    made = _TRANSPOSED[rank](x, weight, None, strides, 0, 0, group, dilations)
    missing = [size - have - min(end, 0) for size, have, end in zip(full, made.shape[2:], after, strict=True)]
    made = padded(made, [0] * rank, missing)
    for axis, (start, end) in enumerate(zip(before, after, strict=True)):
        made = made.narrow(axis + 2, start, full[axis] - start - end)
    return made if bias is None else made + bias.reshape([-1, *[1] * rank])


def _cuts(
    full: list[int], x: Tensor, strides: list[int], pads: list[int] | None, auto_pad: str, shape: list[int] | None
) -> tuple[list[int], list[int]]:
    rank = len(full)
    if auto_pad in ("NOTSET", "") and not shape:
        given = pads or [0] * 2 * rank
        return given[:rank], given[rank:]
    if auto_pad == "VALID" and not shape:
        return [0] * rank, [0] * rank
    wanted = shape[-rank:] if shape else [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    before, after = [], []
    for have, want in zip(full, wanted, strict=True):
        total = have - want
        less = max(total, 0) // 2
        more = total - less
        first, last = (less, more) if auto_pad == "SAME_UPPER" or total < 0 else (more, less)
        before.append(first)
        after.append(last)
    return before, after
