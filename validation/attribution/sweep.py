"""Measures the segments of a candidate: the own error of each, on the reference's activations, and what it inherits."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self, overload

import numpy as np

from enginery.arrays import Array
from enginery.core.errors import EngineryError
from enginery.core.types import Session, Tensors, TensorSpec
from validation.attribution.blame import describe_drift, explain_blame, is_of_the_cut, measure_pair
from validation.attribution.cuts import GraphSegment, Tappable, exclude_joined, list_shared, segments, spread, windows
from validation.attribution.onnx_graph import LOCAL
from validation.attribution.result import SegmentRow, Taps, rank_segments
from validation.comparison.sessions import run
from validation.golden.golden_set import Case
from validation.limits.budget import Budget
from validation.metrics.drift import Drift, is_exact, measure


@dataclass
class Apart:
    """Segments that are run on given activations: all in one session; where that fails, one by one, to find which does.

    given: the activations' specs by name, in the candidate's dtypes.
    """

    candidate: Tappable
    window: Sequence[GraphSegment]
    given: Mapping[str, TensorSpec]
    sessions: dict[tuple[str, ...], Session] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def run(self, values: Tensors) -> dict[str, tuple[Array | None, str]]:
        """Each segment's tensor, or None and why there is none. values: inputs and activations of the model by name."""
        try:
            return {name: (value, "") for name, value in self._run(self.window, values).items()}
        except EngineryError as error:
            if len(self.window) == 1:
                return {self.window[0].target: (None, str(error))}
        found: dict[str, tuple[Array | None, str]] = {}
        for segment in self.window:
            try:
                found[segment.target] = self._run([segment], values)[segment.target], ""
            except EngineryError as error:
                found[segment.target] = None, str(error)
        return found

    def _run(self, window: Sequence[GraphSegment], values: Tensors) -> dict[str, Array]:
        names = tuple(segment.target for segment in window)
        if names not in self.sessions:
            inside = {name for segment in window for name in segment.boundary}
            ranked_as = {
                name: TensorSpec(name, spec.dtype, values[name].shape)
                for name, spec in self.given.items()
                if name in inside
            }
            self.sessions[names] = self.stack.enter_context(self.candidate.open_segment(names, ranked_as))
        session = self.sessions[names]
        fed = {spec.name: values[spec.name] for spec in session.inputs}
        cast = {name: fed[name].astype(spec.dtype) for name, spec in self.given.items() if name in fed}
        results = run(session, {**fed, **cast})
        return {name: results.get(f"{name}{LOCAL}", results.get(name)) for name in names}  # type: ignore[misc]


MOST_CUTS = 64
MOST_CASES = 4
MOST_BYTES = 256 << 20
# Segments that a further round cuts finer, where none is blamed.
REFINED = 4
# Magnitudes that only a mask has, in the reference and, where its type holds less, in the candidate.
MASK, LEAST_MASK = 1e9, 1e4
# Bytes of an element, at most.
_WIDEST = 8
_FLOATS = ("float16", "float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Size:
    """How much is done at once. cuts: in one round.  cases: golden cases.  held: bytes of activations, per side."""

    cuts: int = MOST_CUTS
    cases: int = MOST_CASES
    held: int = MOST_BYTES


USUAL = Size()


@dataclass(frozen=True)
class SweepCase:
    """A golden case to measure on, and what the candidate's untouched run gave; None when it fails on it."""

    case: Case
    outputs: Tensors | None


@dataclass
class Sweep:
    """Two models, the cases, and what is known so far: measured segments by target and boundary."""

    reference: Tappable
    candidate: Tappable
    cases: Sequence[SweepCase]
    budget: Budget
    size: Size
    kinds: dict[str, tuple[TensorSpec, TensorSpec]] = field(default_factory=dict)
    known: "dict[tuple[str, tuple[str, ...]], _SegmentDrift]" = field(default_factory=dict)
    changed: dict[str, Drift] = field(default_factory=dict)
    compared: int = 0
    held: dict[str, int] = field(default_factory=dict)
    zeros: dict[str, float] = field(default_factory=dict)

    def points(self) -> list[str]:
        """Where both can be cut, in order: floating point on both sides, and no fusion between."""
        names = list_shared(self.reference.steps, self.candidate.steps)
        with (
            self.reference.open_tapped(names, whole=False) as one,
            self.candidate.open_tapped(names, whole=False) as other,
        ):
            left, right = ({spec.name: spec for spec in session.outputs} for session in (one, other))
        self.kinds = {name: (left[name], right[name]) for name in names if name in left and name in right}
        self.zeros = {name: step.zero for step in self.reference.steps for name in step.makes if step.zero is not None}
        both = [name for name in names if self._cuttable(name)]
        both = [name for name in both if _alike(*self.kinds[name])]
        return exclude_joined(both, self.candidate.steps) if self.candidate.fuses else both

    def _cuttable(self, name: str) -> bool:
        one, other = (spec.dtype for spec in self.kinds[name])
        return (one in _FLOATS and other in _FLOATS) or (name in self.zeros and one == other)

    def rows(self, cuts: set[str]) -> list[SegmentRow]:
        """A row for each cut; only segments that are new are run."""
        order = [name for step in self.candidate.steps for name in step.makes if name in cuts]
        found = list(segments(self.candidate.steps, cuts, order))
        new = [segment for segment in found if (segment.target, segment.boundary) not in self.known]
        unknown = [name for name in order if name not in self.held]
        shapes = self.reference.shapes(unknown, _largest(self.cases)) if unknown else {}
        self.held |= {name: _WIDEST * math.prod(shape) for name, shape in shapes.items()}
        for window in windows(new, self.held, self.size.held):
            self._measure(window, cuts)
        origin = {item.target: item for item in segments(self.reference.steps, cuts, order)}
        return [self._row(segment, origin[segment.target]) for segment in found]

    def finer(self, rows: Sequence[SegmentRow], points: Sequence[str], cuts: set[str]) -> set[str]:
        """Cuts inside the worst segments that still hold some; none when every such segment is as short as can be."""
        inner = {row.tensor: self._inside(row, points, cuts) for row in rank_segments(rows)}
        blamed = [row.tensor for row in rank_segments(rows) if row.blamed and inner[row.tensor]]
        worst = [row.tensor for row in rank_segments(rows)[:REFINED] if inner[row.tensor]]
        chosen = blamed[:REFINED] or ([] if any(row.blamed for row in rows) else worst)
        return {name for target in chosen for name in spread(inner[target], max(1, self.size.cuts // len(chosen)))}

    def taps(self) -> Taps:
        """Whether the tapped runs gave the untapped runs' bits."""
        return Taps(self.compared, {name: describe_drift(drift) for name, drift in self.changed.items()})

    def _inside(self, row: SegmentRow, points: Sequence[str], cuts: set[str]) -> list[str]:
        wanted = {*row.computed_by}
        made = {name for step in self.candidate.steps if step.name in wanted for name in step.makes}
        return [name for name in points if name in made and name not in cuts]

    def _row(self, segment: GraphSegment, origin: GraphSegment) -> SegmentRow:
        found = self.known[segment.target, segment.boundary]
        local, inherited = (
            describe_drift(found.local, found.local_note),
            describe_drift(found.inherited, found.inherited_note),
        )
        if not self.changed and is_of_the_cut(local, inherited):
            local = inherited
        return SegmentRow(
            tensor=segment.target,
            node=origin.main.name,
            op_type=origin.main.op_type,
            local=local,
            inherited=inherited,
            blamed=explain_blame(local, self.budget),
            nodes=origin.names,
            computed_by=tuple(step.name for step in segment.steps),
        )

    def _measure(self, window: Sequence[GraphSegment], cuts: set[str]) -> None:
        """Run one window: the reference and the candidate tapped, then the candidate's segments apart."""
        targets = [segment.target for segment in window]
        inside = [name for segment in window for name in segment.boundary if name in cuts]
        seen = list(dict.fromkeys([*targets, *inside]))
        found = {segment.target: _SegmentDrift() for segment in window}
        with (
            self.reference.open_tapped(seen, whole=False) as expected,
            self.candidate.open_tapped(targets, whole=True) as actual,
            Apart(self.candidate, window, self._list_given(window, cuts)) as apart,
        ):
            for item in self.cases:
                wanted = run(expected, _only(item.case.inputs, expected))
                given, note = _try_run(actual, item.case.inputs)
                if not note:
                    self._compare_taps(item.outputs, given)
                own = apart.run({**item.case.inputs, **{name: wanted[name] for name in inside}})
                for name in targets:
                    zero = self.zeros.get(name)
                    parts = own[name], (given.get(name), note)
                    found[name].add(_number(wanted[name], zero), *((_number(part, zero), why) for part, why in parts))
        self.known |= {(segment.target, segment.boundary): found[segment.target] for segment in window}

    def _list_given(self, window: Sequence[GraphSegment], cuts: set[str]) -> dict[str, TensorSpec]:
        """The reference's activations that a window is run on, in the candidate's types."""
        names = dict.fromkeys(name for segment in window for name in segment.boundary)
        return {name: self.kinds[name][1] for name in names if name in cuts}

    def _compare_taps(self, untouched: Tensors | None, tapped: Tensors) -> None:
        for name, value in (untouched or {}).items():
            self.compared += 1
            if value.dtype != tapped[name].dtype or value.tobytes() != tapped[name].tobytes():
                drift = measure(value, tapped[name])
                self.changed[name] = self.changed.get(name, Drift()).merge(drift)


@dataclass
class _SegmentDrift:
    """What was measured of one segment, over all cases."""

    local: Drift | None = None
    inherited: Drift | None = None
    local_note: str = ""
    inherited_note: str = ""

    def add(self, expected: Array, own: tuple[Array | None, str], inherited: tuple[Array | None, str]) -> None:
        """One case: what the segment gives on the reference's activations, and what the candidate has there."""
        drift, note = (None, own[1]) if own[1] else measure_pair(*_mask_infinite(expected, own[0]))
        self.local, self.local_note = _merge_drifts(self.local, drift), self.local_note or note
        drift, note = (None, inherited[1]) if inherited[1] else measure_pair(*_mask_infinite(expected, inherited[0]))
        self.inherited, self.inherited_note = _merge_drifts(self.inherited, drift), self.inherited_note or note


def _mask_infinite(expected: Array, actual: Array | None) -> tuple[Array, Array | None]:
    """Mask values as infinities, which are compared and then left out of the sums: the energy of one would hide
    everything else. A narrower type may hold a smaller mask."""
    if actual is None or is_exact(expected) or actual.shape != expected.shape:
        return expected, actual
    mask = np.abs(expected) >= MASK
    if not mask.any():
        return expected, actual
    kept = mask & (np.abs(actual) >= LEAST_MASK) & (np.sign(actual) == np.sign(expected))
    infinite = np.copysign(np.inf, expected)
    return np.where(mask, infinite, expected), np.where(kept, infinite, actual)


def _merge_drifts(left: Drift | None, right: Drift | None) -> Drift | None:
    return left.merge(right) if left and right else left or right


def _try_run(session: Session, inputs: Tensors) -> tuple[Mapping[str, Array], str]:
    try:
        return run(session, inputs), ""
    except EngineryError as error:
        return {}, str(error)


def _only(inputs: Tensors, session: Session) -> dict[str, Array]:
    return {spec.name: inputs[spec.name] for spec in session.inputs}


def _alike(left: TensorSpec, right: TensorSpec) -> bool:
    """Whether two shapes may be one, as far as they are known; a rewrite may use a name for something else."""
    if not left.shape or not right.shape:
        return True  # a scalar, or a rank that nothing tells
    pairs = zip(left.shape, right.shape, strict=False)
    sizes_fit = all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in pairs)
    return len(left.shape) == len(right.shape) and sizes_fit


def _largest(cases: Sequence[SweepCase]) -> Tensors:
    """The inputs of the case that has most of them."""
    return max((item.case.inputs for item in cases), key=lambda inputs: sum(array.size for array in inputs.values()))


@overload
def _number(array: Array, zero: float | None) -> Array: ...
@overload
def _number(array: Array | None, zero: float | None) -> Array | None: ...
def _number(array: Array | None, zero: float | None) -> Array | None:
    """A quantized tensor as steps from its zero, so that it is measured as the number that it stands for."""
    return array if array is None or zero is None else array.astype(np.float32) - np.float32(zero)
