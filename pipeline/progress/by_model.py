"""Which model a step belongs to, where several are compiled beside each other on one display."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from builders.jobs import Usage
from pipeline.progress.events import VERDICT, Progress, Silent
from pipeline.progress.json_lines import JsonLines

if TYPE_CHECKING:
    from pipeline.history import Expectation
    from pipeline.outcome import Outcome
    from pipeline.runs.state import RunState
    from pipeline.values import BuildPlan


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
    """One run's. Answers every event: what is added to the protocol and not here is found by the type checker."""

    def __init__(self, display: Progress, model: str) -> None:
        self._display, self._model, self.by = display, model, display.by

    def _named(self, name: str) -> str:
        if name.startswith(f"{self._model}@"):
            return name
        if name.startswith(VERDICT):
            return f"{VERDICT}{self._model} {name.removeprefix(VERDICT)}"
        return f"{self._model} {name}"

    def of_run(self, model: str, run: str) -> Progress:
        return _OfModel(self._display.of_run(model, run), model)

    def began(self, model: str, run: str) -> None:
        self._display.began(model, run)

    def planned(self, plan: "BuildPlan") -> None:
        self._display.planned(plan)

    def expects(self, name: str, expectation: "Expectation") -> None:
        self._display.expects(self._named(name), expectation)

    def waiting(self, name: str, why: str) -> None:
        self._display.waiting(self._named(name), why)

    def started(self, name: str, where: str = "here") -> None:
        self._display.started(self._named(name), where)

    def phase(self, name: str, phase: str) -> None:
        self._display.phase(self._named(name), phase)

    def said(self, name: str, text: str) -> None:
        self._display.said(self._named(name), text)

    def retrying(self, name: str, why: str) -> None:
        self._display.retrying(self._named(name), why)

    def ended(self, name: str, usage: Usage) -> None:
        self._display.ended(self._named(name), usage)

    def finished(self, name: str, outcome: str) -> None:
        self._display.finished(self._named(name), outcome)

    def concluded(self, outcome: "Outcome") -> None:
        self._display.concluded(outcome)

    def recorded(self, run: "RunState") -> None:
        self._display.recorded(run)

    def watching(self, name: str) -> AbstractContextManager[None]:
        return self._display.watching(self._named(name))
