"""Arrays of a request padded to other sizes of its dims, and outputs cropped to those of the request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.state import REPEAT, Padding, PadValue
from enginesmith.core.types import Shape, Tensors, TensorSpec

_Places = tuple[slice, ...]


@dataclass(frozen=True)
class _Fill:
    """One step of padding an array. into: the places that are filled, with `value`, or with a copy of the places
    `source`."""

    into: _Places
    value: Array | None
    source: _Places | None


@dataclass(frozen=True)
class _PaddedArray:
    """How one input is padded: to `shape`, where its own entries are at `place`. zeros: whether all the rest is 0; then
    there are no `fills`."""

    name: str
    shape: Shape
    place: _Places
    fills: tuple[_Fill, ...]
    zeros: bool = False

    def pad(self, array: Array) -> Array:
        """A new array of the padded shape."""
        padded_array = np.zeros(self.shape, array.dtype) if self.zeros else np.empty(self.shape, array.dtype)
        padded_array[self.place] = array
        for fill in self.fills:
            padded_array[fill.into] = fill.value if fill.source is None else padded_array[fill.source]
        return padded_array


@dataclass(frozen=True)
class PadPlan:
    """How requests of some sizes are padded to other sizes, and their outputs cropped.

    elements, own_elements: of all inputs, padded and as they were given.
    inputs: how each is padded.  crops: output -> what is kept of it along each axis.
    """

    inputs: tuple[_PaddedArray, ...]
    crops: Mapping[str, _Places]
    elements: int
    own_elements: int

    def pad(self, inputs: Tensors) -> Tensors:
        """The inputs at the padded sizes; arrays that are not padded are the given ones."""
        if not self.inputs:
            return inputs
        padded_inputs = dict(inputs)
        for array in self.inputs:
            padded_inputs[array.name] = array.pad(padded_inputs[array.name])
        return padded_inputs

    def crop(self, outputs: Tensors) -> dict[str, Array]:
        """The outputs at the request's own sizes: views of the given arrays."""
        cropped_outputs = dict(outputs)
        for name, region in self.crops.items():
            if name in cropped_outputs:
                cropped_outputs[name] = cropped_outputs[name][region]
        return cropped_outputs


def plan_padding(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    padding: Padding,
    sizes: Mapping[str, int],
    padded: Mapping[str, int],
) -> PadPlan:
    """The plan for requests with the dims `sizes`, which become `padded`. Raises KeyError for a dim without a rule.

    padding: the value that each dim's inputs are filled up with.
    """
    grown_dims = {dim for dim, size in padded.items() if size != sizes[dim]}
    arrays = [
        _plan_array(spec, padding.inputs.get(spec.name, {}), sizes, padded)
        for spec in inputs
        if grown_dims.intersection(spec.shape)
    ]
    crops = {spec.name: _crop(spec, grown_dims, sizes) for spec in outputs if grown_dims.intersection(spec.shape)}
    elements, own_elements = (sum(math.prod(spec.at(dim_sizes)) for spec in inputs) for dim_sizes in (padded, sizes))
    return PadPlan(tuple(arrays), crops, elements, own_elements)


def _plan_array(
    spec: TensorSpec, rules: Mapping[str, PadValue], sizes: Mapping[str, int], padded: Mapping[str, int]
) -> _PaddedArray:
    old_shape, new_shape = spec.at(sizes), spec.at(padded)
    fills = []
    region = [slice(0, size) for size in old_shape]
    for axis, (old_size, size, dim) in enumerate(zip(old_shape, new_shape, spec.shape, strict=True)):
        if size == old_size:
            continue
        value = rules[str(dim)]
        region[axis] = slice(old_size, size)
        fill_region = tuple(region)
        source_region = (
            (*fill_region[:axis], slice(old_size - 1, old_size), *fill_region[axis + 1 :]) if value == REPEAT else None
        )
        fills.append(
            _Fill(fill_region, None if isinstance(value, str) else np.array(value, dtype_of(spec.dtype)), source_region)
        )
        region[axis] = slice(0, size)
    old_region = tuple(slice(0, size) for size in old_shape)
    is_zero_fill = all(fill.value is not None and not fill.value for fill in fills)
    return _PaddedArray(spec.name, new_shape, old_region, () if is_zero_fill else tuple(fills), is_zero_fill)


def _crop(spec: TensorSpec, grown: set[str], sizes: Mapping[str, int]) -> _Places:
    return tuple(slice(0, sizes[dim]) if isinstance(dim, str) and dim in grown else slice(None) for dim in spec.shape)
