"""Checks that arrays fit what a model declares, before a runtime sees them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from builders.errors import DataError
from builders.types import ShapeProfile, Tensors, TensorSpec


def check_inputs(specs: Sequence[TensorSpec], inputs: Tensors) -> dict[str, int]:
    """The size of each named dim in `inputs`. Raises DataError for missing or unknown names, what is no array, a dtype
    (in this machine's order of bytes), rank or size that differs from the declared one, and a dim that has two sizes.
    """
    wanted = {spec.name for spec in specs}
    if missing := wanted - inputs.keys():
        raise DataError(f"no array for input {_names(missing)}; the model needs {_names(wanted)}")
    if unknown := inputs.keys() - wanted:
        raise DataError(f"no input is named {_names(unknown)}; the model has {_names(wanted)}")
    sizes: dict[str, int] = {}
    for spec in specs:
        _check(spec, inputs[spec.name], sizes)
    return sizes


def _check(spec: TensorSpec, array: np.ndarray[Any, Any], sizes: dict[str, int]) -> None:
    if not isinstance(array, np.ndarray):  # whoever calls a session may give anything
        raise DataError(
            f"input {spec.name!r} is a {type(array).__name__}; the model needs a numpy array of {spec.dtype}"
        )
    if not array.dtype.isnative:  # dtype.name does not tell, and a runtime would read other numbers
        raise DataError(
            f"input {spec.name!r} has its bytes in the other order ({array.dtype.str}); use astype({spec.dtype!r})"
        )
    if array.dtype.name != spec.dtype:
        raise DataError(f"input {spec.name!r} is {array.dtype.name}; the model needs {spec.dtype}: convert it")
    if array.ndim != len(spec.shape):
        raise DataError(f"input {spec.name!r} has shape {array.shape}; the model needs {_shape(spec)}")
    for axis, (size, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        expected = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if size != expected:
            why = f"{dim!r} is {expected} elsewhere" if isinstance(dim, str) else f"the model needs {_shape(spec)}"
            raise DataError(f"input {spec.name!r} has size {size} on axis {axis} (shape {array.shape}); {why}")


def _shape(spec: TensorSpec) -> str:
    return "(" + ", ".join(str(dim) for dim in spec.shape) + ")"


def _names(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def fitting_profile(profiles: Sequence[ShapeProfile], inputs: Tensors) -> int:
    """Index of the first profile whose ranges hold every input's shape. Raises DataError when there is none."""
    for index, shapes in enumerate(profiles):
        if all(_within(inputs[name].shape, low, high) for name, low, _, high in shapes.inputs if name in inputs):
            return index
    given = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
    ranges = "; ".join(f"{name} {low}..{high}" for shapes in profiles for name, low, _, high in shapes.inputs)
    raise DataError(f"no optimization profile holds {given}; the engine was built for {ranges}; widen dims")


def _within(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> bool:
    return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
