"""QuantizeLinear and DequantizeLinear: per tensor, per axis, in blocks. XLA computes what is between them in floating
point: the numbers are those of the Q/DQ graph, the speed is not that of integers."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from onnx import helper

from builders.onnx_jax.arrays import data, on
from builders.onnx_jax.elementwise import cast
from builders.onnx_jax.nodes import Node, Value, op


@op("QuantizeLinear")
def _quantize(node: Node, x: Value, scale: Value, zero: Value = None) -> Value:
    module, (taken, step, point) = on(x, scale, zero)
    to = _quantized_type(node, zero)
    by = _spread(node, taken, step)
    offset = None if point is None else _spread(node, taken, point.astype(np.float32))
    ratio = module.divide(taken.astype(np.float32), by.astype(np.float32))
    if to.name.startswith(("float8", "float4")):
        return cast(node, ratio if offset is None else ratio + offset, to)
    whole = module.round(ratio)
    whole = whole if offset is None else whole + offset
    limits: Any = ml_dtypes.iinfo(to)
    return module.clip(whole, float(limits.min), float(limits.max)).astype(np.int32).astype(to)


def _quantized_type(node: Node, zero: Value) -> np.dtype[Any]:
    if zero is not None:
        given: np.dtype[Any] = np.dtype(zero.dtype)
        return given
    wanted = node.attr("output_dtype", 0)
    found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(wanted) if wanted else np.uint8)
    return found


@op("DequantizeLinear")
def _dequantize(node: Node, x: Value, scale: Value, zero: Value = None) -> Value:
    module, (taken, step, point) = on(x, scale, zero)
    wanted = node.attr("output_dtype", 0)
    to = np.dtype(helper.tensor_dtype_to_np_dtype(wanted) if wanted else step.dtype)
    if module is jnp and str(taken.dtype).startswith("float"):
        wide = taken.astype(np.float32)
        wide = wide if point is None else wide - _spread(node, taken, point.astype(np.float32))
    elif str(taken.dtype).startswith("float"):
        wide = taken.astype(np.float32) - (0 if point is None else _spread(node, taken, point.astype(np.float32)))
    else:
        wide = taken.astype(np.int32)
        wide = wide if point is None else wide - _spread(node, taken, point.astype(np.int32))
    return (wide.astype(np.float32) * _spread(node, taken, step).astype(np.float32)).astype(to)


def _spread(node: Node, x: Value, parameter: Value) -> Value:
    """A scale or zero point in a shape that broadcasts against x: one, one per index of an axis, or one per block."""
    if parameter.ndim == 0 or parameter.size == 1:
        return parameter.reshape(())
    axis, block = node.attr("axis", 1) % x.ndim, node.attr("block_size", 0)
    if block:
        module, (taken,) = on(parameter)
        repeated = module.repeat(taken, block, axis=axis)
        return repeated[tuple(slice(size) if at == axis else slice(None) for at, size in enumerate(x.shape))]
    return parameter.reshape([-1 if at == axis else 1 for at in range(x.ndim)])


@op("DynamicQuantizeLinear")
def _dynamic_quantize(node: Node, x: Value) -> tuple[Value, Value, Value]:  # noqa: ARG001
    taken = data(x)
    low, high = jnp.minimum(jnp.min(taken), 0), jnp.maximum(jnp.max(taken), 0)
    scale = (high - low) / np.float32(255)
    safe = jnp.where(scale == 0, np.float32(1), scale)
    zero = jnp.clip(jnp.round(-low / safe), 0, 255)
    whole = jnp.clip(jnp.round(taken / safe) + zero, 0, 255)
    return whole.astype(jnp.uint8), scale, zero.astype(jnp.uint8)
