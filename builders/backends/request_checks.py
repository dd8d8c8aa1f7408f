"""Shared code of backends: shape profiles of a request, checks of options and requests, and a session for engines that
are functions of arrays."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.types import Backend, BuildRequest, Dim, Session, ShapeProfile, Tensors, TensorSpec, list_sums

if TYPE_CHECKING:
    import numpy as np

    from enginesmith.arrays import InputCheck

# A plan gives a CPU engine at most one profile more than this; a backend that checks inputs by profiles needs them all.
MOST_PROFILES = 64


def profiles(inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[ShapeProfile]:
    """One optimization profile for every combination of buckets; none for a model without dynamic dims."""
    if not dims:
        return
    dim_multiples = {dim.name: dim.multiple for dim in dims}
    axes = ((spec.name, tuple(dim_multiples.get(str(size), 1) for size in spec.shape)) for spec in inputs)
    multiples = tuple((name, axis_multiples) for name, axis_multiples in axes if set(axis_multiples) - {1})
    for buckets in itertools.product(*(dim.buckets() for dim in dims)):
        low, opt, high = (
            dict(zip((dim.name for dim in dims), sizes, strict=True)) for sizes in zip(*buckets, strict=True)
        )
        ranges = tuple((spec.name, spec.at(low), spec.at(opt), spec.at(high)) for spec in inputs)
        yield ShapeProfile(ranges, multiples)


def unbounded(profiles: Sequence[ShapeProfile]) -> tuple[ShapeProfile, ...]:
    """The profiles without their ranges, for an engine that accepts any size: only the multiples, each set once."""
    return tuple({ShapeProfile((), profile.multiples): None for profile in profiles if profile.multiples})


def refusal(request: BuildRequest, title: str) -> str | None:
    """Why the compiler `title` cannot serve this request's shapes: too many profiles to check inputs against, or an
    input or output without elements. None if it can."""
    if len(request.profiles) > MOST_PROFILES:
        return f"the buckets combine to more than {MOST_PROFILES} profiles, the limit for {title}; use fewer buckets"
    for spec in (*request.inputs, *request.outputs):
        if 0 in spec.shape:
            return f"{spec.name!r} has shape {spec.shape} and so no elements, which {title} does not take; leave it out"
    return None


def sum_refusal(request: BuildRequest, title: str) -> str | None:
    """Why a compiler with a separate symbol for each open size cannot compile a size that is a sum of others, or None.
    title: the compiler's name."""
    for spec, _, total in list_sums(request.inputs):
        return f"input {spec.name!r} has the size {total}, and {title} does not support sums of dims; use onnxruntime"
    return None


def sizes(request: BuildRequest) -> dict[str, tuple[int, int]]:
    """Dim -> its least and greatest size over all profiles, for each named dim of the inputs that a profile has."""
    dim_ranges: dict[str, tuple[int, int]] = {}
    for spec in request.inputs:
        ranges = [entry for profile in request.profiles for entry in profile.inputs if entry[0] == spec.name]
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and ranges:
                min_size, max_size = min(low[axis] for _, low, _, _ in ranges), max(high[axis] for *_, high in ranges)
                bounds = dim_ranges.get(dim, (min_size, max_size))
                dim_ranges[dim] = min(min_size, bounds[0]), max(max_size, bounds[1])
    return dim_ranges


def check_choice(backend: Backend, option: str, choices: Collection[str]) -> None:
    """Raise InputError if the value of an option is not one of `choices`."""
    if (value := getattr(backend, option)) not in choices:
        raise InputError(f"backends.{backend.name}.{option}: {value!r} is not one of {', '.join(map(repr, choices))}")


def check_not_negative(backend: Backend, option: str, zero: str = "means no limit") -> None:
    """Raise InputError if a number is below 0. zero: the meaning of 0, for the error."""
    if (value := getattr(backend, option)) < 0:
        raise InputError(f"backends.{backend.name}.{option}: {value} is negative; 0 {zero}")


class FunctionSession(Session):
    """An engine as a function of arrays. Inputs and outputs have the order of the request."""

    def __init__(
        self, request: BuildRequest, title: str, function: "Callable[[list[np.ndarray]], list[np.ndarray]]"
    ) -> None:
        from enginesmith.arrays import InputCheck

        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._request, self._title = request, title
        self._check = InputCheck(request.inputs, request.profiles)
        self._function: Callable[[list[np.ndarray]], list[np.ndarray]] | None = function

    def close(self) -> None:
        """Release the function; later calls of `run` fail."""
        self._function = None

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """Run once. Raises DataError for arrays that fit no profile, and EnginesmithError if the function fails, if its
        results differ from the request's outputs, and after `close`."""
        if self._function is None:
            raise EnginesmithError(f"the session of this {self._title} engine is closed; open it again")
        arrays, dim_sizes = checked_inputs(self._check, inputs)
        return checked_outputs(self._request, self._function(arrays), dim_sizes, self._title)


def checked_inputs(check: "InputCheck", inputs: Tensors) -> "tuple[list[np.ndarray], dict[str, int]]":
    """The arrays in the order of the model's inputs, each C-contiguous, and the size of each named dim in them.

    check: the session's. Raises DataError for names, dtypes and shapes that the request does not have.
    """
    import numpy as np

    sizes = check(inputs).sizes
    # not ascontiguousarray, which makes a vector of a scalar
    return [np.asarray(inputs[spec.name], order="C") for spec in check.specs], sizes


def checked_outputs(
    request: BuildRequest, results: "list[np.ndarray]", sizes: dict[str, int], title: str
) -> "dict[str, np.ndarray]":
    """The results by name. Raises EnginesmithError for one whose dtype, rank or size is not that of the request.

    A compiler that treated two sizes as equal, or dropped a cast, returns such results.
    """
    arrays = {spec.name: array for spec, array in zip(request.outputs, results, strict=True)}
    for spec in request.outputs:
        array = arrays[spec.name]
        expected_shape = [sizes.get(dim) if isinstance(dim, str) else dim for dim in spec.shape]
        is_matching = array.ndim == len(expected_shape) and all(
            expected in (None, size) for size, expected in zip(array.shape, expected_shape, strict=True)
        )
        if not is_matching or array.dtype.name != spec.dtype:
            raise EnginesmithError(
                f"{title} gives output {spec.name!r} as {array.dtype.name} {array.shape}, not {spec.dtype} "
                f"{spec.shape} where {sizes}; its answers for this model cannot be used: use another backend"
            )
    return arrays
