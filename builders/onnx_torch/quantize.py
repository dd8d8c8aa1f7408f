"""Quantization: Q/DQ per tensor, per axis and in blocks, and the integer operators.

Into 4 bits the values saturate at the type's ends and are kept one to a byte, since torch has no such tensors.
"""

from typing import NamedTuple

import torch
from onnx import TensorProto
from torch import Tensor

from builders.onnx_torch.convolution import conv
from builders.onnx_torch.elementwise import converted
from builders.onnx_torch.matmul import integer_product, shifted
from builders.onnx_torch.reading import DTYPES, NARROW, dtype_of
from builders.onnx_torch.table import must, operator

_ENDS: dict[int, tuple[int, int]] = {TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15)}
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


@operator("QuantizeLinear")
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = TensorProto.UINT8,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """saturate(round(x / scale) + zero), halves to even; into FP8 by Cast's rule. The zero point's type is kept."""
    dtype = NARROW.get(output_dtype) or dtype_of(output_dtype, "the result of a QuantizeLinear")
    if zero is not None and output_dtype not in NARROW:
        dtype = zero.dtype
    wide = DTYPES.get(precision) or (x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32)
    laid = laid_out(scale, x, axis, block_size).to(wide)
    scaled = x.to(wide) / laid
    if dtype not in _INTEGERS:
        return converted(scaled, dtype, saturate=bool(saturate))
    low, high = _ENDS.get(output_dtype) or (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    rounded = torch.round(scaled)
    if zero is not None:
        rounded = rounded + laid_out(zero, x, axis, block_size).to(wide)
    return rounded.clamp(low, high).to(dtype)


@operator("DequantizeLinear")
def dequantize_linear(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    """(x - zero) * scale, in the scale's type or `output_dtype`."""
    made = dtype_of(output_dtype, "the result of a DequantizeLinear") if output_dtype else scale.dtype
    wide = scale.dtype if scale.dtype in (torch.float32, torch.float64) else torch.float32
    value = x.to(wide)
    if zero is not None and x.dtype in _INTEGERS:
        value = value - laid_out(zero, x, axis, block_size).to(wide)
    return (value * laid_out(scale, x, axis, block_size).to(wide)).to(made)


def laid_out(scale: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point in a shape that broadcasts to x: one for all, per index of an axis, or per block."""
    if scale.numel() == 1 and scale.dim() <= 1:
        return scale.reshape(())
    axis = axis % x.dim()
    if scale.dim() == 1 and not block:
        return scale.reshape([-1, *[1] * (x.dim() - 1 - axis)])
    must(
        scale.dim() == x.dim(), f"its scale has {scale.dim()} axes, its input {x.dim()}; a scale per block has as many"
    )
    block = block or -(-x.shape[axis] // scale.shape[axis])
    return scale.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])


class _Ends(NamedTuple):
    low: Tensor
    high: Tensor


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 over the tensor's own range, zero included: values, scale, zero point."""
    ends = _Ends(torch.clamp(x.amin(), max=0.0), torch.clamp(x.amax(), min=0.0))
    scale = (ends.high - ends.low) / 255.0
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round(-ends.low / safe).clamp(0, 255)
    values = (torch.round(x / safe) + zero).clamp(0, 255).to(torch.uint8)
    return values, scale, zero.to(torch.uint8)


@operator("QLinearMatMul")
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    """The product of integers, scaled and rounded back to integers."""
    sums = integer_product(shifted(a, a_zero, -2), shifted(b, b_zero, -1)).to(torch.float32)
    rows = a_scale.unsqueeze(-1) if a_scale.dim() == 1 and a_scale.shape[0] != 1 else a_scale
    return quantize_linear(sums * (rows * b_scale).to(torch.float32), y_scale.to(torch.float32), y_zero, axis=-1)


@operator("ConvInteger")
def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero: Tensor | None = None,
    weight_zero: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Of 8-bit integers, into int32; exact, in float64."""
    zero = weight_zero
    if zero is not None and zero.dim() == 1 and zero.shape[0] != 1:
        zero = zero.reshape([-1, *[1] * (weight.dim() - 1)])
    return conv(
        shifted(x, x_zero, 0).to(torch.float64),
        shifted(weight, zero, 0).to(torch.float64),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    ).to(torch.int32)


@operator("QLinearConv")
def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """The convolution of integers, scaled and rounded back to integers."""
    sums = conv_integer(
        x,
        weight,
        x_zero,
        weight_zero,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    channels = [-1, *[1] * (x.dim() - 2)]
    sums = sums if bias is None else sums + bias.reshape(channels)
    scale = (x_scale * weight_scale).reshape(channels)
    return quantize_linear(sums.to(torch.float32) * scale, y_scale, y_zero)
