"""Which display a command shows, several listeners as one, and several models on one display."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.progress.events import Event, Progress, StepEvent
from pipeline.progress.json_lines import JsonLines
from pipeline.progress.terminal import Lines, LiveTable

if TYPE_CHECKING:
    from enginesmith.registry.builds.runs import RunState


def together(display: Progress, *others: Progress) -> Progress:
    """A `Progress` that sends each event to all of these, the display first.

    What the display raises stops the run. One of the others that raises gets no more events, with a warning on stderr.
    """
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


def by_model(display: Progress) -> Progress:
    """The display for several models that are compiled at once: each step and unit has its model before its name.

    JSON lines have the model in a field of their own already.
    """
    return display if isinstance(display, JsonLines) else _ByModel(display)


class _ByModel(Progress):
    """model: of a run; '' before one has begun, when there are no events of steps."""

    def __init__(self, display: Progress, model: str = "") -> None:
        self._display, self._model, self.by = display, model, display.by

    def of_run(self, model: str, run: str) -> Progress:
        return _ByModel(self._display.of_run(model, run), model)

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            event = replace(event, name=f"{self._model} {event.name}")
        self._display.emit(event)

    def take_state(self, run: "RunState") -> None:
        self._display.take_state(run)

    def watch(self, name: str) -> AbstractContextManager[None]:
        return self._display.watch(f"{self._model} {name}")


@contextmanager
def progress_display(quiet: bool = False, json_lines: bool = False) -> Iterator[Progress]:
    """The display that fits stderr: JSON lines if asked for, a live table on a terminal, else plain lines."""
    if quiet:
        yield Progress()
    elif json_lines:
        yield JsonLines()
    elif sys.stderr.isatty():
        with LiveTable() as table:
            yield table
    else:
        yield Lines()
