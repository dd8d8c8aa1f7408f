"""The checks of a graph or engine of a model with state that hands its own states from step to step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.reports.proof import Check
from enginery.core.types import Session
from pipeline.compile.steps.drift_limits import Opener, as_written

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSequences, GoldenSet
    from validation.limits.budget import StagedLimits


def check_free_running(
    stage: str,
    pair: tuple[Session, Session],
    sequences: "GoldenSequences | None",
    limits: "Callable[[Session, GoldenSet, Opener], StagedLimits]",
) -> tuple[Check, ...]:
    """The checks of the second session against the first on sequences; none of a model without state.

    limits: of a reference on a golden set, with what opens graphs that are compared with it.
    """
    from validation.comparison.free_running import free_running_checks
    from validation.golden.free_running import FreeRunningSession

    if sequences is None:
        return ()

    @contextmanager
    def rolled(path: Path) -> Iterator[Session]:
        with as_written(path) as session:
            yield FreeRunningSession(session, sequences)

    expected, actual = (FreeRunningSession(session, sequences) for session in pair)
    held = limits(expected, sequences.golden, rolled)
    return free_running_checks(stage, expected, actual, sequences.golden, held)
