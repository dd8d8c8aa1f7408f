"""Normalizations, as they are at inference."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from builders.onnx_jax.arrays import data
from builders.onnx_jax.nodes import Node, Value, op


@op("BatchNormalization")
def _batch(node: Node, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
    if node.attr("training_mode", 0):
        raise node.refused("it is in training mode")
    taken = data(x)
    shape = (1, -1) + (1,) * (taken.ndim - 2)
    factor = data(scale) / jnp.sqrt(data(variance) + np.asarray(node.attr("epsilon", 1e-5), variance.dtype))
    offset = data(bias) - data(mean) * factor
    return (taken * factor.reshape(shape) + offset.reshape(shape)).astype(taken.dtype)


@op("InstanceNormalization")
def _instance(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    taken = data(x)
    shape = (1, -1) + (1,) * (taken.ndim - 2)
    made, _, _ = _standardized(taken, tuple(range(2, taken.ndim)), node.attr("epsilon", 1e-5))
    return made.astype(taken.dtype) * data(scale).reshape(shape) + data(bias).reshape(shape)


@op("LayerNormalization")
def _layer(node: Node, x: Value, scale: Value, bias: Value = None) -> tuple[Value, ...]:
    taken = data(x)
    axes = tuple(range(node.attr("axis", -1) % taken.ndim, taken.ndim))
    stash = helper.tensor_dtype_to_np_dtype(node.attr("stash_type", 1))
    made, mean, inverse = _standardized(taken.astype(stash), axes, node.attr("epsilon", 1e-5))
    made = made.astype(taken.dtype) * data(scale)
    return made if bias is None else made + data(bias), mean, inverse


@op("MeanVarianceNormalization")
def _mean_variance(node: Node, x: Value) -> Value:
    taken = data(x)
    axes = tuple(node.attr("axes", [0, 2, 3]))
    mean = jnp.mean(taken, axis=axes, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(jnp.square(taken), axis=axes, keepdims=True) - jnp.square(mean))
    return (taken - mean) / (deviation + np.asarray(1e-9, taken.dtype))


def _standardized(x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """x less its mean over its deviation, in at least fp32; the mean, and one over the deviation."""
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=axes, keepdims=True)
    centred = wide - mean
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=axes, keepdims=True) + np.asarray(epsilon, wide.dtype))
    return centred * inverse, mean, inverse


@op("LpNormalization")
def _lp(node: Node, x: Value) -> Value:
    taken, axis = data(x), node.attr("axis", -1)
    if node.attr("p", 2) == 1:
        norm = jnp.sum(jnp.abs(taken), axis=axis, keepdims=True)
    else:
        norm = jnp.sqrt(jnp.sum(jnp.square(taken), axis=axis, keepdims=True))
    return jnp.where(norm == 0, jnp.zeros((), taken.dtype), taken / norm)


@op("LRN")
def _lrn(node: Node, x: Value) -> Value:
    taken, size = data(x), node.attr("size")
    alpha, beta, bias = (node.attr(name, value) for name, value in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    around = [(0, 0)] * taken.ndim
    around[1] = ((size - 1) // 2, size // 2)
    window = (1, size) + (1,) * (taken.ndim - 2)
    total = lax.reduce_window(jnp.square(taken), np.zeros((), taken.dtype), lax.add, window, (1,) * taken.ndim, around)
    return (taken / (bias + alpha / size * total) ** beta).astype(taken.dtype)
