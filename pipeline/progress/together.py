"""Several listeners as one: the display first, then those that only look on."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from builders.jobs import Usage
from pipeline.progress.events import Progress

if TYPE_CHECKING:
    from pipeline.history import Expectation
    from pipeline.outcome import Outcome
    from pipeline.runs.state import RunState
    from pipeline.values import BuildPlan


def together(display: Progress, *lookers: Progress) -> Progress:
    """A `Progress` that tells all of these. A looker that raises is told nothing more, and the run goes on."""
    return _Together(display, list(lookers)) if lookers else display


class _Together:
    def __init__(self, display: Progress, lookers: list[Progress]) -> None:
        self._display, self._lookers, self.by = display, lookers, display.by

    def of_run(self, model: str, run: str) -> Progress:
        return _Together(self._display.of_run(model, run), [each.of_run(model, run) for each in self._lookers])

    def began(self, model: str, run: str) -> None:
        self._tell(lambda each: each.began(model, run))

    def planned(self, plan: "BuildPlan") -> None:
        self._tell(lambda each: each.planned(plan))

    def expects(self, name: str, expectation: "Expectation") -> None:
        self._tell(lambda each: each.expects(name, expectation))

    def waiting(self, name: str, why: str) -> None:
        self._tell(lambda each: each.waiting(name, why))

    def started(self, name: str, where: str = "here") -> None:
        self._tell(lambda each: each.started(name, where))

    def phase(self, name: str, phase: str) -> None:
        self._tell(lambda each: each.phase(name, phase))

    def said(self, name: str, text: str) -> None:
        self._tell(lambda each: each.said(name, text))

    def retrying(self, name: str, why: str) -> None:
        self._tell(lambda each: each.retrying(name, why))

    def ended(self, name: str, usage: Usage) -> None:
        self._tell(lambda each: each.ended(name, usage))

    def finished(self, name: str, outcome: str) -> None:
        self._tell(lambda each: each.finished(name, outcome))

    def concluded(self, outcome: "Outcome") -> None:
        self._tell(lambda each: each.concluded(outcome))

    def recorded(self, run: "RunState") -> None:
        self._tell(lambda each: each.recorded(run))

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        with self._display.watching(name):
            yield

    def _tell(self, event: Callable[[Progress], None]) -> None:
        event(self._display)
        for each in list(self._lookers):
            try:
                event(each)
            except Exception as error:  # whatever is wrong with a looker, builds are worth more than what it sees
                if each in self._lookers:
                    self._lookers.remove(each)
                    what = type(each).__name__
                    print(f"warning: {what} is told nothing more of this run: {error!r}", file=sys.stderr)
