"""Compares two models with state that hand their own states from step to step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from enginery.core.reports.proof import Check
from enginery.core.types import Session
from validation.comparison.sessions import Opener, drift_checks
from validation.golden.answers import RecordedSession
from validation.golden.free_running import FreeRunningSession
from validation.golden.golden_set import GoldenSequences, GoldenSet
from validation.limits.budget import Budgets, StagedLimits

# The case of these checks.
FREE_RUNNING = "free running"


def free_running_checks(
    stage: str,
    reference: Session | None,
    candidate: Session,
    sequences: GoldenSet,
    limits: Budgets | StagedLimits,
) -> tuple[Check, ...]:
    """`drift_checks` on whole sequences: those of the golden cases, under limits that were measured on sequences."""
    checks = drift_checks(stage, reference, candidate, sequences, limits)
    return tuple(replace(check, case=_case(check.case)) for check in checks)


def _case(name: str) -> str:
    return FREE_RUNNING if name == "golden" else f"{FREE_RUNNING}, {name}"


def check_free_running(
    stage: str,
    pair: tuple[RecordedSession, Session],
    sequences: GoldenSequences | None,
    opens: Opener,
    limits: Callable[[Session, GoldenSet, Opener], StagedLimits],
) -> tuple[Check, ...]:
    """The checks of the second session against the first on sequences; none of a model without state.

    opens: opens an ONNX file as it is written.  limits: of a reference on a golden set, given what opens graphs that
    are compared with it.
    """
    if sequences is None:
        return ()

    @contextmanager
    def rolled(path: Path) -> Iterator[Session]:
        with opens(path) as session:
            yield FreeRunningSession(session, sequences)

    expected, actual = pair[0].free_running(sequences), FreeRunningSession(pair[1], sequences)
    held = limits(expected, sequences.golden, rolled)
    return free_running_checks(stage, expected, actual, sequences.golden, held)
