"""Several listeners as one: the display first, then those that only look on."""

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pipeline.progress.events import Event, Progress

if TYPE_CHECKING:
    from enginery.registry.runs.state import RunState


def together(display: Progress, *others: Progress) -> Progress:
    """A `Progress` that tells all of these. One of the others that raises is told nothing more, and the run goes on."""
    return _Together(display, list(others)) if others else display


class _Together(Progress):
    def __init__(self, display: Progress, others: list[Progress]) -> None:
        self._display, self._others, self.by = display, others, display.by

    def of_run(self, model: str, run: str) -> Progress:
        return _Together(self._display.of_run(model, run), [each.of_run(model, run) for each in self._others])

    def emit(self, event: Event) -> None:
        self._display.emit(event)
        for each in list(self._others):
            try:
                each.emit(event)
            except Exception as error:  # whatever is wrong with a listener, builds are worth more than what it sees
                if each in self._others:
                    self._others.remove(each)
                    what = type(each).__name__
                    print(f"warning: {what} is told nothing more of this run: {error!r}", file=sys.stderr)

    def take_state(self, run: "RunState") -> None:
        self._display.take_state(run)

    def watch(self, name: str) -> AbstractContextManager[None]:
        return self._display.watch(name)
