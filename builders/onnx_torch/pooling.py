"""Pooling. Where torch's rules differ from ONNX's (pads on one side, dilated averages), by padding and convolving."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.convolution import padded, spatial_rank, window_pads
from builders.onnx_torch.table import must, operator

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _geometry(
    x: Tensor,
    kernel: list[int],
    strides: list[int] | None,
    dilations: list[int] | None,
    pads: list[int] | None,
    auto_pad: str,
    ceil_mode: int,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Strides, dilations, and the pads before and after; those after grow so that the last window of `ceil_mode` fits.

    A window that would begin in the padding after the input is left out, as in torch.
    """
    rank = spatial_rank(x)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    before, after = window_pads(x, kernel, strides, dilations, pads, auto_pad)
    if ceil_mode:
        grown = []
        for size, width, stride, dilation, left, right in zip(
            x.shape[2:], kernel, strides, dilations, before, after, strict=True
        ):
            reach = (width - 1) * dilation + 1
            count = -(-(size + left + right - reach) // stride) + 1
            if (count - 1) * stride >= size + left:
                count -= 1
            grown.append((count - 1) * stride + reach - size - left)
        after = grown
    return strides, dilations, before, after


@operator("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
    outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """The indices, where they are asked for, count in the whole tensor."""
    strides, dilations, before, after = _geometry(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    wide = x if x.is_floating_point() else x.to(torch.float32)  # 8-bit integers are exact in it
    run = _MAX[spatial_rank(x)]
    if outputs == 1:
        low = before == after and all(2 * p <= k for p, k in zip(before, kernel_shape, strict=True))
        if low and not ceil_mode:
            return run(wide, kernel_shape, strides, before, dilations).to(x.dtype)
        return run(_cut(wide, before, after, -math.inf), kernel_shape, strides, 0, dilations).to(x.dtype)
    must(not storage_order, "it counts its indices by columns (storage_order 1); count them by rows")
    must(before == after and not ceil_mode, "it gives indices with uneven pads or ceil_mode; pad evenly")
    values, at = run(wide, kernel_shape, strides, before, dilations, return_indices=True)
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(
        [x.shape[0], x.shape[1], *[1] * (x.dim() - 2)]
    )
    return values.to(x.dtype), at + planes * math.prod(x.shape[2:])


def _cut(x: Tensor, before: list[int], after: list[int], value: float) -> Tensor:
    """Padded; a negative pad after (of ceil_mode) is what no window reaches, and stays."""
    return padded(x, before, [max(width, 0) if isinstance(width, int) else width for width in after], value)


@operator("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Over what lies inside, or with `count_include_pad` over the pads too (not over what ceil_mode adds)."""
    ones = [1] * len(kernel_shape)
    plain = window_pads(x, kernel_shape, strides or ones, dilations or ones, pads, auto_pad)
    strides, dilations, before, after = _geometry(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    even = before == after and all(2 * p <= k for p, k in zip(before, kernel_shape, strict=True))
    if even and not ceil_mode and all(step == 1 for step in dilations):
        run = _AVERAGE[spatial_rank(x)]
        return run(x, kernel_shape, strides, before, False, bool(count_include_pad))
    inside = torch.ones_like(x)
    if count_include_pad:
        inside = padded(inside, plain[0], plain[1], 1.0)
        rest = [max(more - have, 0) for more, have in zip(after, plain[1], strict=True)]
        inside = padded(inside, [0] * len(rest), rest)
    else:
        inside = _cut(inside, before, after, 0.0)
    sums = _window_sums(_cut(x, before, after, 0.0), kernel_shape, strides, dilations)
    return sums / _window_sums(inside, kernel_shape, strides, dilations)


def _window_sums(x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]) -> Tensor:
    """Sums over windows, each channel by itself."""
    planes = x.reshape([x.shape[0] * x.shape[1], 1, *x.shape[2:]])
    ones = torch.ones([1, 1, *kernel], dtype=x.dtype, device=x.device)
    sums = _CONVOLUTIONS[len(kernel)](planes, ones, None, strides, 0, dilations)
    return sums.reshape([x.shape[0], x.shape[1], *sums.shape[2:]])


@operator("LpPool")
def lp_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    p: int = 2,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """The p-th root of sums of p-th powers."""
    strides, dilations, before, after = _geometry(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    sums = _window_sums(_cut(x.abs().pow(p), before, after, 0.0), kernel_shape, strides, dilations)
    return sums.pow(1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean of each channel."""
    return x.mean(list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """The greatest of each channel."""
    return x.amax(list(range(2, x.dim())), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    """The norm of each channel."""
    return x.abs().pow(p).sum(list(range(2, x.dim())), keepdim=True).pow(1.0 / p)
