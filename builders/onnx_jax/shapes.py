"""Operators that move elements or ask for shapes, and change no value."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import helper

from builders.onnx_jax.arrays import axes_of, data, known, numbers, on, sizes
from builders.onnx_jax.nodes import Node, Value, op

_CONSTANTS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


@op("Constant")
def _constant(node: Node) -> Value:
    for name, value in node.attributes.items():
        if name == "value":
            return value
        if name in _CONSTANTS:
            return np.asarray(value, _CONSTANTS[name])
    raise node.refused("it holds a string or a sparse tensor")


@op("Shape")
def _shape(node: Node, x: Value) -> Value:
    shape = tuple(x.shape)
    return sizes(*shape[slice(node.attr("start", 0), node.attr("end", len(shape)))])


@op("Size")
def _size(node: Node, x: Value) -> Value:  # noqa: ARG001
    return sizes(math.prod(x.shape)).reshape(())


@op("Reshape")
def _reshape(node: Node, x: Value, shape: Value) -> Value:
    wanted = numbers(node, shape, "shape")
    if not node.attr("allowzero", 0):
        wanted = [x.shape[at] if _is(size, 0) else size for at, size in enumerate(wanted)]
    module, (taken,) = on(x)
    return module.reshape(taken, tuple(wanted))


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


@op("Flatten")
def _flatten(node: Node, x: Value) -> Value:
    axis = node.attr("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    module, (taken,) = on(x)
    return module.reshape(taken, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@op("Transpose")
def _transpose(node: Node, x: Value) -> Value:
    module, (taken,) = on(x)
    return module.transpose(taken, node.attr("perm"))


@op("Squeeze")
def _squeeze(node: Node, x: Value, axes: Value = None) -> Value:
    module, (taken,) = on(x)
    which = axes_of(node, axes, taken.ndim)
    if which is None:
        which = [at for at, size in enumerate(taken.shape) if _is(size, 1)]
    return module.squeeze(taken, tuple(which))


@op("Unsqueeze")
def _unsqueeze(node: Node, x: Value, axes: Value = None) -> Value:
    module, (taken,) = on(x)
    found = numbers(node, axes, "axes") if axes is not None else node.attr("axes")
    return module.expand_dims(taken, tuple(axis % (taken.ndim + len(found)) for axis in found))


@op("Concat")
def _concat(node: Node, *values: Value) -> Value:
    module, taken = on(*values)
    return module.concatenate(taken, axis=node.attr("axis"))


@op("Split")
def _split(node: Node, x: Value, split: Value = None) -> tuple[Value, ...]:
    module, (taken,) = on(x)
    axis = node.attr("axis", 0)
    parts = numbers(node, split, "split") if split is not None else node.attr("split")
    if parts is None:
        count = node.attr("num_outputs", len(node.outputs))
        each = -(-taken.shape[axis] // count)
        parts = [*[each] * (count - 1), taken.shape[axis] - each * (count - 1)]
    ends = [sum(parts[: at + 1]) for at in range(len(parts) - 1)]
    return tuple(module.split(taken, ends, axis=axis))


@op("Slice")
def _slice(node: Node, x: Value, *given: Value) -> Value:
    _, (taken,) = on(x)
    if node.opset < 10:
        starts, ends, axes, steps = node.attr("starts"), node.attr("ends"), node.attr("axes"), None
    else:
        starts, ends, axes, steps = (
            None if value is None else numbers(node, value, what)
            for value, what in zip((*given, None, None), ("starts", "ends", "axes", "steps"), strict=False)
        )
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    parts = [slice(None)] * taken.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        parts[axis] = _part(start, end, step, taken.shape[axis])
    return taken[tuple(parts)]


def _part(start: Any, end: Any, step: int, size: Any) -> slice:
    """ONNX clamps as Python does, except that going backwards to before the first element needs a None."""
    if step < 0 and isinstance(end, int) and isinstance(size, int) and end < -size:
        return slice(start, None, step)
    far = isinstance(end, int) and end >= (1 << 31) - 1
    return slice(None if _is(start, 0) and step > 0 else start, None if far and step > 0 else end, step)


@op("Expand")
def _expand(node: Node, x: Value, shape: Value) -> Value:
    module, (taken,) = on(x)
    wanted = numbers(node, shape, "shape")
    rank = max(len(wanted), taken.ndim)
    have, want = [1] * (rank - taken.ndim) + list(taken.shape), [1] * (rank - len(wanted)) + wanted
    return module.broadcast_to(taken, tuple(b if _is(a, 1) else a for a, b in zip(have, want, strict=True)))


@op("Tile")
def _tile(node: Node, x: Value, repeats: Value) -> Value:
    module, (taken,) = on(x)
    return module.tile(taken, tuple(numbers(node, repeats, "repeats")))


@op("ConstantOfShape")
def _constant_of_shape(node: Node, shape: Value) -> Value:
    value = np.asarray(node.attr("value", np.zeros(1, np.float32))).reshape(())
    wanted = tuple(numbers(node, shape, "shape"))
    if all(isinstance(size, int) for size in wanted):
        return np.full(wanted, value)
    return jnp.broadcast_to(jnp.asarray(value), wanted)


@op("Range")
def _range(node: Node, start: Value, limit: Value, delta: Value) -> Value:
    first, last, step = (known(node, value, "range").ravel()[0] for value in (start, limit, delta))
    if start.dtype == limit.dtype == delta.dtype != object:
        count = max(0, math.ceil((last - first) / step))
        return (first + np.arange(count) * step).astype(start.dtype)
    return jnp.arange(first, last, step, dtype=jnp.int64)


@op("EyeLike")
def _eye_like(node: Node, x: Value) -> Value:
    dtype = helper.tensor_dtype_to_np_dtype(node.attr("dtype")) if "dtype" in node.attributes else x.dtype
    rows, columns = x.shape
    return jnp.eye(rows, columns, k=node.attr("k", 0), dtype=dtype)


@op("Trilu")
def _trilu(node: Node, x: Value, k: Value = None) -> Value:
    (offset,) = numbers(node, k, "k") if k is not None else (0,)
    return (jnp.triu if node.attr("upper", 1) else jnp.tril)(data(x), offset)


@op("Pad")
def _pad(node: Node, x: Value, pads: Value = None, value: Value = None, axes: Value = None) -> Value:
    taken = data(x)
    found = numbers(node, pads, "pads") if pads is not None else node.attr("pads")
    which = axes_of(node, axes, taken.ndim) or list(range(taken.ndim))
    widths = [(0, 0)] * taken.ndim
    for at, axis in enumerate(which):
        widths[axis] = (found[at], found[at + len(which)])
    mode = node.attr("mode", "constant")
    if mode != "constant" and min(min(pair) for pair in widths) < 0:
        raise node.refused(f"pads are negative in mode {mode!r}")
    cut = tuple(slice(max(0, -a), size - max(0, -b)) for (a, b), size in zip(widths, taken.shape, strict=True))
    taken, widths = taken[cut], [(max(0, a), max(0, b)) for a, b in widths]
    if mode != "constant":
        return jnp.pad(taken, widths, mode=mode)
    fill = jnp.asarray(value).reshape(()) if value is not None else node.attr("value", 0)
    return jnp.pad(taken, widths, constant_values=jnp.asarray(fill, taken.dtype))


@op("DepthToSpace")
def _depth_to_space(node: Node, x: Value) -> Value:
    taken, block = data(x), node.attr("blocksize")
    n, c, h, w = taken.shape
    depth = c // (block * block)
    if node.attr("mode", "DCR") == "DCR":
        parts = jnp.reshape(taken, (n, block, block, depth, h, w)).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = jnp.reshape(taken, (n, depth, block, block, h, w)).transpose(0, 1, 4, 2, 5, 3)
    return jnp.reshape(parts, (n, depth, h * block, w * block))


@op("SpaceToDepth")
def _space_to_depth(node: Node, x: Value) -> Value:
    taken, block = data(x), node.attr("blocksize")
    n, c, h, w = taken.shape
    order = (0, 3, 5, 1, 2, 4) if node.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    parts = jnp.reshape(taken, (n, c, h // block, block, w // block, block)).transpose(order)
    return jnp.reshape(parts, (n, c * block * block, h // block, w // block))
