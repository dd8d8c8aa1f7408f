"""Optimization profiles: making them of the buckets of the dims, and holding an engine's inputs and outputs to them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Dim, ShapeProfile, Tensors, TensorSpec, list_sums

if TYPE_CHECKING:
    import numpy as np

    from enginesmith.arrays import InputCheck

# A plan gives a CPU engine no more profiles than this and one; a backend that holds inputs to them needs them all.
MOST_PROFILES = 64


def profiles(inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[ShapeProfile]:
    """One optimization profile for every combination of buckets; none for a model without dynamic dims."""
    if not dims:
        return
    every = {dim.name: dim.multiple for dim in dims}
    axes = ((item.name, tuple(every.get(str(size), 1) for size in item.shape)) for item in inputs)
    multiples = tuple((name, found) for name, found in axes if set(found) - {1})
    for buckets in itertools.product(*(dim.buckets() for dim in dims)):
        low, opt, high = (
            dict(zip((dim.name for dim in dims), sizes, strict=True)) for sizes in zip(*buckets, strict=True)
        )
        ranges = tuple((item.name, item.at(low), item.at(opt), item.at(high)) for item in inputs)
        yield ShapeProfile(ranges, multiples)


def unbounded(profiles: Sequence[ShapeProfile]) -> tuple[ShapeProfile, ...]:
    """What is left of profiles for an engine that takes any size: the multiples that sizes must be of, if any."""
    return tuple({ShapeProfile((), item.multiples): None for item in profiles if item.multiples})


def refusal(request: BuildRequest, title: str) -> str | None:
    """Why an engine cannot be held to the shapes of this request; None when it can. title: the compiler's name."""
    if len(request.profiles) > MOST_PROFILES:
        return f"the buckets combine to more than {MOST_PROFILES} profiles, which {title} holds inputs to; use fewer"
    for spec in (*request.inputs, *request.outputs):
        if 0 in spec.shape:
            return f"{spec.name!r} has shape {spec.shape} and so no elements, which {title} does not take; leave it out"
    return None


def sum_refusal(request: BuildRequest, title: str) -> str | None:
    """Why a compiler that gives each open size a symbol of its own cannot take one that is a sum of others."""
    for spec, _, total in list_sums(request.inputs):
        return f"input {spec.name!r} is as long as {total}, and {title} takes open sizes apart; use onnxruntime"
    return None


def sizes(request: BuildRequest) -> dict[str, tuple[int, int]]:
    """Dim -> its least and greatest size over all profiles, for each named dim of the inputs that a profile has."""
    found: dict[str, tuple[int, int]] = {}
    for spec in request.inputs:
        ends = [(low, high) for item in request.profiles for name, low, _, high in item.inputs if name == spec.name]
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and ends:
                least, most = min(low[axis] for low, _ in ends), max(high[axis] for _, high in ends)
                before = found.get(dim, (least, most))
                found[dim] = min(least, before[0]), max(most, before[1])
    return found


def checked_inputs(check: "InputCheck", inputs: Tensors) -> "tuple[list[np.ndarray], dict[str, int]]":
    """The arrays in the order of the model's inputs, each C-contiguous, and the size of each named dim in them.

    check: the session's. Raises DataError for names, dtypes and shapes that the request does not have.
    """
    import numpy as np

    sizes = check(inputs).sizes
    # ascontiguousarray makes a vector of a scalar
    return [np.ascontiguousarray(inputs[spec.name]).reshape(inputs[spec.name].shape) for spec in check.specs], sizes


def checked_outputs(
    request: BuildRequest, results: "list[np.ndarray]", sizes: dict[str, int], title: str
) -> "dict[str, np.ndarray]":
    """The results by name. Raises EnginesmithError for one whose dtype, rank or size is not that of the request.

    A compiler that took two sizes for equal, or dropped a cast, gives such results.
    """
    found = {spec.name: array for spec, array in zip(request.outputs, results, strict=True)}
    for spec in request.outputs:
        array = found[spec.name]
        wanted = [sizes.get(dim) if isinstance(dim, str) else dim for dim in spec.shape]
        fits = array.ndim == len(wanted) and all(b in (None, a) for a, b in zip(array.shape, wanted, strict=True))
        if not fits or array.dtype.name != spec.dtype:
            raise EnginesmithError(
                f"{title} answers {spec.name!r} with {array.dtype.name} {array.shape}, which should be {spec.dtype} "
                f"{spec.shape} where {sizes}; its answers for this model cannot be used, take another backend"
            )
    return found
