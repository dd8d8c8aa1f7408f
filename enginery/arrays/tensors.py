"""Checks that arrays fit what a model declares, before a runtime sees them.

A check in full takes some microseconds for each input, a call of a small engine not much more. So a session keeps an
`InputCheck`: what was accepted once, by types, dtypes and shapes, is found in a table from then on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginery.core.errors import DataError
from enginery.core.types import ShapeProfile, Tensors, TensorSpec

# Combinations of shapes that a session remembers; a model of any size meets more of them than it pays to keep.
MOST_ACCEPTED = 256


@dataclass(frozen=True)
class Fit:
    """What inputs were accepted as. sizes: of each named dim.  profile: index of the first that holds their shapes."""

    sizes: dict[str, int]
    profile: int


class InputCheck:
    """`check_inputs` and `fitting_profile` of one session, made in full once for inputs of equal dtypes and shapes.

    profiles: none means that every shape of the specs is accepted.
    """

    def __init__(self, specs: Sequence[TensorSpec], profiles: Sequence[ShapeProfile] = ()) -> None:
        self.specs, self._profiles = specs, profiles
        self._names = [spec.name for spec in specs]
        self._accepted: dict[Any, Fit] = {}

    def __call__(self, inputs: Tensors) -> Fit:
        """What the inputs fit as. Raises DataError as `check_inputs` and `fitting_profile` do."""
        try:
            key = tuple([(type(array), array.dtype, array.shape) for array in map(inputs.__getitem__, self._names)])
            fit = self._accepted[key]
        except (KeyError, AttributeError, TypeError, IndexError):  # not met yet, no array, or no mapping
            return self._checked(inputs)
        return fit if len(inputs) == len(self._names) else self._checked(inputs)

    def _checked(self, inputs: Tensors) -> Fit:
        sizes = check_inputs(self.specs, inputs)
        fit = Fit(sizes, fitting_profile(self._profiles, inputs) if self._profiles else 0)
        if len(self._accepted) >= MOST_ACCEPTED:
            self._accepted.clear()
        arrays = [inputs[name] for name in self._names]
        self._accepted[tuple([(type(array), array.dtype, array.shape) for array in arrays])] = fit
        return fit


def check_inputs(specs: Sequence[TensorSpec], inputs: Tensors | object) -> dict[str, int]:
    """The size of each named dim in `inputs`, arrays by name. Raises DataError for what is no mapping, missing or
    unknown names, what is no array, a dtype (in this machine's order of bytes), rank or size that differs from the
    declared one, and a dim that has two sizes.
    """
    wanted = {spec.name for spec in specs}
    if not isinstance(inputs, Mapping):  # whoever calls a session may give anything
        kind, names = type(inputs).__name__, _names(wanted)
        raise DataError(f"the inputs are a {kind}; give a dict of numpy arrays by name: the model needs {names}")
    if missing := wanted - inputs.keys():
        raise DataError(f"no array for input {_names(missing)}; the model needs {_names(wanted)}")
    if unknown := inputs.keys() - wanted:
        raise DataError(f"no input is named {_names(unknown)}; the model has {_names(wanted)}")
    sizes: dict[str, int] = {}
    for spec in specs:
        _check(spec, inputs[spec.name], sizes)
    return sizes


def _check(spec: TensorSpec, array: np.ndarray[Any, Any], sizes: dict[str, int]) -> None:
    if not isinstance(array, np.ndarray):
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
    return ", ".join(sorted(map(repr, names)))


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
