"""Checks of calls beyond the golden set: other sizes, changed values, repeated calls, padding."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from enginesmith.arrays import Array, find_profile
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import CUT_SHORT, PADDING, Check, describe, unmeasured
from enginesmith.core.state import Padding
from enginesmith.core.types import QUANTIZED, BuildRequest, Dim, Session, Tensors, TensorSpec
from enginesmith.serving.buckets import plan_padding
from validation.calls.repeated import RepeatedCalls, describe_odds, pool_of
from validation.comparison.sessions import golden_drifts, limited_checks, run
from validation.data.batches import leading_dim
from validation.data.samples import sizes_of
from validation.fuzz.cases import (
    FACTORS,
    LEAST_LENGTHS,
    MIXED,
    MOVED,
    NOT_FINITE,
    REAL,
    FuzzCase,
    Groups,
    Values,
    draw_lengths,
    find_masks,
    make,
    make_mixture,
)
from validation.fuzz.run import FINITE, FuzzOutcome, FuzzSides, judge_case, run_both, try_case
from validation.golden.golden_set import Case, GoldenSet, edge_sizes
from validation.limits.budget import StagedLimits

# Every engine is proven with further calls (tries) beside its golden set. Their number is fixed if they are cheap. If
# they are expensive, their time is limited to a share of the comparison with the graph: in this process's CPU time,
# which depends little on other load, or in time for an engine on a GPU. CPU time covers all threads: an engine whose
# threads spin on many cores reaches a limit sooner, but threads also spin in the comparison that sets the limit. The
# number of tries is doubled or not, to be independent of small differences of time. The order of tries never changes.
#
# Sizes are drawn once per seed. First a Latin hypercube, in which each size of each dim occurs before any is frequent
# (McKay, Beckman and Conover, "A Comparison of Three Methods for Selecting Values of Input Variables", 1979); then the
# rest of a small grid, or random points of a large one.

# The number of tries is doubled if they then take at most STEP times the allowed seconds. No try begins that would end
# after CEILING times these seconds (on a busy machine, or with an engine that waits); the report then says so.
STEP, CEILING = math.sqrt(2), 30.0
# The share of a spec's seconds for sizes; calls have the rest.
SIZES_SHARE = 0.5
# The most samples of mixtures, and of a batch of mixtures: at most 232 are new in batches of 16, and a fault in 1 of 50
# inputs is then missed in 1 of 109 proofs (0.98^232). One of FAR_OF batches is beyond the golden data.
MOST_MIXTURES, MOST_AT_ONCE, FAR_OF = 256, 16, 5
# Screening (`Screen`): a case with an output of more than MOST_SCREENED elements is always judged, which takes no
# longer. Any other case is judged if an error exceeds the greatest of the judged cases by a factor: half of the
# decibels by which these kept their limits, at most MOST_FACTOR, because a slice's variation has a limit too. Slices of
# fewer than LEAST_SLICE elements are not screened: their error varies as much by chance.
MOST_SCREENED, MOST_FACTOR, LEAST_SLICE = 1 << 16, 10.0, 16
# For a fault in one of so many inputs, the note has the probability that no such input was tried.
INPUT_SHARES = (50, 1000)
# Grids of up to this many sizes are enumerated; from a larger grid about as many points are drawn.
MOST_ENUMERATED = 1 << 12
# The most wrong sizes in a check's note.
MOST_NAMED = 4
# The remedy in a failure's note, and the kinds of values in words; other kinds are 'golden data' with the kind's name.
REMEDY = "`enginesmith debug attribute` names the node: leave it in fp32 (quantization.overrides) or change the backend"
WORDS: Mapping[Values, str] = {
    "lengths": "masks of other lengths", "blank": "a sample of zeros", "flat": "a sample of one value",
    "repeated": "one sample in all rows", "nan": "samples beside one of NaN",
    "infinite": "samples beside one of infinities", "mixed": "mixtures of golden samples",
    "stretched": "samples beyond the golden data",
}  # fmt: skip
# The seed of the values: the default of `enginesmith debug fuzz`, which then repeats a case.
VALUES_SEED = 0

# Shapes: the inputs and dims of a model. Slices: an output and one of its axes, or the peak.
Shapes = tuple[Sequence[TensorSpec], Sequence[Dim]]
Slices = tuple[str, str | int]


class Counts(NamedTuple):
    """The number of tries of one kind: at least `least`; up to `most` if these take at most `seconds`; or as many as
    take `share` of the time of the comparison with the graph."""

    least: int
    most: float
    seconds: float
    share: float


SIZES, CALLS, MIXTURES = Counts(1, 256, 0.2, 0.05), Counts(16, 640, 0.15, 0.05), Counts(3, math.inf, 0.3, 0.25)


@dataclass(frozen=True)
class Allowance:
    """The time for tries. asked_s: a spec's seconds for sizes and calls together; None: as in `Counts`.
    compared_s: duration of the comparison, in seconds of `clock`.  wall: the time, in seconds."""

    asked_s: float | None = None
    compared_s: float = 0.0
    clock: Callable[[], float] = time.process_time
    wall: Callable[[], float] = time.perf_counter


class Tries:
    """Decides whether another try is made; time counts from now. wall_s: seconds that replace the counts; None: the
    counts, and CEILING times their seconds.  done: number of earlier tries, which count but cost no time.  is_cut:
    whether the seconds ended tries that the counts allow."""

    def __init__(self, counts: Counts, allowance: Allowance, wall_s: float | None = None, done: int = 0) -> None:
        self._allowance, self._start_s, self._wall_start_s = allowance, allowance.clock(), allowance.wall()
        self._bounds = (counts.most, counts.seconds), (math.inf, counts.share * allowance.compared_s)
        self._least = max(counts.least, done + 1)
        self._goal = self._least if wall_s is None else math.inf
        self.wall_s = CEILING * max(seconds for _, seconds in self._bounds) if wall_s is None else wall_s
        self._done_before, self._mark, self.is_cut = done, (done, self._start_s), False

    def more(self, done: int) -> bool:
        """Whether to make another try after `done` tries: not if it would end too late, by the mean duration so far."""
        if done < self._least:
            return True
        if done >= self._goal:
            now_s, (last_done, last_s) = self._allowance.clock(), self._mark
            each_s, self._mark = (now_s - last_s) / (done - last_done), (done, now_s)  # first tries take longer
            goals = ((min(2 * done, most), self._start_s - now_s + STEP * seconds) for most, seconds in self._bounds)
            self._goal = max((goal for goal, rest_s in goals if (goal - done) * each_s < rest_s), default=done)
        done_since = done - self._done_before
        is_late = (self._allowance.wall() - self._wall_start_s) * (done_since + 1) / done_since > self.wall_s
        self.is_cut = done < self._goal < math.inf and is_late
        return done < self._goal and not is_late


def _cut_checks(tries: Tries, case: str, done: int) -> Iterator[Check]:
    """A check with the note that the time ended tries early; none if it did not. case: name of the tries."""
    if tries.is_cut:
        note = f"no other was begun: it would have ended after more than {tries.wall_s:.2g} s"
        yield Check("engine", CUT_SHORT, "", case, float(done), None, True, note)


def inner_sizes(
    dims: Sequence[Dim], tried_sizes: Iterable[tuple[tuple[str, int], ...]], seed: int
) -> Iterator[dict[str, int]]:
    """Sizes within the dims except `tried_sizes`, each once, in an order that the seed determines.

    All such sizes, if the dims have at most MOST_ENUMERATED combinations.
    """
    generator = np.random.default_rng(seed)
    visited_points = {tuple(size for _, size in sizes) for sizes in tried_sizes}
    for block in _places([len(dim.sizes) for dim in dims], generator) if dims else ():
        for row in block.tolist():
            point = tuple(dim.sizes[size_index] for dim, size_index in zip(dims, row, strict=True))
            if point not in visited_points:
                visited_points.add(point)
                yield {dim.name: size for dim, size in zip(dims, point, strict=True)}


def magnitude_checks(pair: FuzzSides, shapes: Shapes, golden: GoldenSet, allowance: Allowance) -> Iterator[Check]:
    """One check over real values that are scaled, negated, permuted, repeated or mixed, over masks of other lengths,
    and over a sample of one value, NaN or infinities beside real samples. No check if no output could be judged.
    """
    specs, groups = shapes[0], Groups(golden)
    sizes, masks = sizes_of(groups[0], specs), find_masks(groups)
    is_movable = any(array.dtype.kind == "f" and array.ndim > 1 for array in groups[0].values())
    is_batch = sizes.get(leading_dim(specs) or "", 1) > 1
    draw_counts: dict[Values, int] = {
        **{values: is_movable for values in MOVED if values not in MIXED},
        **dict.fromkeys(("blank", "flat"), is_movable and is_batch),
        "lengths": max(2, -(-LEAST_LENGTHS // len(groups[0][min(masks)]))) if masks else 0,
        "repeated": is_batch,
        **dict.fromkeys(NOT_FINITE, is_movable and is_batch),
    }
    real_pair, outcomes = replace(pair, limits=pair.other_sizes or pair.limits), list[FuzzOutcome]()
    draws = [(values, draw) for values, count in draw_counts.items() for draw in range(count)]
    for values, draw in draws:  # may grow: if a graph answers one mask of a draw with NaN, each is tried alone
        case = FuzzCase(tuple(sizes.items()), values, draw=draw)
        inputs = make(case, specs, groups if values == "lengths" else [groups[0]], VALUES_SEED, pair.precision)
        outcomes.append(try_case(case, inputs, real_pair if values in (*REAL, *NOT_FINITE) else pair))
        if (values, outcomes[-1].verdict) == ("lengths", "not judged") and ("lengths", LEAST_LENGTHS) not in draws:
            draws += [("lengths", LEAST_LENGTHS + number) for number in range(LEAST_LENGTHS)]
    tries = Tries(MIXTURES, allowance)
    mixed_outcomes, new_counts = _try_mixtures(real_pair, shapes, groups, tries)
    outcomes += mixed_outcomes
    failures = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    if not (judged_values := dict.fromkeys(_name_judged(outcomes))):
        return
    note = f"golden data {', '.join(judged_values)}".replace("times_", "times ")
    if count := new_counts["mixed"]:
        note += f"; {count} mixed samples: {describe_odds(count, INPUT_SHARES, 'inputs')}"
    if count := new_counts["stretched"]:
        note += f"; {count} samples beyond the golden data"
    for check in (check for outcome in outcomes for check in outcome.checks if check.name == FINITE and check.value):
        note += f"; {check.case}: {check.value:g} elements of {check.output} are finite in graph or engine alone, "
        note += "which is not judged: a maximum may drop a NaN"
    kept_draws = [one.case.draw for one in outcomes if (one.case.values, one.verdict) == ("lengths", "ok")]
    for name, rows in masks.items():
        lengths = {length for draw in kept_draws for length in draw_lengths(groups[0][name].shape, draw, rows.spare)}
        reach_text = ", ".join(map(str, sorted(lengths))) or "no other number of"
        noun = "tokens" if not rows.spare else "ones" if rows.real else "zeros"
        note += f"; {reach_text} {noun} in a row of {name} ({rows.low} to {rows.high} in golden data)"
    if pair.precision in QUANTIZED:
        note += "; beyond what was calibrated the graph itself saturates: it is what the engine is compared with"
    if failures:
        values = failures[0].case.values
        what = WORDS.get(values, f"golden data {values.replace('_', ' ')}")
        note = f"wrong for {what}: {failures[0].reason}; {_describe_reach(outcomes, groups[0], pair)}{REMEDY}; {note}"
    name = str(failures[0].case) if failures else "magnitudes"
    yield Check("engine", "magnitudes", "", name, float(len(failures)), 0.0, not failures, note)
    yield from _cut_checks(tries, "mixed samples", new_counts.total())


def _name_judged(outcomes: Iterable[FuzzOutcome]) -> Iterator[str]:
    """The kinds of values with a judged output. Mixtures without checks were screened."""
    for outcome in outcomes:
        case, is_compared = outcome.case, any(check.name != FINITE for check in outcome.checks)
        if outcome.verdict == "failed" or (outcome.verdict == "ok" and (is_compared or case.values in MIXED)):
            yield case.values


def _try_mixtures(
    pair: FuzzSides, shapes: Shapes, groups: Sequence[Tensors], tries: Tries
) -> tuple[list[FuzzOutcome], Counter[Values]]:
    """The outcomes of batches of mixtures up to the first failure, and the number of new compared samples by kind."""
    (specs, dims), batch, sizes = shapes, leading_dim(shapes[0]), sizes_of(groups[0], shapes[0])
    small_sizes = [size for dim in dims if dim.name == batch for size in dim.sizes if size <= MOST_AT_ONCE]
    sizes |= {batch: max(small_sizes)} if batch and small_sizes else {}
    rows, screens, outcomes = sizes.get(batch or "", 1), {values: Screen(pair) for values in MIXED}, list[FuzzOutcome]()
    previous, draws, new_counts = dict[Values, Tensors](), Counter[Values](), Counter[Values]()
    for number in range(-(-MOST_MIXTURES // rows) * FAR_OF // (FAR_OF - 1)):
        if not tries.more(number) or (outcomes and outcomes[-1].verdict == "failed"):
            break
        values: Values = "stretched" if number % FAR_OF == MIXTURES.least - 1 else "mixed"
        case = FuzzCase(tuple(sizes.items()), values, draw=draws[values])
        draws[values] += 1
        inputs, *known_batches = make_mixture(case, specs, groups, VALUES_SEED, previous.get(values))
        known_batches += [previous[values]] if values in previous else []
        previous[values] = inputs
        if new_count := _count_new(inputs, known_batches, rows):
            outcomes.append(screens[values].try_case(case, inputs))
            new_counts[values] += new_count * (outcomes[-1].verdict in ("ok", "failed"))
    return outcomes, new_counts


@dataclass
class Screen:
    """Judges cases of one kind, except cases whose small errors show that they keep the limits: judging takes longer
    than running. factor, largest_errors: a case is not judged if its errors are at most `factor` times the largest
    errors of the judged cases that kept their limits."""

    pair: FuzzSides
    factor: float = MOST_FACTOR
    largest_errors: dict[Slices, Array] = field(default_factory=dict)

    def try_case(self, case: FuzzCase, inputs: Tensors) -> FuzzOutcome:
        """The outcome of running both sides on a case."""
        answers = run_both(case, inputs, self.pair)
        if isinstance(answers, FuzzOutcome):
            return answers
        errors = _measure_errors(*answers)
        aligned_errors = {key: _align(error, self.largest_errors.get(key)) for key, error in (errors or {}).items()}
        if errors is not None and all((error <= self.factor * most).all() for error, most in aligned_errors.values()):
            return FuzzOutcome(case, "ok")
        outcome = judge_case(case, inputs, answers, self.pair)
        if errors and not outcome.reason:
            self.factor = min([self.factor, *_list_factors(outcome.checks)])
            self.largest_errors |= {key: np.maximum(*arrays) for key, arrays in aligned_errors.items()}
        return outcome


def _align(errors: Array, largest_errors: Array | None) -> tuple[Array, Array]:
    """Both arrays; the maxima of both if the axis has another size; errors and -1 (less than any error) at first."""
    if largest_errors is None:
        return errors, np.full_like(errors, -1.0)
    if errors.shape == largest_errors.shape:
        return errors, largest_errors
    return np.asarray(errors.max(initial=0)), np.asarray(largest_errors.max(initial=0))


def _count_new(inputs: Tensors, known_batches: Iterable[Tensors], rows: int) -> int:
    """The number of rows of a batch that differ from the same row of each known batch."""
    is_new = [
        np.any([(array != known_batch[name]).reshape(rows, -1).any(axis=1) for name, array in inputs.items()], axis=0)
        for known_batch in known_batches
    ]
    return int(np.logical_and.reduce(is_new).sum())


def _measure_errors(expected: Tensors, actual: Tensors) -> dict[Slices, Array] | None:
    """The squared errors of the slices of a case and of the worst element, relative to their signal. None if the case
    must be judged: an output is large, differs in shape, kind or integers, or an error is not finite."""
    case_errors: dict[Slices, Array] = {}
    for name, value in expected.items():
        other = actual.get(name)
        is_alike = other is not None and (other.shape, other.dtype.kind) == (value.shape, value.dtype.kind)
        if other is None or not is_alike or value.size > MOST_SCREENED:
            return None
        if value.dtype.kind != "f":
            if not np.array_equal(value, other):
                return None
            continue
        with np.errstate(all="ignore"):
            squares = np.square(np.subtract(other, value, dtype=np.float64))
            errors = np.where(other == value, 0, squares)  # equal infinities are no error
            signals = np.square(np.where(np.isfinite(value), value, 0), dtype=np.float64)
            least_peak = np.maximum(signals.max(initial=0), np.finfo(np.float64).tiny)
            case_errors[name, "peak"] = errors.max(initial=0) / least_peak
            slice_counts = {-1: 1, **{axis: value.shape[axis] or 1 for axis in range(1, value.ndim)}}  # -1: one of all
            for axis, count in slice_counts.items():
                if value.size < LEAST_SLICE * count and axis >= 0:
                    continue
                axes = tuple({*range(value.ndim)} - {axis})
                sums = signals.sum(axis=axes)
                least_sum = 1e-6 * sums.mean() + np.finfo(np.float64).tiny  # below a thousandth of the mean is noise
                case_errors[name, axis] = errors.sum(axis=axes) / np.maximum(sums, least_sum)
    return case_errors if all(np.isfinite(errors).all() for errors in case_errors.values()) else None


def _list_factors(checks: Sequence[Check]) -> Iterator[float]:
    """For each check, half of the decibels by which it keeps its limit, as a factor of squared errors."""
    for check in checks:
        if check.limit is not None and check.value and not check.name.endswith("agreement"):
            is_amplitude = check.name.startswith("max_")
            yield check.limit / check.value if is_amplitude else 10 ** ((check.value - check.limit) / 20)


def _describe_reach(outcomes: Sequence[FuzzOutcome], inputs: Tensors, pair: FuzzSides) -> str:
    """A note if only scaled-up values failed: the greatest |x| without a failure, and a remedy for fp16; else ''."""
    factors = {values: FACTORS[values] for values in (outcome.case.values for outcome in outcomes) if values in FACTORS}
    failed_values = [outcome.case.values for outcome in outcomes if outcome.verdict == "failed"]
    failed_factors = [factors.get(values, 0.0) for values in failed_values if values != "stretched"]
    if min(failed_factors, default=0.0) <= 1:
        return ""
    largest_right = max([1.0, *(factor for factor in factors.values() if factor < min(failed_factors))])
    peak = max(float(np.abs(array).max()) for array in inputs.values() if array.dtype.kind == "f" and array.ndim > 1)
    remedy = (
        "fp16 ends at 65504, so leave what grows there in fp32 (quantization.overrides), or scale the inputs down; "
    )
    return f"right up to |x| = {largest_right * peak:.3g}; {remedy if pair.precision == 'fp16' else ''}"


def _places(lengths: Sequence[int], generator: np.random.Generator) -> Iterator[Array]:
    """Indices of sizes: first a Latin hypercube (longest dim, dims), with all indices of a dim in random order in its
    column; then the whole grid (sizes, dims) in random order, or MOST_ENUMERATED random points of a large grid."""
    row_count = min(max(lengths), MOST_ENUMERATED)
    columns = [
        [generator.choice(length, min(length, row_count), replace=False) for _ in range(-(-row_count // length))]
        for length in lengths
    ]
    yield np.stack([np.concatenate(rounds)[:row_count] for rounds in columns], axis=1)
    if (total := math.prod(lengths)) > MOST_ENUMERATED:
        yield np.stack([generator.integers(0, length, MOST_ENUMERATED) for length in lengths], axis=1)
    else:
        yield np.stack(np.unravel_index(generator.permutation(total), lengths), axis=1)


def _check(outcomes: Sequence[FuzzOutcome], dims: Sequence[Dim], of: int, seconds: float) -> Check:
    """The check that none of the tried sizes failed. of: number of possible sizes."""
    failures = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    clauses = [f"{len(outcomes)} of {of} sizes in {seconds:.2g} s"]
    if len(outcomes) < of and len(dims) > 1:
        for dim in dims:
            tried_sizes = {dict(outcome.case.sizes)[dim.name] for outcome in outcomes}
            clauses.append(f"{len(tried_sizes)} of {len(dim.sizes)} of {dim.name}")
    skipped_count = sum(outcome.verdict == "not judged" for outcome in outcomes)
    if skipped_count == len(outcomes):
        note = f"the graph itself runs at none of the {skipped_count} that were tried"
        return unmeasured("engine", "", "inner sizes", note)
    if skipped_count:
        clauses.append(f"{skipped_count} of them not judged: the graph itself does not run")
    note = ", ".join(clauses)
    if failures:
        points = (outcome.case.sizes for outcome in failures[:MOST_NAMED])
        sizes_text = ", ".join(" ".join(f"{name}={size}" for name, size in point) for point in points)
        note = f"wrong at {sizes_text}: {failures[0].reason}; {REMEDY}, or the spec's dims; {note}"
    case_name = str(failures[0].case) if failures else "inner sizes"
    return Check("engine", "sizes", "", case_name, float(len(failures)), 0.0, not failures, note)


def call_checks(
    pair: FuzzSides,
    shapes: Shapes,
    golden: GoldenSet,
    seed: int,
    allowance: Allowance,
    bits: Callable[[], bool],
    sizes: bool = True,
    shared: bool = False,
    others: Iterable[Check] = (),
) -> Iterator[Check]:
    """Checks of sizes that the golden set lacks, and of repeated calls, which start before all other checks.

    bits: returns whether equal inputs must have outputs of equal bits; called only if bits differ.  sizes: whether to
    try sizes.  shared: whether several threads may run the session at once. An error of the engine is a failed check.
    others: checks that are made after the first calls.
    """
    specs, dims = shapes
    groups = Groups(golden)
    pool = pool_of(pair.candidate, specs, dims, groups, pair.precision)
    repeats = RepeatedCalls(pair.candidate, pair.limits, bits, shared)
    repeats.start(pool)
    yield from others
    start_s, asked_s = allowance.wall(), allowance.asked_s
    if sizes and dims:
        judged_pair = replace(pair, usual=pair.usual or golden_drifts(golden), limits=pair.other_sizes or pair.limits)
        edge_points = {tuple(point.items()) for point in edge_sizes(specs, dims)}
        point_count = math.prod(len(dim.sizes) for dim in dims) - len(edge_points)
        tries = Tries(SIZES, allowance, asked_s and SIZES_SHARE * asked_s)
        screen, outcomes = Screen(judged_pair), list[FuzzOutcome]()
        for point in inner_sizes(dims, edge_points, seed):
            if not tries.more(len(outcomes)):
                break
            case = FuzzCase(tuple(point.items()))
            outcomes.append(screen.try_case(case, make(case, specs, groups, VALUES_SEED, pair.precision)))
        if outcomes:
            yield _check(outcomes, dims, point_count, allowance.wall() - start_s)
            yield from _cut_checks(tries, "sizes", len(outcomes))
    calls_start_s = allowance.wall()
    tries = Tries(CALLS, allowance, asked_s and start_s + asked_s - calls_start_s, repeats.calls)
    repeats.run(pool, seed, tries.more)
    yield from repeats.checks(pool, allowance.wall() - calls_start_s)
    yield from _cut_checks(tries, "repeated calls", repeats.calls)


# The most cases of each kind that are run unpadded, and padded as a router does.
MOST_CASES = 16


def padding_checks(
    session: Session, request: BuildRequest, padding: Padding, golden: GoldenSet, limits: StagedLimits
) -> list[Check]:
    """One check: the number of cases whose answers change by more than the limits on drift when they are padded.

    A case is padded to the next edge of every dim with a rule, or, without edges, to the next size. A case that no
    profile covers after padding is left out. The check fails if no case can be padded: the rules are then untested.
    """
    cases = [case for kind in ("golden", "edge") for case in islice(golden.of_kind(kind), MOST_CASES)]
    tried_count, faults = 0, list[str]()
    for case in cases:
        if (padded_sizes := next_sizes(request, padding, sizes_of(case.inputs, request.inputs))) is None:
            continue
        tried_count += 1
        if reason := _differs(session, request, padding, case, padded_sizes, limits):
            faults.append(reason)
    if not tried_count:
        note = "no golden or edge case can be padded within the profiles; add smaller samples, or remove pad"
        return [Check("engine", PADDING, "", "all", None, 0.0, False, note)]
    note = f"{faults[0]}; {len(faults)} of {tried_count} padded cases" if faults else f"{tried_count} padded cases"
    return [Check("engine", PADDING, "", "all", float(len(faults)), 0.0, not faults, note)]


def next_sizes(request: BuildRequest, padding: Padding, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The sizes to which a case of these sizes is padded; None if no profile covers larger sizes."""
    grown_sizes = dict(sizes)
    for dim in sorted(padding.dims & sizes.keys()):
        step = request.multiples.get(dim, 1)
        larger_sizes = (edge for edge in padding.edges.get(dim, (sizes[dim] + step,)) if edge > sizes[dim])
        raised_sizes = {**grown_sizes, dim: next(larger_sizes, sizes[dim])}
        if _is_held(request, raised_sizes):
            grown_sizes = raised_sizes
    return grown_sizes if grown_sizes != sizes else None


def _is_held(request: BuildRequest, sizes: Mapping[str, int]) -> bool:
    empty_inputs = {spec.name: np.broadcast_to(np.int8(0), spec.at(sizes)) for spec in request.inputs}
    try:
        find_profile(request.profiles, empty_inputs)
    except EnginesmithError:
        return not request.profiles
    return True


def _differs(
    session: Session,
    request: BuildRequest,
    padding: Padding,
    case: Case,
    padded_sizes: Mapping[str, int],
    limits: StagedLimits,
) -> str:
    """A text on answers of a case that differ by more than the limits; '' if they do not."""
    plan = plan_padding(request.inputs, request.outputs, padding, sizes_of(case.inputs, request.inputs), padded_sizes)
    name = f"{case.name} padded to {', '.join(f'{dim} {size}' for dim, size in padded_sizes.items())}"
    try:
        unpadded_outputs = run(session, case.inputs)
        answer = plan.crop(run(session, plan.pad(case.inputs)))
        for output, expected in unpadded_outputs.items():
            pair = expected, answer[output]
            checks = limits.judge(partial(limited_checks, "engine", (name, case.kind), output, pair))
            if failure := next((check for check in checks if not check.passed), None):
                return describe(failure)
    except (EnginesmithError, KeyError, ValueError) as error:
        return f"{name}: {error}"
    return ""
