"""Pooling."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from builders.onnx_jax.arrays import data
from builders.onnx_jax.linear import padding
from builders.onnx_jax.nodes import Node, Value, op


@op("GlobalAveragePool", "GlobalMaxPool")
def _global(node: Node, x: Value) -> Value:
    taken = data(x)
    reduce = jnp.mean if node.op == "GlobalAveragePool" else jnp.max
    return reduce(taken, axis=tuple(range(2, taken.ndim)), keepdims=True).astype(taken.dtype)


@op("MaxPool")
def _max_pool(node: Node, x: Value) -> Value:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise node.refused("its second output, the indices, is used")
    taken = data(x)
    least: Any = -np.inf if jnp.issubdtype(taken.dtype, jnp.floating) else jnp.iinfo(taken.dtype).min
    return _windows(node, taken, np.asarray(least, taken.dtype), lax.max, _pads(node, taken))


@op("AveragePool")
def _average_pool(node: Node, x: Value) -> Value:
    taken = data(x)
    pads, zero = _pads(node, taken), np.zeros((), taken.dtype)
    total = _windows(node, taken, zero, lax.add, pads)
    if not any(map(any, pads)):
        return total / np.asarray(math.prod(node.attr("kernel_shape")), taken.dtype)
    given = padding(node, taken.shape[2:], _extents(node), _strides(node, taken.ndim - 2))
    counts = np.ones((), taken.dtype)
    for axis, size in enumerate(taken.shape[2:]):
        if not isinstance(size, int):
            raise node.refused(f"axis {axis + 2} is padded and has no fixed size")
        counts = counts[..., None] * _counts(node, axis, size, given[axis], pads[axis]).astype(taken.dtype)
    return total / counts


def _counts(node: Node, axis: int, size: int, given: tuple[int, int], pads: tuple[int, int]) -> Any:
    """How many elements each window of an axis counts; what ceil_mode adds behind (pads beyond given) never counts."""
    pad = 1 if node.attr("count_include_pad", 0) else 0
    parts = [np.full(given[0], pad), np.ones(size), np.full(given[1], pad), np.zeros(pads[1] - given[1])]
    counted = np.concatenate(parts)
    kernel, stride = node.attr("kernel_shape")[axis], _strides(node, len(node.attr("kernel_shape")))[axis]
    dilation = node.attr("dilations", [1] * (axis + 1))[axis]
    firsts = np.arange(0, len(counted) - (kernel - 1) * dilation, stride)
    return counted[firsts[:, None] + np.arange(kernel) * dilation].sum(axis=1)


@op("LpPool", "GlobalLpPool")
def _lp_pool(node: Node, x: Value) -> Value:
    taken = data(x)
    power = np.asarray(node.attr("p", 2), taken.dtype)
    raised = jnp.abs(taken) ** power
    if node.op == "GlobalLpPool":
        total = jnp.sum(raised, axis=tuple(range(2, taken.ndim)), keepdims=True)
    else:
        total = _windows(node, raised, np.zeros((), taken.dtype), lax.add, _pads(node, taken))
    return (total ** (1 / power)).astype(taken.dtype)


def _strides(node: Node, rank: int) -> list[int]:
    found: list[int] = node.attr("strides", [1] * rank)
    return found


def _extents(node: Node) -> list[int]:
    kernel = node.attr("kernel_shape")
    dilations = node.attr("dilations", [1] * len(kernel))
    return [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]


def _pads(node: Node, taken: Any) -> list[tuple[Any, Any]]:
    """(before, after) of each spatial axis, with what ceil_mode adds behind."""
    extents, strides = _extents(node), _strides(node, taken.ndim - 2)
    found = padding(node, taken.shape[2:], extents, strides)
    if not node.attr("ceil_mode", 0):
        return found
    longer = []
    for (before, after), size, extent, stride in zip(found, taken.shape[2:], extents, strides, strict=True):
        rest = size + before + after - extent
        count = -(-rest // stride)
        if count * stride >= size + before:  # a window that would begin behind the input is none
            count -= 1
        longer.append((before, after + max(0, count * stride - rest)))
    return longer


def _windows(node: Node, taken: Any, first: Any, combine: Any, pads: list[tuple[Any, Any]]) -> Any:
    kernel = node.attr("kernel_shape")
    rank = len(kernel)
    return lax.reduce_window(
        taken,
        first,
        combine,
        (1, 1, *kernel),
        (1, 1, *_strides(node, rank)),
        [(0, 0), (0, 0), *pads],
        window_dilation=(1, 1, *node.attr("dilations", [1] * rank)),
    )
