"""Operators that reduce axes, or order along them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from builders.onnx_jax.arrays import axes_of, data, numbers, on
from builders.onnx_jax.nodes import Node, Value, op

_REDUCED = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod"}


@op(*_REDUCED)
def _reduce(node: Node, x: Value, axes: Value = None) -> Value:
    module, (taken,) = on(x)
    name = _REDUCED[node.op]
    if taken.dtype == object:
        return _reduced_sizes(node, taken, name, axes)
    which, keep = _axes(node, taken, axes)
    if which == ():
        return taken
    if math.prod(taken.shape) == 0 and name in ("max", "min"):  # ONNX: the least or greatest number there is
        return getattr(jnp, name)(data(taken), axis=which, keepdims=keep, initial=_least(taken.dtype, name))
    made = getattr(module, name)(taken, axis=which, keepdims=keep)
    return made.astype(taken.dtype)


def _least(dtype: Any, name: str) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if name == "max" else jnp.inf
    if np.dtype(dtype).kind == "b":
        return name == "min"
    return jnp.iinfo(dtype).min if name == "max" else jnp.iinfo(dtype).max


def _reduced_sizes(node: Node, taken: Value, name: str, axes: Value) -> Value:
    which, keep = _axes(node, taken, axes)
    made = getattr(np, name)(taken, axis=which, keepdims=keep)
    return np.asarray(made, object)


def _axes(node: Node, taken: Value, axes: Value) -> tuple[tuple[int, ...] | None, bool]:
    """Axes to reduce (None: all, empty: nothing to do) and whether they stay, of size 1."""
    found = axes_of(node, axes, taken.ndim)
    keep = bool(node.attr("keepdims", 1))
    if not found:
        return (() if node.attr("noop_with_empty_axes", 0) else None), keep
    return tuple(found), keep


@op("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare")
def _reduce_after(node: Node, x: Value, axes: Value = None) -> Value:
    taken = data(x)
    which, keep = _axes(node, taken, axes)
    if node.op == "ReduceLogSumExp":
        return jax.nn.logsumexp(taken, axis=which, keepdims=keep)
    before = {"ReduceL1": jnp.abs, "ReduceL2": jnp.square, "ReduceSumSquare": jnp.square}.get(node.op, lambda v: v)
    after = {"ReduceL2": jnp.sqrt, "ReduceLogSum": jnp.log}.get(node.op, lambda v: v)
    made = before(taken) if which == () else jnp.sum(before(taken), axis=which, keepdims=keep).astype(taken.dtype)
    return after(made)


@op("ArgMax", "ArgMin")
def _arg(node: Node, x: Value) -> Value:
    taken, axis = data(x), node.attr("axis", 0)
    find = jnp.argmax if node.op == "ArgMax" else jnp.argmin
    keep = bool(node.attr("keepdims", 1))
    if not node.attr("select_last_index", 0):
        return find(taken, axis=axis, keepdims=keep).astype(jnp.int64)
    found = find(jnp.flip(taken, axis), axis=axis, keepdims=keep).astype(jnp.int64)
    return taken.shape[axis] - 1 - found


@op("Softmax", "LogSoftmax")
def _softmax(node: Node, x: Value) -> Value:
    taken = data(x)
    apply = jax.nn.softmax if node.op == "Softmax" else jax.nn.log_softmax
    if node.opset >= 13:
        return apply(taken, axis=node.attr("axis", -1))
    axis = node.attr("axis", 1) % taken.ndim  # of a matrix, in those opsets
    return apply(taken, axis=tuple(range(axis, taken.ndim)))


@op("Hardmax")
def _hardmax(node: Node, x: Value) -> Value:
    taken, axis = data(x), node.attr("axis", -1)
    if node.opset < 13:
        raise node.refused("it is of an opset before 13")
    return jax.nn.one_hot(jnp.argmax(taken, axis=axis), taken.shape[axis], axis=axis, dtype=taken.dtype)


@op("CumSum", "CumProd")
def _cumulative(node: Node, x: Value, axis: Value) -> Value:
    taken = data(x)
    (along,) = numbers(node, axis, "axis")
    turned = jnp.flip(taken, along) if node.attr("reverse", 0) else taken
    accumulate, first = (jnp.cumsum, 0) if node.op == "CumSum" else (jnp.cumprod, 1)
    if node.attr("exclusive", 0):  # shifted by one, beginning with what changes nothing
        before = [(1, 0) if at == along % taken.ndim else (0, 0) for at in range(taken.ndim)]
        turned = lax.slice_in_dim(jnp.pad(turned, before, constant_values=first), 0, taken.shape[along], axis=along)
    made: Any = accumulate(turned, axis=along, dtype=taken.dtype)
    return jnp.flip(made, along) if node.attr("reverse", 0) else made


@op("TopK")
def _top_k(node: Node, x: Value, k: Value) -> tuple[Value, Value]:
    taken, axis = data(x), node.attr("axis", -1)
    (count,) = numbers(node, k, "k")
    moved = jnp.moveaxis(taken, axis, -1)
    if node.attr("largest", 1):
        values, indices = lax.top_k(moved, count)
    else:
        indices = jnp.argsort(moved, axis=-1, stable=True)[..., :count]
        values = jnp.take_along_axis(moved, indices, axis=-1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(jnp.int64)
