"""Quantization: Q/DQ per array, per axis and in blocks, and the integer operators.

4-bit values saturate at the ends of their type, also where a library holds each in a byte.
"""

import ml_dtypes
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.operators.elementwise import convert
from builders.onnx_ops.operators.matmul import conv, matmul_integer, subtract_zero_point
from builders.onnx_ops.table import Array, ArrayLibrary, DType, must, operator

_NARROW = (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2)


def _wide(xp: ArrayLibrary, dtype: DType) -> DType:
    return dtype if dtype == xp.float64 else xp.float32


@operator("QuantizeLinear")
def quantize_linear(
    xp: ArrayLibrary, x: Array, scale: Array, zero: Array | None = None,
    *, axis: int = 1, block_size: int = 0, output_dtype: int = TensorProto.UINT8, precision: int = 0, saturate: int = 1,
) -> Array:  # fmt: skip
    """saturate(round(x / scale) + zero), halves to even; into FP8 by Cast's rule. The zero point's type is kept."""
    numpy_dtype = tensor_dtype_to_np_dtype(output_dtype)
    dtype = xp.dtype(numpy_dtype, narrow=True) if zero is None or output_dtype in _NARROW else zero.dtype
    wide_dtype = xp.dtype(tensor_dtype_to_np_dtype(precision)) if precision else _wide(xp, x.dtype)
    quotient = xp.astype(x, wide_dtype) / xp.astype(laid_out(xp, scale, x, axis, block_size), wide_dtype)
    is_integer = "int" in str(dtype)
    quotient = xp.round(quotient) if is_integer else quotient
    if zero is not None and is_integer:
        quotient = quotient + xp.astype(laid_out(xp, zero, x, axis, block_size), wide_dtype)
    if not is_integer:
        return convert(xp, quotient, dtype, saturate=bool(saturate))
    if output_dtype not in _NARROW:
        return xp.astype(xp.clip(quotient, *xp.ends(dtype)), dtype)
    limits = ml_dtypes.iinfo(numpy_dtype)
    return xp.astype(xp.astype(xp.clip(quotient, int(limits.min), int(limits.max)), xp.int32), dtype)


@operator("DequantizeLinear")
def dequantize_linear(
    xp: ArrayLibrary, x: Array, scale: Array, zero: Array | None = None,
    *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
) -> Array:  # fmt: skip
    """(x - zero) * scale, in the scale's type or `output_dtype`."""
    result_dtype = xp.dtype(tensor_dtype_to_np_dtype(output_dtype)) if output_dtype else scale.dtype
    wide_dtype = _wide(xp, scale.dtype)
    value = xp.astype(x, wide_dtype)
    if zero is not None and "int" in str(x.dtype):
        value = value - xp.astype(laid_out(xp, zero, x, axis, block_size), wide_dtype)
    return xp.astype(value * xp.astype(laid_out(xp, scale, x, axis, block_size), wide_dtype), result_dtype)


def laid_out(xp: ArrayLibrary, scale: Array, x: Array, axis: int, block: int) -> Array:
    """A scale or zero point in a shape that broadcasts to x: one for all, per index of an axis, or per block."""
    if scale.ndim <= 1 and all(size == 1 for size in scale.shape):
        return scale.reshape(())
    axis = axis % x.ndim
    if scale.ndim == 1 and not block:
        return scale.reshape((-1, *[1] * (x.ndim - 1 - axis)))
    must(scale.ndim == x.ndim, f"its scale has {scale.ndim} axes, its input {x.ndim}; a scale per block has as many")
    block = block or -(-x.shape[axis] // scale.shape[axis])
    return xp.cut(xp.repeat_interleave(scale, block, axis), axis, 0, x.shape[axis])


@operator("QLinearMatMul")
def qlinear_matmul(
    xp: ArrayLibrary, a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array,
    y_scale: Array, y_zero: Array,
) -> Array:  # fmt: skip
    """The product of quantized matrices, quantized."""
    accumulator = xp.astype(matmul_integer(xp, a, b, a_zero, b_zero), xp.float32)
    rows = xp.unsqueeze(a_scale, -1) if a_scale.ndim == 1 and a_scale.shape[0] != 1 else a_scale
    product = accumulator * xp.astype(rows * b_scale, xp.float32)
    return quantize_linear(xp, product, xp.astype(y_scale, xp.float32), y_zero, axis=-1)


@operator("ConvInteger")
def conv_integer(
    xp: ArrayLibrary, x: Array, weight: Array, x_zero: Array | None = None, weight_zero: Array | None = None,
    *, auto_pad: str = "NOTSET", dilations: list[int] | None = None, group: int = 1,
    kernel_shape: list[int] | None = None, pads: list[int] | None = None, strides: list[int] | None = None,
) -> Array:  # fmt: skip
    """The convolution of 8-bit integers less their zero points, in int32."""
    zero = weight_zero
    if zero is not None and zero.ndim == 1 and zero.shape[0] != 1:
        zero = zero.reshape((-1, *[1] * (weight.ndim - 1)))
    dtype = xp.exact_dtype(None)
    terms = (
        xp.astype(subtract_zero_point(xp, term, zero_point, 0), dtype)
        for term, zero_point in ((x, x_zero), (weight, zero))
    )
    accumulator = conv(
        xp, *terms, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    return xp.astype(accumulator, xp.int32)


@operator("QLinearConv")
def qlinear_conv(
    xp: ArrayLibrary, x: Array, x_scale: Array, x_zero: Array, weight: Array, weight_scale: Array, weight_zero: Array,
    y_scale: Array, y_zero: Array, bias: Array | None = None,
    *, auto_pad: str = "NOTSET", dilations: list[int] | None = None, group: int = 1,
    kernel_shape: list[int] | None = None, pads: list[int] | None = None, strides: list[int] | None = None,
) -> Array:  # fmt: skip
    """The convolution of quantized arrays, quantized."""
    accumulator = conv_integer(
        xp, x, weight, x_zero, weight_zero, auto_pad=auto_pad, dilations=dilations, group=group,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    channel_shape = (-1, *[1] * (x.ndim - 2))
    accumulator = accumulator if bias is None else accumulator + bias.reshape(channel_shape)
    scale = (x_scale * weight_scale).reshape(channel_shape)
    return quantize_linear(xp, xp.astype(accumulator, xp.float32) * scale, y_scale, y_zero)
