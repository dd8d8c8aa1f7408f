"""Which model a step belongs to, where several are compiled beside each other on one display."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.progress.events import Event, Progress, Silent, StepEvent
from pipeline.progress.json_lines import JsonLines

if TYPE_CHECKING:
    from enginery.registry.runs.state import RunState


def by_model(display: Progress) -> Progress:
    """The display, on which each step and unit has its model before its name; JSON has it in a field of its own."""
    return display if isinstance(display, JsonLines) else _ByModel(display)


class _ByModel(Silent):
    """Before a run has begun."""

    def __init__(self, display: Progress) -> None:
        self._display, self.by = display, display.by

    def of_run(self, model: str, run: str) -> Progress:
        return _OfModel(self._display.of_run(model, run), model)

    def recorded(self, run: "RunState") -> None:
        self._display.recorded(run)


class _OfModel:
    """One run's."""

    def __init__(self, display: Progress, model: str) -> None:
        self._display, self._model, self.by = display, model, display.by

    def of_run(self, model: str, run: str) -> Progress:
        return _OfModel(self._display.of_run(model, run), model)

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            event = replace(event, name=f"{self._model} {event.name}")
        self._display.emit(event)

    def recorded(self, run: "RunState") -> None:
        self._display.recorded(run)

    def watching(self, name: str) -> AbstractContextManager[None]:
        return self._display.watching(f"{self._model} {name}")
