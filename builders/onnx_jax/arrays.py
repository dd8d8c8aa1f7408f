"""What operators ask of values: whether they are known while tracing, and as numbers."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from builders.onnx_jax.nodes import Node, Value


def on(*values: Value) -> tuple[ModuleType, list[Any]]:
    """numpy where all values are known, else jax.numpy; and the values as it takes them."""
    if all(value is None or isinstance(value, np.ndarray) for value in values):
        return np, list(values)
    return jnp, [None if value is None else data(value) for value in values]


def data(value: Value) -> jax.Array:
    """A value as an array to compute with: symbolic sizes become int64 scalars."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        parts = [jnp.asarray(size).astype(jnp.int64) for size in value.ravel()]
        return jnp.stack(parts).reshape(value.shape) if parts else jnp.zeros(value.shape, jnp.int64)
    return jnp.asarray(value)


def known(node: Node, value: Value, what: str) -> np.ndarray[Any, Any]:
    """A value that has to be known while tracing. Raises ModelError when it depends on the inputs' data."""
    if not isinstance(value, np.ndarray):
        raise node.refused(f"its {what} depends on the data of the inputs, and XLA needs it ahead of time")
    return value


def numbers(node: Node, value: Value, what: str) -> list[Any]:
    """The same as a list of ints and symbolic sizes."""
    return [int(size) if isinstance(size, np.generic) else size for size in known(node, value, what).ravel().tolist()]


def axes_of(node: Node, value: Value, rank: int) -> list[int] | None:
    """Axes from an input or, in older opsets, an attribute; none of them negative. None: not given."""
    found = numbers(node, value, "axes") if value is not None else node.attr("axes")
    return None if found is None else [axis % rank if rank else 0 for axis in found]


def sizes(*found: Any) -> np.ndarray[Any, Any]:
    """Sizes as a value: int64, or objects where one is symbolic."""
    plain = all(isinstance(size, int | np.integer) for size in found)
    made = np.empty(len(found), np.int64 if plain else object)
    made[:] = found
    return made
