"""Convolutions and pooling: ONNX's rules for the places of windows, over the library's kernels."""

from typing import Any

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.table import must, operator

Sizes = list[Any]


def _pads(
    xp: ArrayLibrary, x: Array, kernel: Sizes, strides: Sizes, dilations: Sizes, pads: Sizes | None, auto_pad: str
) -> tuple[Sizes, Sizes]:
    """How much is added before and after each spatial axis, in elements."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        given = pads or [0] * 2 * rank
        return given[:rank], given[rank:]
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    must(auto_pad in ("SAME_UPPER", "SAME_LOWER"), f"auto_pad {auto_pad!r} is none of ONNX's; write the pads out")
    smaller, larger = [], []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        covered = (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1
        total = xp.sym_max(covered - size, 0)
        smaller.append(total // 2)
        larger.append(total - total // 2)
    return (smaller, larger) if auto_pad == "SAME_UPPER" else (larger, smaller)


@operator("Conv")
def conv(
    xp: ArrayLibrary, x: Array, weight: Array, bias: Array | None = None,
    *, auto_pad: str = "NOTSET", dilations: Sizes | None = None, group: int = 1, kernel_shape: Sizes | None = None,
    pads: Sizes | None = None, strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The library's convolution, with pads that may differ before and after."""
    ones = [1] * (x.ndim - 2)
    dilations, strides = dilations or ones, strides or ones
    before, after = _pads(xp, x, kernel_shape or list(weight.shape[2:]), strides, dilations, pads, auto_pad)
    return xp.conv(x, weight, bias, strides, before, after, dilations, group)


@operator("ConvTranspose")
def conv_transpose(
    xp: ArrayLibrary, x: Array, weight: Array, bias: Array | None = None,
    *, auto_pad: str = "NOTSET", dilations: Sizes | None = None, group: int = 1, kernel_shape: Sizes | None = None,
    output_padding: Sizes | None = None, output_shape: Sizes | None = None, pads: Sizes | None = None,
    strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The library's transposed convolution with the pads cut off; zeros are added where `output_shape` is larger."""
    ones = [1] * (x.ndim - 2)
    dilations, strides, extra = dilations or ones, strides or ones, output_padding or [0] * len(ones)
    full = [
        stride * (size - 1) + more + (width - 1) * dilation + 1
        for size, stride, more, width, dilation in zip(
            x.shape[2:], strides, extra, kernel_shape or weight.shape[2:], dilations, strict=True
        )
    ]
    before, after = _cuts(full, x, strides, pads, auto_pad, output_shape)
    return xp.conv_transpose(x, weight, bias, strides, before, after, extra, dilations, group)


def _cuts(
    full: Sizes, x: Array, strides: Sizes, pads: Sizes | None, auto_pad: str, shape: Sizes | None
) -> tuple[Sizes, Sizes]:
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
        first, last = (less, total - less) if auto_pad == "SAME_UPPER" or total < 0 else (total - less, less)
        before.append(first)
        after.append(last)
    return before, after


def _geometry(
    xp: ArrayLibrary, x: Array, kernel: Sizes, strides: Sizes | None, dilations: Sizes | None, pads: Sizes | None,
    auto_pad: str, ceil_mode: int,
) -> tuple[Sizes, Sizes, Sizes, Sizes]:  # fmt: skip
    """Strides, dilations, and the pads before and after; those after grow so that the last window of `ceil_mode` fits.

    A window that would begin in the padding after the input is left out.
    """
    ones = [1] * len(kernel)
    strides, dilations = strides or ones, dilations or ones
    before, after = _pads(xp, x, kernel, strides, dilations, pads, auto_pad)
    if ceil_mode:
        after = [
            _pad_to_window(size + left, right, (width - 1) * dilation + 1, stride)
            for size, width, stride, dilation, left, right in zip(
                x.shape[2:], kernel, strides, dilations, before, after, strict=True
            )
        ]
    return strides, dilations, before, after


def _pad_to_window(size: Any, after: Any, reach: int, stride: int) -> Any:
    """The pad after an axis, of that size with the pad before, so that the last window ends with it."""
    count = -(-(size + after - reach) // stride) + 1
    if (count - 1) * stride >= size:
        count -= 1
    return (count - 1) * stride + reach - size


@operator("MaxPool")
def max_pool(
    xp: ArrayLibrary, x: Array,
    *, kernel_shape: Sizes, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Sizes | None = None,
    pads: Sizes | None = None, storage_order: int = 0, strides: Sizes | None = None, outputs: int,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """The greatest of each window, and where they are asked for their indices in the flat array."""
    strides, dilations, before, after = _geometry(xp, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if outputs == 1:
        return xp.max_pool(x, kernel_shape, strides, before, _drop_negative(after), dilations)
    must(not storage_order, "it counts its indices by columns (storage_order 1); count them by rows")
    must(before == after and not ceil_mode, "it gives indices with uneven pads or ceil_mode; pad evenly")
    return xp.max_pool_indices(x, kernel_shape, strides, before, dilations)


def _drop_negative(after: Sizes) -> Sizes:
    """The pads, 0 for negative ones: those of `ceil_mode` are elements that no window reaches."""
    return [max(width, 0) if isinstance(width, int) else width for width in after]


@operator("AveragePool")
def average_pool(
    xp: ArrayLibrary, x: Array,
    *, kernel_shape: Sizes, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Sizes | None = None, pads: Sizes | None = None, strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The mean of each window over elements of x, or with `count_include_pad` over the pads too (not over those that
    `ceil_mode` adds)."""
    ones = [1] * len(kernel_shape)
    plain = _pads(xp, x, kernel_shape, strides or ones, dilations or ones, pads, auto_pad)
    strides, dilations, before, after = _geometry(xp, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if before == after and not ceil_mode and dilations == ones:
        return xp.avg_pool(x, kernel_shape, strides, before, bool(count_include_pad))
    inside = xp.ones_like(x)
    if count_include_pad:
        counted = [min(more, have) if ceil_mode else have for more, have in zip(after, plain[1], strict=True)]
        inside = xp.pad_axes(inside, _widths(plain[0], counted), 1)
        rest = [more - have for more, have in zip(after, counted, strict=True)]
        inside = xp.pad_axes(inside, _widths([0] * len(rest), rest), 0)
    else:
        inside = xp.pad_axes(inside, _widths(before, _drop_negative(after)), 0)
    none = [0] * len(ones)
    x = xp.pad_axes(x, _widths(before, _drop_negative(after)), 0)
    sums, counts = (xp.window_sums(part, kernel_shape, strides, none, none, dilations) for part in (x, inside))
    return sums / counts


def _widths(before: Sizes, after: Sizes) -> list[tuple[Any, Any]]:
    """(before, after) of all axes: none of samples and channels."""
    return [(0, 0), (0, 0), *zip(before, after, strict=True)]


@operator("LpPool")
def lp_pool(
    xp: ArrayLibrary, x: Array,
    *, kernel_shape: Sizes, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Sizes | None = None, p: int = 2,
    pads: Sizes | None = None, strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The p-norm of each window."""
    strides, dilations, before, after = _geometry(xp, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return xp.window_sums(xp.abs(x) ** p, kernel_shape, strides, before, _drop_negative(after), dilations) ** (1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(xp: ArrayLibrary, x: Array) -> Array:
    """The mean of each channel."""
    return xp.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalMaxPool")
def global_max_pool(xp: ArrayLibrary, x: Array) -> Array:
    """The greatest of each channel."""
    return xp.amax(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalLpPool")
def global_lp_pool(xp: ArrayLibrary, x: Array, *, p: int = 2) -> Array:
    """The norm of each channel."""
    return xp.sum(xp.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1.0 / p)
