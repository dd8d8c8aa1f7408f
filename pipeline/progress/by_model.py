"""Which model a step belongs to, where several are compiled beside each other on one display."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.progress.events import Event, Progress, StepEvent
from pipeline.progress.json_lines import JsonLines

if TYPE_CHECKING:
    from enginery.registry.runs.state import RunState


def by_model(display: Progress) -> Progress:
    """The display, on which each step and unit has its model before its name; JSON has it in a field of its own."""
    return display if isinstance(display, JsonLines) else _ByModel(display)


class _ByModel(Progress):
    """model: of a run; '' before one has begun, when nothing is told of a step."""

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
