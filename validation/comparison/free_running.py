"""Compares two models with state that hand their own states from step to step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Session
from validation.comparison.outputs import NOTED
from validation.comparison.sessions import Opener, drift_checks
from validation.golden.answers import RecordedSession
from validation.golden.free_running import FreeRunningSession
from validation.golden.golden_set import GoldenSequences, GoldenSet, case_kinds, case_names
from validation.limits.budget import Budgets, StagedLimits
from validation.metrics.along import Along, StepSpreads
from validation.metrics.tally import Spreads

# The case of these checks.
FREE_RUNNING = "free running"


def free_running_checks(
    stage: str,
    reference: Session | None,
    candidate: Session,
    sequences: GoldenSet,
    limits: Budgets | StagedLimits,
    along: Along | None = None,
) -> tuple[Check, ...]:
    """`drift_checks` on whole sequences: those of the golden cases, under limits that were measured on sequences.

    along: takes the drift along the sequences. The check of an output's SQNR, or of its agreement, notes the worst."""
    along = along or Along()
    checks = drift_checks(stage, reference, candidate, sequences, limits, along)
    told = {found.output: found.text for found in along.at(stage)}

    def note(check: Check) -> str:
        return "; ".join(filter(None, [told.get(check.output), check.note])) if check.name in NOTED else check.note

    return tuple(replace(check, case=_case(check.case), note=note(check)) for check in checks)


def step_spreads(golden: GoldenSet, along: Along) -> Spreads:
    """The spreads of a golden set's cases; of a model with state `along` takes the drift of its steps with them."""
    if (sequences := golden.sequences) is None:
        return Spreads()
    names = [name for name, kind in zip(case_names(golden), case_kinds(golden), strict=True) if kind == "golden"]
    return StepSpreads(along, dict(zip(names, sequences.places, strict=False)))


def _case(name: str) -> str:
    return FREE_RUNNING if name == "golden" else f"{FREE_RUNNING}, {name}"


def check_free_running(
    stage: str,
    pair: tuple[RecordedSession, Session],
    sequences: GoldenSequences | None,
    opens: Opener,
    limits: Callable[[Session, GoldenSet, Opener], StagedLimits],
    along: Along,
) -> tuple[Check, ...]:
    """The checks of the second session against the first on sequences; none of a model without state.

    opens: opens an ONNX file as it is written.  limits: of a reference on a golden set, given what opens graphs that
    are compared with it.  along: as in `free_running_checks`.
    """
    if sequences is None:
        return ()

    @contextmanager
    def rolled(path: Path) -> Iterator[Session]:
        with opens(path) as session:
            yield FreeRunningSession(session, sequences)

    expected, actual = pair[0].free_running(sequences), FreeRunningSession(pair[1], sequences)
    held = limits(expected, sequences.golden, rolled)
    return free_running_checks(stage, expected, actual, sequences.golden, held, along)
