"""Operators that pick or place elements by index.

An index out of bounds is an error in ONNX and cannot be one in XLA: floats then become NaN, which validation never lets
pass; integers their least or greatest value.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from builders.onnx_jax.arrays import data, numbers, on
from builders.onnx_jax.nodes import Node, Value, op


@op("Gather")
def _gather(node: Node, x: Value, indices: Value) -> Value:
    axis = node.attr("axis", 0)
    if isinstance(x, np.ndarray) and isinstance(indices, np.ndarray) and indices.dtype != object:
        return np.take(x, indices, axis=axis)
    taken = data(x)
    return jnp.take(taken, _counted(indices, taken.shape[axis]), axis=axis, mode="fill")


def _counted(indices: Value, size: Any) -> Value:
    """Indices from the end as indices from the start."""
    found = data(indices)
    return jnp.where(found < 0, found + jnp.asarray(size, found.dtype), found)


@op("GatherElements")
def _gather_elements(node: Node, x: Value, indices: Value) -> Value:
    taken, axis = data(x), node.attr("axis", 0)
    return jnp.take_along_axis(taken, _counted(indices, taken.shape[axis]), axis=axis, mode="fill")


@op("GatherND")
def _gather_nd(node: Node, x: Value, indices: Value) -> Value:
    taken, found, batch = data(x), data(indices), node.attr("batch_dims", 0)
    depth = found.shape[-1]
    parts = [_counted(found[..., at], taken.shape[batch + at]) for at in range(depth)]
    before = [
        jnp.arange(taken.shape[at]).reshape([-1 if at == axis else 1 for axis in range(found.ndim - 1)])
        for at in range(batch)
    ]
    return taken.at[(*before, *parts)].get(mode="fill")


@op("ScatterND")
def _scatter_nd(node: Node, x: Value, indices: Value, updates: Value) -> Value:
    taken, found = data(x), data(indices)
    where = tuple(_counted(found[..., at], taken.shape[at]) for at in range(found.shape[-1]))
    return _placed(node, taken, where, data(updates))


@op("ScatterElements", "Scatter")
def _scatter_elements(node: Node, x: Value, indices: Value, updates: Value) -> Value:
    taken, axis = data(x), node.attr("axis", 0) % x.ndim
    found = _counted(indices, taken.shape[axis])
    where = [
        jnp.arange(found.shape[at]).reshape([-1 if at == other else 1 for other in range(found.ndim)])
        for at in range(found.ndim)
    ]
    where[axis] = found
    return _placed(node, taken, tuple(where), data(updates))


def _placed(node: Node, taken: Any, where: tuple[Any, ...], updates: Any) -> Value:
    method = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}[
        node.attr("reduction", "none")
    ]
    return getattr(taken.at[where], method)(updates, mode="drop")


@op("OneHot")
def _one_hot(node: Node, indices: Value, depth: Value, values: Value) -> Value:
    (count,) = numbers(node, depth, "depth")
    found = _counted(indices, int(count))
    axis = node.attr("axis", -1) % (found.ndim + 1)
    places = jnp.arange(count, dtype=found.dtype).reshape([-1 if at == axis else 1 for at in range(found.ndim + 1)])
    off, on_value = data(values)
    return jnp.where(jnp.expand_dims(found, axis) == places, on_value, off)


@op("NonZero", "Compress", "Unique", "NonMaxSuppression")
def _unbounded(node: Node, *values: Value) -> Value:
    module, taken = on(*values)
    if node.op == "NonZero" and module is np and taken[0].dtype != object:
        return np.stack(np.nonzero(taken[0])).astype(np.int64)
    raise node.refused("the shape of its output depends on data")


@op("ReverseSequence")
def _reverse_sequence(node: Node, x: Value, lengths: Value) -> Value:
    taken, time, batch = data(x), node.attr("time_axis", 0), node.attr("batch_axis", 1)
    moved = jnp.moveaxis(taken, (batch, time), (0, 1))
    steps, ends = jnp.arange(moved.shape[1])[None, :], data(lengths)[:, None]
    order = jnp.where(steps < ends, ends - 1 - steps, steps)
    order = order.reshape(order.shape + (1,) * (moved.ndim - 2))
    return jnp.moveaxis(jnp.take_along_axis(moved, order, axis=1), (0, 1), (batch, time))
