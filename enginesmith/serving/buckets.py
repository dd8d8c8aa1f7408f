"""Buckets of engines: the sizes that each takes, the padding of requests in it, and the cost of a call.

A bucket is a profile of an engine, cut at the padding's edges of its dims. A dim that may be padded is raised to the
bucket's edge, or, without edges, to the smallest size that the profile takes; any other dim must have a size that the
profile takes unchanged.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.reports.latency import Interval, LatencyReport, Timed, is_shorter, order_by_evidence
from enginesmith.core.state import REPEAT, Padding, PadValue
from enginesmith.core.types import PLUS, Shape, ShapeProfile, Tensors, TensorSpec

_Places = tuple[slice, ...]


@dataclass(frozen=True)
class _Fill:
    """One step of padding an array. into: the places that are filled, with `value` or a copy of the places `source`."""

    into: _Places
    value: Array | None
    source: _Places | None


@dataclass(frozen=True)
class _PaddedArray:
    """The padding of an input to `shape`, with its own entries at `place`. zeros: the rest is 0; `fills` is empty."""

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

    elements, own_elements: of all inputs, padded and as given.
    inputs: the padding of each.  crops: output -> the part along each axis that stays.
    """

    inputs: tuple[_PaddedArray, ...]
    crops: Mapping[str, _Places]
    elements: int
    own_elements: int

    def pad(self, inputs: Tensors) -> Tensors:
        """The inputs at the padded sizes. Arrays that need no padding are returned without a copy."""
        if not self.inputs:
            return inputs
        padded_inputs = dict(inputs)
        for array in self.inputs:
            padded_inputs[array.name] = array.pad(padded_inputs[array.name])
        return padded_inputs

    def crop(self, outputs: Tensors) -> dict[str, Array]:
        """The outputs at the request's own sizes: views of the arrays in `outputs`."""
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
    """The plan that pads requests from `sizes` to the sizes `padded`. Raises KeyError for a dim without a rule.

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


# The maximum of a dim without limits.
UNBOUNDED = 1 << 62
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class RoutedEngine:
    """An engine that a router sends requests to. run: runs it once on all of its inputs, by name.

    profiles: sizes that it takes; empty: every size.  seconds: the measured 95 % interval of a call's time at some
    sizes; None if it was not measured.
    """

    name: str
    run: Callable[[Tensors], Tensors]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec] = ()
    profiles: Sequence[ShapeProfile] = ()
    seconds: Callable[[Sizes], Interval] | None = None


@dataclass(frozen=True)
class DimBounds:
    """Sizes of a dim in a bucket: least to most in steps of `multiple`. padded: whether a request's size may be raised,
    to the edge if there is one."""

    least: int
    most: int
    multiple: int = 1
    padded: bool = False
    edge: int | None = None

    def fit(self, size: int) -> int | None:
        """The size that a request's size becomes; None if the bucket does not take it."""
        if not self.padded or size < 1:
            return size if self.least <= size <= self.most and size % self.multiple == 0 else None
        padded_size = self.edge or -(-max(self.least, size) // self.multiple) * self.multiple
        return padded_size if size <= padded_size <= self.most else None


@dataclass(frozen=True)
class EngineBucket:
    """A bucket of an engine. rank: of the engine among those of the router.  name: of the bucket, with its dims."""

    engine: RoutedEngine
    rank: int
    bounds: Mapping[str, DimBounds]
    name: str

    def fit(self, sizes: Sizes) -> dict[str, int] | None:
        """The sizes that a request's dims become in this bucket; None if it does not take them."""
        bucket_sizes: dict[str, int] = {}
        for dim, size in sizes.items():
            bounds = self.bounds.get(dim)
            if (padded_size := size if bounds is None else bounds.fit(size)) is None:
                return None
            bucket_sizes[dim] = padded_size
        return bucket_sizes


@dataclass(frozen=True)
class Route:
    """The bucket of requests with some sizes. bucket: its number.  padded: the sizes of their dims in it.

    plan: how inputs are padded and outputs cropped.  run: the engine's.
    """

    bucket: int
    padded: Mapping[str, int]
    plan: PadPlan
    run: Callable[[Tensors], Tensors]

    def answer(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of a request, at its own sizes."""
        if not self.plan.inputs:
            return dict(self.run(inputs))
        return self.plan.crop(self.run(self.plan.pad(inputs)))


def list_buckets(engines: Sequence[RoutedEngine], padding: Padding) -> tuple[EngineBucket, ...]:
    """The buckets of engines, in the engines' order."""
    buckets = []
    for rank, engine in enumerate(engines):
        for bounds in _bounds_of(engine):
            pieces_by_dim = [list(_cut(dim, span, padding)) for dim, span in bounds.items()]
            for dim_pieces in itertools.product(*pieces_by_dim):
                ranges = dict(zip(bounds, dim_pieces, strict=True))
                dim_text = ", ".join(f"{dim} {_words(span)}" for dim, span in ranges.items())
                buckets.append(
                    EngineBucket(engine, rank, ranges, f"{engine.name}: {dim_text}" if dim_text else engine.name)
                )
    return tuple(buckets)


def _bounds_of(engine: RoutedEngine) -> Iterator[dict[str, DimBounds]]:
    """For each profile, the bounds of each named dim of the inputs; without profiles one entry without limits."""
    dim_names = {dim for spec in engine.inputs for dim in spec.shape if isinstance(dim, str) and PLUS not in dim}
    if not engine.profiles:
        yield {dim: DimBounds(0, UNBOUNDED) for dim in sorted(dim_names)}
    shapes = {spec.name: spec.shape for spec in engine.inputs}
    for profile in engine.profiles:
        multiples, dim_bounds = dict(profile.multiples), dict[str, DimBounds]()
        for name, low, _, high in profile.inputs:
            dim_multiples = multiples.get(name, (1,) * len(low))
            for dim, min_size, max_size, multiple in zip(shapes.get(name, ()), low, high, dim_multiples, strict=False):
                if dim in dim_names:
                    dim_bounds[str(dim)] = DimBounds(min_size, max_size, multiple)
        yield dim_bounds


def _cut(dim: str, bounds: DimBounds, padding: Padding) -> Iterator[DimBounds]:
    """The bounds of a dim between the edges of the padding, and beyond the last one; unchanged without edges."""
    if dim not in padding.dims:
        yield bounds
        return
    edges = [edge for edge in padding.edges.get(dim, ()) if bounds.least <= edge <= bounds.most]
    yield from (replace(bounds, padded=True, edge=edge) for edge in edges if edge % bounds.multiple == 0)
    if not edges or edges[-1] < bounds.most:
        yield replace(bounds, padded=True, least=max([bounds.least, *(edge + 1 for edge in edges)]))


def _words(bounds: DimBounds) -> str:
    if bounds.edge is not None:
        return f"<= {bounds.edge}"
    return "any" if bounds.most == UNBOUNDED else f"{bounds.least}..{bounds.most}"


def cheapest(buckets: Sequence[EngineBucket], sizes: Sizes) -> tuple[int, dict[str, int]] | None:
    """Number of the cheapest bucket that takes a request, and its sizes in it; None if none does.

    Among an engine's buckets, the one with the fewest elements in the padded inputs. Among engines, the first one for
    which no other is measurably faster at the request's padded sizes (`core.reports.latency`).
    """
    best_fits = dict[int, _Held]()
    for index, bucket in enumerate(buckets):
        if (padded_sizes := bucket.fit(sizes)) is None:
            continue
        elements = sum(math.prod(spec.at(padded_sizes)) for spec in bucket.engine.inputs)
        if bucket.rank not in best_fits or elements < best_fits[bucket.rank].elements:
            seconds = bucket.engine.seconds(padded_sizes) if bucket.engine.seconds else None
            best_fits[bucket.rank] = _Held(index, padded_sizes, elements, seconds)
    ranked_fits = order_by_evidence(
        [best_fits[rank] for rank in sorted(best_fits)], lambda fit, rival: is_shorter(fit.seconds, rival.seconds)
    )
    return (ranked_fits[0].number, ranked_fits[0].fitted) if ranked_fits else None


@dataclass(frozen=True)
class _Held:
    """A bucket that takes a request. number: of the bucket.  fitted: the sizes of the request's dims in it."""

    number: int
    fitted: dict[str, int]
    elements: int
    seconds: Interval | None


def make_route(buckets: Sequence[EngineBucket], sizes: Sizes, padding: Padding) -> Route | None:
    """The route of requests with some sizes: the cheapest bucket that takes them; None if none does."""
    if (cheapest_fit := cheapest(buckets, sizes)) is None:
        return None
    bucket_index, padded_sizes = cheapest_fit
    engine = buckets[bucket_index].engine
    plan = plan_padding(engine.inputs, engine.outputs, padding, sizes, padded_sizes)
    return Route(bucket_index, padded_sizes, plan, engine.run)


def converting(
    run: Callable[[Tensors], Tensors],
    own_specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    common: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
) -> Callable[[Tensors], Tensors]:
    """A call of an engine (`run`, with `own_specs` inputs and outputs) on tensors in the dtypes of `common`: floats are
    converted both ways. `run` itself if all dtypes are the same."""
    input_dtypes, output_dtypes = ({spec.name: spec.dtype for spec in specs} for specs in (own_specs[0], common[1]))
    in_casts = {
        spec.name: input_dtypes[spec.name] for spec in common[0] if _differ(spec.dtype, input_dtypes.get(spec.name, ""))
    }
    out_casts = {
        spec.name: output_dtypes[spec.name]
        for spec in own_specs[1]
        if _differ(spec.dtype, output_dtypes.get(spec.name, ""))
    }
    if not in_casts and not out_casts:
        return run

    def convert(inputs: Tensors) -> Tensors:
        answer = run({**inputs, **{name: inputs[name].astype(dtype) for name, dtype in in_casts.items()}})
        return {**answer, **{name: answer[name].astype(dtype) for name, dtype in out_casts.items() if name in answer}}

    return convert


def _differ(one: str, other: str) -> bool:
    # TensorSpec has numpy's names, and 'bfloat16', which numpy lacks and no session takes.
    return one != other and one.startswith("float") and other.startswith("float")


def measured_seconds(
    report: LatencyReport, inputs: Sequence[TensorSpec], timed: Timed
) -> Callable[[Sizes], Interval] | None:
    """A function from sizes to the 95 % interval of a call's time, from the medians of a latency report: linear in the
    elements of the inputs between timed sizes, constant below the smallest, proportional above the largest. None if a
    bucket of the report has no interval. timed: see `timed_alike`."""
    intervals: dict[int, Interval] = {}
    for bucket in report.buckets:
        try:
            elements = sum(math.prod(spec.at(bucket.sizes)) for spec in inputs)
        except KeyError:
            continue  # the report is of a model with other dims
        if (interval := bucket.interval(timed)) is None:
            return None
        intervals[elements] = interval
    if not intervals:
        return None
    counts = sorted(intervals)
    lows, highs = ([intervals[count][bound] for count in counts] for bound in (0, 1))

    def seconds(sizes: Sizes) -> Interval:
        elements = sum(math.prod(spec.at(sizes)) for spec in inputs)
        scale = max(1.0, elements / counts[-1])
        return float(np.interp(elements, counts, lows)) * scale, float(np.interp(elements, counts, highs)) * scale

    return seconds
