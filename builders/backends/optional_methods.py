"""What a backend offers beyond the protocol's required methods: packages, shape profiles, optional calls; and what
backends share: checks of options and requests, and a session of engines that are functions."""

import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError as PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.types import (
    Backend,
    BuildRequest,
    Dim,
    Engine,
    QuantizationScheme,
    Session,
    Shape,
    ShapeProfile,
    Target,
    Tensors,
    TensorSpec,
    list_sums,
)

if TYPE_CHECKING:
    import numpy as np

    from enginesmith.arrays import InputCheck

# Versions of installed distributions; a module of its own, since steps that load no backend record versions too.


def version(name: str) -> str:
    """The installed version of a distribution. Raises PackageNotFoundError."""
    if version_text := versions_of(name).get(name):
        return version_text
    raise PackageNotFoundError(name)


def versions_of(*names: str, together: bool = False) -> dict[str, str]:
    """Name -> version of those distributions of `names` that are installed; with `together` none unless all are.

    A version is read anew only when something was installed or removed, which changes the folder that holds it: reading
    one parses its whole METADATA, a fraction of a millisecond, and planning a catalog asks tens of thousands of times.
    """
    path = tuple(sys.path)
    changed_ns = tuple(_changed_ns(folder or os.curdir) for folder in path)
    versions = {name: package_version for name in names if (package_version := _version(name, path, changed_ns))}
    return {} if together and len(versions) < len(names) else versions


@lru_cache(maxsize=512)
def _version(name: str, _path: tuple[str, ...], _changed_ns: tuple[int, ...]) -> str | None:
    try:
        return importlib.metadata.version(name)
    except PackageNotFoundError:
        return None


def _changed_ns(place: str) -> int:
    try:
        return os.stat(place).st_mtime_ns  # noqa: PTH116 - a path object for each would cost more than the rest
    except OSError:
        return 0


# Methods that only some backends have: opening parts of an engine, new weights, times of nodes, timing caches.
#
# `Backend.capabilities` says which of these protocols a backend has. Standard library only.

# A tensor as it was seen: numpy's name of its type, and its shape.
TensorType = tuple[str, Shape]
_TYPES = {"float": "float32", "double": "float64"}  # ONNX's names that differ from numpy's
GIVEN = "timing.cache"
GROWN = "timing.grown"


class PartOpening(Protocol):
    """A backend whose engines are ONNX graphs (`Capabilities.opens_parts`)."""

    def open_part(self, path: Path, *, as_written: bool = False) -> AbstractContextManager[Session]:
        """A session of the ONNX file `path`, with the options and threads of this backend's engines.

        as_written: run the graph without optimization. Raises ModelError when the file cannot be read.
        """


def opening_parts(backend: Backend) -> PartOpening | None:
    """The backend where it opens parts of its engines, else None."""
    return cast("PartOpening", backend) if backend.capabilities.opens_parts else None


class Refitting(Protocol):
    """A backend that gives an engine other weights without a build (`Capabilities.refits`).

    The caller makes sure that the models differ in their weights alone (`builders.onnx_graphs.structure`). An engine
    that leaves its weights out (`requirements.Weights`) is opened with the ONNX model that has them (`Engine.weights`).
    """

    def refits(self, request: BuildRequest) -> str | None:
        """Why an engine of this request takes no other weights; None when it does. Imports no compiler."""

    def refit_needs_gpu(self) -> bool:
        """Whether `refit` loads the engine, and so needs a GPU that runs it."""

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        """The engine of `request` under `workdir`: the kernels of `engine` with the weights of `model`.

        Raises EnginesmithError when the compiler does not take them.
        """


def get_refitting(backend: Backend) -> Refitting | None:
    """The backend where it gives engines other weights, else None."""
    return cast("Refitting", backend) if backend.capabilities.refits else None


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that the runtime executes, after its own fusions.

    seconds: mean over the runs, without what the profiler adds to it where that is known.
    inputs, outputs: types and shapes in the run, of weights too; empty where the runtime tells only the time.
    """

    name: str
    op_type: str
    seconds: float
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()


@dataclass(frozen=True)
class RunProfile:
    """The nodes in the order of their execution.

    runs: number of runs that the times are means of.  seconds: of a whole run, with the time that the profiler takes.
    """

    nodes: Sequence[NodeTime]
    runs: int
    seconds: float


class Profiling(Protocol):
    """A backend that can time the nodes of its engines (`Capabilities.times_nodes`)."""

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:
        """The times of the engine's nodes over `runs` runs.

        inputs: of each run, by name.  workdir: an empty folder.
        Raises as `Backend.open` and `Session.run` do.
        """


def get_profiling(backend: Backend) -> Profiling | None:
    """The backend where it times nodes, else None."""
    return cast("Profiling", backend) if backend.capabilities.times_nodes else None


class SchemesByTarget(Protocol):
    """A backend whose quantized graphs depend on the target (`Capabilities.schemes_by_target`)."""

    def scheme_for(self, target: Target) -> QuantizationScheme:
        """The form of quantized graph that it compiles best for a target. Imports no compiler."""


def get_scheme(backend: Backend, target: Target) -> QuantizationScheme:
    """What `SchemesByTarget.scheme_for` gives; of a backend that has no such method, `Backend.scheme`."""
    if backend.capabilities.schemes_by_target:
        return cast("SchemesByTarget", backend).scheme_for(target)
    return backend.scheme()


def element_name(element_type: int) -> str:
    """numpy's name of an ONNX element type, or ONNX's own in small letters where numpy has none."""
    from onnx import TensorProto

    return type_name(str(TensorProto.DataType.Name(element_type)).lower())


def type_name(name: str) -> str:
    """numpy's name for ONNX's name of an element type, which is in small letters; that itself where numpy has none."""
    return _TYPES.get(name, name)


class TimingCached(Protocol):
    """A backend whose tuner takes what it measured in earlier builds (`Capabilities.timing_cache`).

    The caller of `build` puts a cache at WORKDIR/`GIVEN` and finds the grown one at WORKDIR/`GROWN`. A cache makes
    builds quicker or engines faster, and neither reproducible: it is no part of a build key.
    """

    def timing_place(self) -> tuple[str, str] | None:
        """The product (GPU or CPU) and the compiler's version that a cache from here is good for; None where nothing is
        tuned."""

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """One cache with what both know. Raises EnginesmithError when they do not go together."""


def timing_cached(backend: Backend) -> TimingCached | None:
    """The backend where it takes a timing cache, else None."""
    return cast("TimingCached", backend) if backend.capabilities.timing_cache else None


# Optimization profiles: making them of the buckets of the dims, and holding an engine's inputs and outputs to them.

# A plan gives a CPU engine no more profiles than this and one; a backend that holds inputs to them needs them all.
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
    """What is left of profiles for an engine that takes any size: the multiples that sizes must be of, if any."""
    return tuple({ShapeProfile((), profile.multiples): None for profile in profiles if profile.multiples})


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
    dim_ranges: dict[str, tuple[int, int]] = {}
    for spec in request.inputs:
        ranges = [entry for profile in request.profiles for entry in profile.inputs if entry[0] == spec.name]
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and ranges:
                min_size, max_size = min(low[axis] for _, low, _, _ in ranges), max(high[axis] for *_, high in ranges)
                bounds = dim_ranges.get(dim, (min_size, max_size))
                dim_ranges[dim] = min(min_size, bounds[0]), max(max_size, bounds[1])
    return dim_ranges


# What backends share: checks of options, and sessions of compilers whose engines are functions of arrays.


def check_choice(backend: Backend, option: str, choices: Collection[str]) -> None:
    """Raise InputError where an option has another value than these."""
    if (value := getattr(backend, option)) not in choices:
        raise InputError(f"backends.{backend.name}.{option}: {value!r} is not one of {', '.join(map(repr, choices))}")


def check_not_negative(backend: Backend, option: str, zero: str = "means no limit") -> None:
    """Raise InputError where a number is below 0. zero: what 0 does, for the error."""
    if (value := getattr(backend, option)) < 0:
        raise InputError(f"backends.{backend.name}.{option}: {value} is negative; 0 {zero}")


class FunctionSession(Session):
    """An engine as a function of arrays in the order of the request's inputs, which gives those of its outputs.

    title: the compiler's name, for errors.
    """

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
        """Let go of the function; `run` refuses from now on."""
        self._function = None

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """Run once. Raises DataError for arrays that fit no profile, and EnginesmithError when the function fails, when
        it gives other arrays than the request's outputs, and after `close`."""
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
    # ascontiguousarray makes a vector of a scalar
    return [np.ascontiguousarray(inputs[spec.name]).reshape(inputs[spec.name].shape) for spec in check.specs], sizes


def checked_outputs(
    request: BuildRequest, results: "list[np.ndarray]", sizes: dict[str, int], title: str
) -> "dict[str, np.ndarray]":
    """The results by name. Raises EnginesmithError for one whose dtype, rank or size is not that of the request.

    A compiler that took two sizes for equal, or dropped a cast, gives such results.

    title: the compiler's name, for the error.
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
                f"{title} answers {spec.name!r} with {array.dtype.name} {array.shape}, which should be {spec.dtype} "
                f"{spec.shape} where {sizes}; its answers for this model cannot be used, take another backend"
            )
    return arrays
