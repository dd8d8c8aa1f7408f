"""Which node drifted: the error of every segment on the reference's activations, beside the error that it inherits.

Errors of a deep model grow and mix, so the place where an output is wrong says little about the cause. Each segment of
the candidate is given what the reference computed at its inputs, so that the error at its end is its own. All segments
are cut apart in one graph and run together: a sweep costs one more run of the candidate, not one per node. Long models
are cut coarsely first, and then only where they are worst (`sweep.Size.cuts` at a time). Windows of `sweep.Size.held`
bytes bound the memory, whatever the model's size.

A segment is blamed when its own error breaks the limits that the stage has for the whole model. Where none does and an
output fails by one slice, that is the segment with the worst slice. Where none does and the outputs fail all the same,
the errors add up, and the ranking shows where most of them come from.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import Tensors
from validation.attribution.blame import blame_lone, blame_slice, describe_drift, measure_pair
from validation.attribution.cuts import spread
from validation.attribution.onnx_graph import OnnxGraph
from validation.attribution.result import MORE_TIME, Attribution, Finding, SegmentRow, rank_segments
from validation.attribution.sweep import USUAL, Size, Sweep, SweepCase
from validation.comparison.sessions import run
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budget
from validation.metrics.slice_limits import FEWEST
from validation.metrics.tally import samples_of

# Rounds of cutting, each finer than the one before.
MOST_ROUNDS = 8


def attribute(
    joint: str,
    precision: str,
    reference: OnnxGraph,
    candidate: OnnxGraph,
    golden: GoldenSet,
    budget: Budget,
    failed: Sequence[str] = (),
    size: Size = USUAL,
    tell: Callable[[str], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    answered: bool = False,
) -> Attribution:
    """The candidate's segments ranked by their own error. joint: the stage.  failed: the failed checks in words.

    budget: the limits of the stage, which each segment must keep alone.  tell: takes lines about the progress.
    stop: whether the time is over: the result is then of what was measured until then, and says so.
    answered: whether the outputs in the golden set are the reference's own.
    Raises what the reference raises; a segment that the candidate fails to run has a row that says so.
    """
    tell("running both on the golden set")
    by_slice = any("slice_sqnr_db" in text for text in failed)
    cases = _worst_cases(reference, candidate, golden, size.cases, FEWEST if by_slice else 0, stop, answered)
    work = Sweep(reference, candidate, cases, budget, size, stop=stop)
    points = work.points()
    cuts = {*spread(points, size.cuts), *(name for name in candidate.outputs if name in work.kinds)}
    rows, cuts = _cut_finer(work, points, cuts, tell)
    if by_slice and not any(row.blamed for row in rows):
        rows = blame_slice(rows, budget)
    if failed and joint == "engine" and not any(row.blamed for row in rows):
        rows = blame_lone(rows)
    found: Finding = "nothing-failed" if not failed else "blamed" if any(row.blamed for row in rows) else "spread"
    return Attribution(
        joint=joint,
        precision=precision,
        finding=found,
        rows=rank_segments(rows),
        taps=work.taps(),
        failed=tuple(failed),
        cases=tuple(item.case.name for item in cases),
        points=len(points),
        cut=len(cuts),
        segments=len(rows),
        notes=tuple(_list_notes(bool(points), work.complete, len(rows), candidate.fuses)),
        complete=work.complete,
    )


def _cut_finer(
    work: Sweep, points: Sequence[str], cuts: set[str], tell: Callable[[str], None]
) -> tuple[list[SegmentRow], set[str]]:
    """The rows of the finest cuts that were measured as a whole, and these cuts. cuts: of the first round."""
    rows, finer = list[SegmentRow](), set[str]()
    for index in range(MOST_ROUNDS):
        tell(f"round {index + 1}: {len(cuts | finer)} cuts of {len(points)} possible")
        measured = work.rows(cuts | finer)
        if rows and not work.complete:
            break  # the rows of the round before are of the whole model
        rows, cuts = measured, cuts | finer
        if not work.complete or not (finer := work.finer(rows, points, cuts)):
            break
    return rows, cuts


def _list_notes(has_points: bool, complete: bool, segments: int, fuses: bool) -> Iterator[str]:
    if not has_points:
        yield "the two models share no inner tensor by name, so only the outputs could be compared"
    if not complete:
        yield f"the time for it was over after {segments} segments; {MORE_TIME}"
    if fuses:
        yield "no cut lies between a weighted node and the one that its kernel absorbs; the two are one row"


def _worst_cases(
    reference: OnnxGraph,
    candidate: OnnxGraph,
    golden: GoldenSet,
    most: int,
    samples: int,
    stop: Callable[[], bool],
    answered: bool,
) -> list[SweepCase]:
    """The cases on which the outputs differ most. most: how many, or more until they hold `samples` samples, which a
    slice needs to be judged.  stop: whether the time is over; the first case is run all the same.  answered: as in
    `attribute`."""
    found: list[tuple[tuple[float, ...], int, SweepCase]] = []
    counts: dict[int, int] = {}
    with nullcontext() if answered else reference.whole() as expected, candidate.whole() as actual:
        for index, case in enumerate(golden.cases):
            if found and stop():
                break
            wanted = run(expected, case.inputs) if expected else case.expected
            try:
                given: Tensors | None = run(actual, case.inputs)
            except EnginesmithError:
                given = None
            errors = (describe_drift(*measure_pair(wanted[name], (given or {}).get(name))) for name in wanted)
            rank = min((error.rank for error in errors), default=())
            counts[index] = min((samples_of(case.inputs.values(), array) for array in wanted.values()), default=1)
            found = sorted([*found, (rank, index, SweepCase(case, given))], key=lambda item: item[:2])
            held = accumulate(counts[place] for _, place, _ in found)
            found = found[: max(most, next((end for end, count in enumerate(held, 1) if count >= samples), len(found)))]
    return [chosen for _, _, chosen in found]
