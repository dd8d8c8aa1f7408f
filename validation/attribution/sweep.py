"""Ranks the segments of a candidate by their own error."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import Session, Tensors, TensorSpec
from validation.attribution.cuts import GraphSegment, exclude_joined, list_shared, segments, spread, windows
from validation.attribution.onnx_graph import (
    LOCAL,
    OnnxGraph,
    blame_lone,
    blame_slice,
    describe_drift,
    explain_blame,
    is_of_the_cut,
    measure_pair,
)
from validation.attribution.result import MORE_TIME, Attribution, Finding, SegmentRow, Taps, rank_segments
from validation.comparison.sessions import run
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.terms import Budget
from validation.metrics.drift import Drift, is_exact, measure
from validation.metrics.slices import FEWEST
from validation.metrics.tally import samples_of

# Measures each segment of a candidate twice: on the reference's activations, and within the whole candidate.

# The most segments that a further round cuts finer.
REFINED = 4
# A mask has at least the first magnitude in the reference, and the second in a candidate of a narrower type.
MASK, LEAST_MASK = 1e9, 1e4
# The weight of an element in a Softmax is 0 if it is so far below its row's greatest (at least MASKED_ROW).
WEIGHTLESS, MASKED_ROW = 100.0, -900.0
# The greatest size of an element in bytes.
_WIDEST = 8
_FLOATS = ("float16", "float32", "float64", "bfloat16")


@dataclass
class Apart:
    """Segments that run on given activations: all in one session; if that fails, each alone, to find the failing one.

    specs: the activations by name, with the candidate's dtypes.
    """

    candidate: OnnxGraph
    window: Sequence[GraphSegment]
    specs: Mapping[str, TensorSpec]
    sessions: dict[tuple[str, ...], Session] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def run(self, values: Tensors) -> dict[str, tuple[Array | None, str]]:
        """Each segment's tensor and '', or None and the error. values: inputs and activations of the model by name."""
        try:
            return {name: (value, "") for name, value in self._run(self.window, values).items()}
        except EnginesmithError as error:
            if len(self.window) == 1:
                return {self.window[0].target: (None, str(error))}
        target_outputs: dict[str, tuple[Array | None, str]] = {}
        for segment in self.window:
            try:
                target_outputs[segment.target] = self._run([segment], values)[segment.target], ""
            except EnginesmithError as error:
                target_outputs[segment.target] = None, str(error)
        return target_outputs

    def _run(self, window: Sequence[GraphSegment], values: Tensors) -> dict[str, Array]:
        names = tuple(segment.target for segment in window)
        if names not in self.sessions:
            boundary_names = {name for segment in window for name in segment.boundary}
            boundary_specs = {
                name: TensorSpec(name, spec.dtype, values[name].shape)
                for name, spec in self.specs.items()
                if name in boundary_names
            }
            self.sessions[names] = self.stack.enter_context(self.candidate.open_segment(names, boundary_specs))
        session = self.sessions[names]
        feeds = {spec.name: values[spec.name] for spec in session.inputs}
        casts = {name: feeds[name].astype(spec.dtype) for name, spec in self.specs.items() if name in feeds}
        results = run(session, {**feeds, **casts})
        return {name: results.get(f"{name}{LOCAL}", results.get(name)) for name in names}  # type: ignore[misc]


@dataclass(frozen=True)
class Size:
    """Limits of one sweep. cuts: added per round.  cases: golden cases.  window_bytes: of activations in memory."""

    cuts: int = 64
    cases: int = 4
    window_bytes: int = 256 << 20


USUAL = Size()


@dataclass(frozen=True)
class SweepCase:
    """A golden case to measure on. outputs: of the unchanged candidate; None if it fails to run."""

    case: Case
    outputs: Tensors | None


@dataclass
class Sweep:
    """Two models, the cases to measure on, and the results so far.

    kinds: the specs of a tensor in the reference and in the candidate.  drifts: local and inherited drift of a segment,
    by its target and boundary.  changed: drift of outputs that changed when inner tensors were read; `compared`: the
    number of outputs of all runs.  tensor_bytes, zeros: size, and zero point if quantized, by tensor.
    stop: returns whether the time is over.  complete: whether the last call of `rows` measured all its windows.
    budget: the limits for each single segment.  size: limits of one sweep.
    """

    reference: OnnxGraph
    candidate: OnnxGraph
    cases: Sequence[SweepCase]
    budget: Budget
    size: Size
    kinds: dict[str, tuple[TensorSpec, TensorSpec]] = field(default_factory=dict)
    drifts: "dict[tuple[str, tuple[str, ...]], tuple[_TensorDrift, _TensorDrift]]" = field(default_factory=dict)
    changed: dict[str, Drift] = field(default_factory=dict)
    compared: int = 0
    tensor_bytes: dict[str, int] = field(default_factory=dict)
    zeros: dict[str, float] = field(default_factory=dict)
    stop: Callable[[], bool] = lambda: False
    complete: bool = True

    def points(self) -> list[str]:
        """The tensors where both models can be cut, in order: float or quantized in both, and not inside a fusion."""
        shared_names = list_shared(self.reference.steps, self.candidate.steps)
        names = [name for name in shared_names if name not in self.reference.others]
        with (
            self.reference.open_tapped(names, whole=False) as reference,
            self.candidate.open_tapped(names, whole=False) as candidate,
        ):
            references, candidates = (
                {spec.name: spec for spec in session.outputs} for session in (reference, candidate)
            )
        self.kinds = {
            name: (references[name], candidates[name]) for name in names if name in references and name in candidates
        }
        self.zeros = {name: step.zero for step in self.reference.steps for name in step.makes if step.zero is not None}
        cut_names = [name for name in names if _can_cut(*self.kinds[name], name in self.zeros)]
        return exclude_joined(cut_names, self.candidate.steps) if self.candidate.fuses else cut_names

    def rows(self, cuts: set[str]) -> list[SegmentRow]:
        """A row for each cut. Only segments without a measurement run. Once the time is over, at most the first window
        is measured; later segments get no row."""
        order = [name for step in self.candidate.steps for name in step.makes if name in cuts]
        cut_segments = list(segments(self.candidate.steps, cuts, order))
        new_segments = [segment for segment in cut_segments if (segment.target, segment.boundary) not in self.drifts]
        if unsized_names := [name for name in order if name not in self.tensor_bytes]:
            inputs = (sweep_case.case.inputs for sweep_case in self.cases)
            largest_inputs = max(inputs, key=lambda arrays: sum(array.size for array in arrays.values()))
            shapes = self.reference.shapes(unsized_names, largest_inputs)
            self.tensor_bytes |= {name: _WIDEST * math.prod(shape) for name, shape in shapes.items()}
        for window in windows(new_segments, self.tensor_bytes, self.size.window_bytes):
            if self.drifts and self.stop():
                self.complete = False
                break
            self._measure(window, cuts)
        origins = {segment.target: segment for segment in segments(self.reference.steps, cuts, order)}
        measured_segments = [segment for segment in cut_segments if (segment.target, segment.boundary) in self.drifts]
        return [self._row(segment, origins[segment.target]) for segment in measured_segments]

    def finer(self, rows: Sequence[SegmentRow], points: Sequence[str], cuts: set[str]) -> set[str]:
        """Further cuts inside the worst segments; empty if no such segment can be cut."""
        ranked_rows = rank_segments(rows)
        inner_by_row: dict[str, list[str]] = {}
        for row in ranked_rows:
            node_names = set(row.computed_by)
            inner_tensors = {name for step in self.candidate.steps if step.name in node_names for name in step.makes}
            inner_by_row[row.tensor] = [name for name in points if name in inner_tensors and name not in cuts]
        blamed_targets = [row.tensor for row in ranked_rows if row.blamed and inner_by_row[row.tensor]]
        worst_targets = [row.tensor for row in ranked_rows[:REFINED] if inner_by_row[row.tensor]]
        targets = blamed_targets[:REFINED] or ([] if any(row.blamed for row in rows) else worst_targets)
        return {
            name for target in targets for name in spread(inner_by_row[target], max(1, self.size.cuts // len(targets)))
        }

    def taps(self) -> Taps:
        """Whether the outputs stayed equal, bit for bit, in the runs that returned inner tensors."""
        return Taps(self.compared, {name: describe_drift(drift) for name, drift in self.changed.items()})

    def _row(self, segment: GraphSegment, origin: GraphSegment) -> SegmentRow:
        """The row of a candidate's segment. origin: the reference's segment with the same target."""
        pair = self.drifts[segment.target, segment.boundary]
        local_error, inherited_error = (describe_drift(tally.drift, tally.note) for tally in pair)
        if not self.changed and is_of_the_cut(local_error, inherited_error):
            local_error = inherited_error
        return SegmentRow(
            tensor=segment.target,
            node=origin.main.name,
            op_type=origin.main.op_type,
            local=local_error,
            inherited=inherited_error,
            blamed=explain_blame(local_error, self.budget),
            nodes=origin.names,
            computed_by=tuple(step.name for step in segment.steps),
        )

    def _measure(self, window: Sequence[GraphSegment], cuts: set[str]) -> None:
        """Run one window: reference and candidate with the targets as outputs, then the candidate's segments apart."""
        targets = [segment.target for segment in window]
        inner_names = list(dict.fromkeys(name for segment in window for name in segment.boundary if name in cuts))
        boundary_specs = {name: self.kinds[name][1] for name in inner_names}
        drifts = {name: (_TensorDrift(), _TensorDrift()) for name in targets}
        with (
            self.reference.open_tapped(list(dict.fromkeys([*targets, *inner_names])), whole=False) as reference,
            self.candidate.open_tapped(targets, whole=True) as actual,
            Apart(self.candidate, window, boundary_specs) as segment_runner,
        ):
            for sweep_case in self.cases:
                inputs, note = sweep_case.case.inputs, ""
                expected_values = run(reference, {spec.name: inputs[spec.name] for spec in reference.inputs})
                try:
                    tapped_values = run(actual, inputs)
                except EnginesmithError as error:
                    tapped_values, note = {}, str(error)
                else:
                    self._compare_taps(sweep_case.outputs or {}, tapped_values)
                local_values = segment_runner.run({**inputs, **{name: expected_values[name] for name in inner_names}})
                for name, pair in drifts.items():
                    values = local_values[name], (tapped_values.get(name), note)
                    for tally, entry in zip(pair, values, strict=True):
                        tally.add(expected_values[name], *entry, self.zeros.get(name), name in self.reference.scores)
        self.drifts |= {(segment.target, segment.boundary): drifts[segment.target] for segment in window}

    def _compare_taps(self, untapped_values: Tensors, tapped_values: Tensors) -> None:
        for name, value in untapped_values.items():
            self.compared += 1
            if value.dtype != tapped_values[name].dtype or value.tobytes() != tapped_values[name].tobytes():
                drift = measure(value, tapped_values[name])
                self.changed[name] = self.changed.get(name, Drift()).merge(drift)


@dataclass
class _TensorDrift:
    """The drift of one tensor over all cases. note: why a case could not be measured."""

    drift: Drift | None = None
    note: str = ""

    def add(self, expected: Array, actual: Array | None, note: str, zero: float | None, is_score: bool) -> None:
        """Add a case. note: why there is no actual value, or ''.  zero: the zero point of a quantized tensor, which is
        subtracted from both.  is_score: whether only a Softmax reads the tensor (`_mask_infinite`)."""
        drift = None
        if not note:
            if zero is not None:
                expected = expected.astype(np.float32) - np.float32(zero)
                actual = None if actual is None else actual.astype(np.float32) - np.float32(zero)
            drift, note = measure_pair(*_mask_infinite(expected, actual, is_score))
        self.drift = self.drift.merge(drift) if self.drift and drift else self.drift or drift
        self.note = self.note or note


def _mask_infinite(expected: Array, actual: Array | None, is_score: bool) -> tuple[Array, Array | None]:
    """Both arrays with mask values replaced by equal infinities, which sums leave out: masks would hide other errors.

    A value is a mask if it is one in both arrays. is_score: whether only a Softmax reads the tensor; any value far
    below its row's greatest is then a mask, unless it is -inf on one side only, which can cause NaN.
    """
    if actual is None or not expected.ndim or not expected.size or is_exact(expected) or actual.shape != expected.shape:
        return expected, actual
    mask = (np.abs(expected) >= MASK) & (np.abs(actual) >= LEAST_MASK) & (np.sign(actual) == np.sign(expected))
    if is_score:
        bound = np.maximum(expected.max(axis=-1, keepdims=True), MASKED_ROW) - WEIGHTLESS
        mask |= (expected < bound) & (actual < bound) & (np.isinf(expected) == np.isinf(actual))
    if not mask.any():
        return expected, actual
    infinities = np.copysign(np.inf, expected)
    return np.where(mask, infinities, expected), np.where(mask, infinities, actual)


def _can_cut(left: TensorSpec, right: TensorSpec, is_quantized: bool) -> bool:
    """Whether two tensors of one name have matching dtypes and, as far as known, matching shapes: a rewrite may use the
    name for another tensor."""
    are_floats = left.dtype in _FLOATS and right.dtype in _FLOATS
    if not (are_floats or (is_quantized and left.dtype == right.dtype)):
        return False
    if not left.shape or not right.shape:
        return True  # a scalar, or an unknown rank
    pairs = zip(left.shape, right.shape, strict=False)
    is_fitting = all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in pairs)
    return len(left.shape) == len(right.shape) and is_fitting


# The node that drifts: the error of every segment on the reference's activations, beside its error in the candidate.
#
# Errors of a deep model grow and mix; the position of a wrong output says little about the cause. Each segment of the
# candidate gets the reference's values as inputs, which excludes errors of earlier segments. All segments are separate
# parts of one graph and run together: a sweep costs one more run of the candidate, not one per node. Long models are
# cut coarsely first, and then only in the worst segments (`Size.cuts` at a time). Windows of `Size.window_bytes` limit
# the memory for models of any size.
#
# A segment is blamed if its own error breaks the stage's limits for the whole model. If no segment breaks them but an
# output fails in a slice, the segment with the worst slice is blamed. If none is blamed although outputs fail, the
# errors add up, and the ranking shows the largest.

# The greatest number of rounds; each cuts finer than the one before.
MOST_ROUNDS = 8


def attribute(
    stage: str,
    precision: str,
    reference: OnnxGraph,
    candidate: OnnxGraph,
    golden: GoldenSet,
    budget: Budget,
    failures: Sequence[str] = (),
    size: Size = USUAL,
    tell: Callable[[str], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    answered: bool = False,
) -> Attribution:
    """The candidate's segments ranked by their own error. stage: 'quantization' or 'engine'.

    budget: the stage's limits, applied to each segment.  failures: the failed checks.  tell: receives progress lines.
    stop: returns whether the time is over; the result is then marked as incomplete.
    answered: whether the golden set's outputs are the reference's own.  size: limits of one sweep.
    Raises the reference's errors; if the candidate fails to run a segment, its row has the error.
    """
    tell("running both on the golden set")
    is_by_slice = any("slice_sqnr_db" in text for text in failures)
    cases = _worst_cases(reference, candidate, golden, size.cases, FEWEST if is_by_slice else 0, stop, answered)
    sweep = Sweep(reference, candidate, cases, budget, size, stop=stop)
    points = sweep.points()
    cuts = {*spread(points, size.cuts), *(name for name in candidate.outputs if name in sweep.kinds)}
    rows, cuts = _cut_finer(sweep, points, cuts, tell)
    if is_by_slice and not any(row.blamed for row in rows):
        rows = blame_slice(rows, budget)
    if failures and stage == "engine" and not any(row.blamed for row in rows):
        rows = blame_lone(rows)
    finding: Finding = "nothing-failed" if not failures else "blamed" if any(row.blamed for row in rows) else "spread"
    return Attribution(
        stage=stage,
        precision=precision,
        finding=finding,
        rows=rank_segments(rows),
        taps=sweep.taps(),
        failed=tuple(failures),
        cases=tuple(sweep_case.case.name for sweep_case in cases),
        points=len(points),
        cut=len(cuts),
        segments=len(rows),
        notes=tuple(_list_notes(bool(points), sweep.complete, len(rows), candidate.fuses)),
        complete=sweep.complete,
    )


def _cut_finer(
    work: Sweep, points: Sequence[str], cuts: set[str], tell: Callable[[str], None]
) -> tuple[list[SegmentRow], set[str]]:
    """The rows of the finest cuts that were measured completely, and these cuts. cuts: of the first round."""
    rows, finer_cuts = list[SegmentRow](), set[str]()
    for index in range(MOST_ROUNDS):
        tell(f"round {index + 1}: {len(cuts | finer_cuts)} cuts of {len(points)} possible")
        measured_rows = work.rows(cuts | finer_cuts)
        if rows and not work.complete:
            break  # only the rows of the round before cover the whole model
        rows, cuts = measured_rows, cuts | finer_cuts
        if not work.complete or not (finer_cuts := work.finer(rows, points, cuts)):
            break
    return rows, cuts


def _list_notes(has_points: bool, complete: bool, segments: int, fuses: bool) -> Iterator[str]:
    if not has_points:
        yield "the two models share no inner tensor by name, so only the outputs could be compared"
    if not complete:
        yield f"the time limit ended after {segments} parts; {MORE_TIME}"
    if fuses:
        yield "no cut lies between a weighted node and the one that its kernel absorbs; the two are one row"


def _worst_cases(
    reference: OnnxGraph,
    candidate: OnnxGraph,
    golden: GoldenSet,
    limit: int,
    samples: int,
    stop: Callable[[], bool],
    answered: bool,
) -> list[SweepCase]:
    """The cases on which the outputs differ most. limit: number of cases; more are returned if these have fewer than
    `samples` samples, which a slice needs to be judged.  stop: returns whether the time is over; the first case always
    runs.  answered: as in `attribute`."""
    case_ranking: list[tuple[tuple[float, ...], int, SweepCase]] = []
    counts: dict[int, int] = {}
    with nullcontext() if answered else reference.whole() as reference_session, candidate.whole() as actual:
        for index, case in enumerate(golden.cases):
            if case_ranking and stop():
                break
            expected_outputs = run(reference_session, case.inputs) if reference_session else case.expected
            try:
                actual_outputs: Tensors | None = run(actual, case.inputs)
            except EnginesmithError:
                actual_outputs = None
            pairs = [(value, (actual_outputs or {}).get(name)) for name, value in expected_outputs.items()]
            errors = (describe_drift(*measure_pair(*pair)) for pair in pairs)
            rank = min((error.rank for error in errors), default=())
            sample_counts = (samples_of(case.inputs.values(), array) for array in expected_outputs.values())
            counts[index] = min(sample_counts, default=1)
            case_ranking.append((rank, index, SweepCase(case, actual_outputs)))
            case_ranking.sort(key=lambda ranked: ranked[:2])
            totals = enumerate(accumulate(counts[case_index] for _, case_index, _ in case_ranking), 1)
            case_count = next((end for end, total in totals if total >= samples), len(case_ranking))
            del case_ranking[max(limit, case_count) :]
    return [sweep_case for _, _, sweep_case in case_ranking]
