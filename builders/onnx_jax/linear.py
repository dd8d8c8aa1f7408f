"""Products: matrices, convolutions, Einstein sums."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from builders.onnx_jax.arrays import data
from builders.onnx_jax.nodes import Node, Value, op


@op("MatMul")
def _matmul(node: Node, a: Value, b: Value) -> Value:  # noqa: ARG001
    return jnp.matmul(data(a), data(b))


@op("Gemm")
def _gemm(node: Node, a: Value, b: Value, c: Value = None) -> Value:
    x, y = data(a), data(b)
    made = jnp.matmul(x.T if node.attr("transA", 0) else x, y.T if node.attr("transB", 0) else y)
    made = _times(made, node.attr("alpha", 1.0))
    return made if c is None else made + _times(data(c), node.attr("beta", 1.0))


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1 else x * np.asarray(factor, x.dtype)


@op("Einsum")
def _einsum(node: Node, *values: Value) -> Value:
    return jnp.einsum(node.attr("equation"), *map(data, values))


@op("MatMulInteger")
def _matmul_integer(node: Node, a: Value, b: Value, a_zero: Value = None, b_zero: Value = None) -> Value:  # noqa: ARG001
    x, y = _without_zero(a, a_zero, -2), _without_zero(b, b_zero, -1)
    return jnp.matmul(x, y, preferred_element_type=jnp.int32)


@op("ConvInteger")
def _conv_integer(node: Node, x: Value, w: Value, x_zero: Value = None, w_zero: Value = None) -> Value:
    return _convolved(node, _without_zero(x, x_zero, 0), _without_zero(w, w_zero, 0))


def _without_zero(value: Value, zero: Value, axis: int) -> Any:
    """Integers less their zero point, as int32. A row of zero points belongs to `axis`."""
    wide = data(value).astype(jnp.int32)
    if zero is None:
        return wide
    point = data(zero).astype(jnp.int32)
    if point.ndim == 1 and point.size > 1:
        point = point.reshape([-1 if at == axis % wide.ndim else 1 for at in range(wide.ndim)])
    return wide - point


@op("Conv")
def _conv(node: Node, x: Value, w: Value, bias: Value = None) -> Value:
    made = _convolved(node, data(x), data(w))
    return made if bias is None else made + data(bias).reshape((1, -1) + (1,) * (made.ndim - 2))


def _convolved(node: Node, x: Any, w: Any) -> Any:
    rank = x.ndim - 2
    strides, dilations = node.attr("strides", [1] * rank), node.attr("dilations", [1] * rank)
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(w.shape[2:], dilations, strict=True)]
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        padding(node, x.shape[2:], extents, strides),
        rhs_dilation=dilations,
        feature_group_count=node.attr("group", 1),
    )


def padding(node: Node, sizes: Sequence[Any], extents: Sequence[int], strides: Sequence[int]) -> list[tuple[Any, Any]]:
    """(before, after) of each spatial axis. extents: of the dilated window."""
    rank, mode = len(sizes), node.attr("auto_pad", "NOTSET")
    if mode == "VALID":
        return [(0, 0)] * rank
    if mode == "NOTSET":
        pads = node.attr("pads", [0] * (2 * rank))
        return [(pads[at], pads[rank + at]) for at in range(rank)]
    found = []
    for size, extent, stride in zip(sizes, extents, strides, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + extent - size)
        less, more = total // 2, total - total // 2
        found.append((more, less) if mode == "SAME_LOWER" else (less, more))
    return found


@op("ConvTranspose")
def _conv_transpose(node: Node, x: Value, w: Value, bias: Value = None) -> Value:
    taken, kernel = data(x), data(w)
    rank, group = taken.ndim - 2, node.attr("group", 1)
    strides, dilations = node.attr("strides", [1] * rank), node.attr("dilations", [1] * rank)
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(kernel.shape[2:], dilations, strict=True)]
    channels, each = kernel.shape[:2]
    # [in, out/group, ...] -> [out, in/group, ...], turned round: a convolution over the spread-out input.
    kernel = kernel.reshape((group, channels // group, each, *kernel.shape[2:]))
    kernel = jnp.swapaxes(kernel, 1, 2).reshape((group * each, channels // group, *kernel.shape[3:]))
    made = lax.conv_general_dilated(
        taken,
        jnp.flip(kernel, tuple(range(2, 2 + rank))),
        [1] * rank,
        _transposed_padding(node, taken.shape[2:], extents, strides),
        lhs_dilation=strides,
        rhs_dilation=dilations,
        feature_group_count=group,
    )
    return made if bias is None else made + data(bias).reshape((1, -1) + (1,) * rank)


def _transposed_padding(
    node: Node, sizes: Sequence[Any], extents: Sequence[int], strides: Sequence[int]
) -> list[tuple[Any, Any]]:
    rank, mode = len(sizes), node.attr("auto_pad", "NOTSET")
    extra, wanted = node.attr("output_padding", [0] * rank), node.attr("output_shape")
    pads = node.attr("pads", [0] * (2 * rank))
    found = []
    for at, (size, extent, stride) in enumerate(zip(sizes, extents, strides, strict=True)):
        before, after = pads[at], pads[rank + at]
        if wanted is not None or mode.startswith("SAME"):
            target = wanted[at] if wanted is not None else size * stride
            total = stride * (size - 1) + extra[at] + extent - target
            half = int(total / 2)
            before, after = (half, total - half) if mode != "SAME_LOWER" else (total - half, half)
        found.append((extent - 1 - before, extent - 1 - after + extra[at]))
    return found
