"""Displays of progress: lines, a table on a terminal, JSON for programs."""

import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from enginesmith.core.text import format_line, join_first, visible
from pipeline.progress import events
from pipeline.progress.events import Event, Progress, StepEvent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from enginesmith.registry.builds.build_history import Expectation

# Seconds until a wait is shown again of whose reason only the time has changed: a countdown does so every other second.
RECOUNT_S = 15.0
_COUNTS = re.compile(r"[0-9]+:[0-9]{2}")


@dataclass(frozen=True)
class StepClock:
    """One running step or unit. begun: by the monotonic clock."""

    name: str
    begun: float = field(default_factory=time.monotonic)
    phase: str = ""
    expectation: "Expectation | None" = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun

    @property
    def text(self) -> str:
        """'30 s, compiling, ~40 s left (predicted from 3 builds of this unit)'."""
        remaining_text = self.expectation.describe_left(self.elapsed_s) if self.expectation else ""
        return ", ".join(phrase for phrase in (f"{self.elapsed_s:.0f} s", self.phase, remaining_text) if phrase)


@dataclass(frozen=True)
class Wait:
    """Something that waits. shown_at: seconds of the monotonic clock."""

    why: str
    shown_at: float

    @property
    def reason(self) -> str:
        """Why, without the times that count up or down."""
        return _COUNTS.sub("", self.why)


class Clocks:
    """Every clock by name; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, StepClock] = {}
        self._expected: dict[str, Expectation] = {}
        self._waits: dict[str, Wait] = {}

    def note_wait(self, name: str, why: str, *, once: bool = False) -> bool:
        """Whether to show a wait: its reason is new, or its times have changed for `RECOUNT_S`.  once: do not show a
        reason for which something else already waits.
        """
        new_wait = Wait(why, time.monotonic())
        with self._lock:
            waits = [
                wait for step, wait in self._waits.items() if (once or step == name) and wait.reason == new_wait.reason
            ]
            shown_at = max((wait.shown_at for wait in waits), default=None)
            if shown_at is not None and (
                why in {wait.why for wait in waits} or new_wait.shown_at < shown_at + RECOUNT_S
            ):
                self._waits[name] = Wait(why, shown_at)
                return False
            self._waits[name] = new_wait
            return True

    def waits(self) -> list[tuple[list[str], str]]:
        """The names of what waits now, grouped by reason, with the reason."""
        waits_by_reason: dict[str, tuple[list[str], str]] = {}
        with self._lock:
            for name, wait in self._waits.items():
                names, _ = waits_by_reason.setdefault(wait.reason, ([], wait.why))
                names.append(name)
        return list(waits_by_reason.values())

    def start(self, name: str) -> None:
        """Start its clock, afresh after a retry."""
        with self._lock:
            self._waits.pop(name, None)
            self._running[name] = StepClock(name, expectation=self._expected.get(name))

    def follow(self, event: Event) -> None:
        """Keep a prediction until its unit starts, and the phase of what runs."""
        with self._lock:
            match event:
                case events.Predicted(name, expectation):
                    self._expected[name] = expectation
                case events.PhaseEntered(name, phase) if name in self._running:
                    self._running[name] = replace(self._running[name], phase=phase)

    def stop(self, name: str) -> float | None:
        """Stop its clock; how long it ran, None when it did not."""
        with self._lock:
            step_clock = self._running.pop(name, None)
            self._expected.pop(name, None)
            self._waits.pop(name, None)
        return step_clock.elapsed_s if step_clock else None

    def of(self, name: str) -> StepClock | None:
        """Its clock while it runs."""
        return self._running.get(name)

    def list_running(self) -> list[StepClock]:
        """Every clock that runs, in the order in which they were started."""
        with self._lock:
            return list(self._running.values())


# Progress for machines: one JSON object on one line of stderr for each event.
#
# Every object has time (ISO 8601, UTC), level (info, warning or error) and event; where they apply model, run, and unit
# (the name of a unit or a step). What an event adds beside these stands in docs/guides/observability.md.

_LEVELS = {"failed": "error", "unproven": "warning"}


class JsonLines(events.Progress):
    """Writes the events, each with `write`. about: the fields of every line."""

    def __init__(self, write: Callable[[str], object] | None = None, **about: str) -> None:
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._lock = threading.Lock()
        self._about = about
        self._clocks = Clocks()

    def tell(self, event: str, level: str = "info", **fields: object) -> None:
        """Write one line. Fields that are None are left out."""
        self._write_alone(format_line(event, level, **self._about, **fields))

    def of_run(self, model: str, run: str) -> "JsonLines":
        """A display for one run: its lines have the model and the run too."""
        return JsonLines(self._write_alone, **self._about, model=model, run=run)

    def _write_alone(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def emit(self, event: events.Event) -> None:
        """Write the event's line: for a wait only if it is new, and none for printed output."""
        match event:
            case events.RunBegan():  # model and run are on the line
                self.tell("began")
            case events.Planned(plan):
                action_counts = Counter(unit.action for unit in plan.units)
                counts = {action: action_counts[action] for action in ("build", "cached", "refused", "failed")}
                self.tell("planned", "info", **counts)
            case events.RunConcluded(outcome):
                level = "error" if outcome.version is None or outcome.failed else "info"
                failed_count = len(outcome.failed)
                self.tell("concluded", level, version=outcome.version, cached=outcome.cached, failed=failed_count)
            case events.VersionSettled(name, text):
                self.tell("finished", unit=name, state="done", outcome=text)
            case events.Finished(name, state, reason):
                level, shown_reason = _LEVELS.get(state, "info"), reason or None
                self.tell("finished", level, unit=name, state=state, outcome=event.outcome, reason=shown_reason)
            case events.VerdictReached(name, verdict, reason):
                verdict_fields = {"unit": name, "state": verdict, "outcome": event.outcome, "reason": reason}
                self.tell("verdict", _LEVELS.get(verdict, "info"), **verdict_fields)
            case _:
                self._tell_on_the_way(event)

    def _tell_on_the_way(self, event: events.Event) -> None:
        match event:
            case events.Predicted(name, expectation):
                self.tell("predicted", unit=name, **vars(expectation))
            case events.Waiting(name, why):
                if self._clocks.note_wait(name, why):
                    self.tell("waiting", unit=name, why=why)
            case events.Started(name, where):
                self._clocks.stop(name)
                self.tell("started", unit=name, where=where)
            case events.PhaseEntered(name, phase):
                self.tell("phase", unit=name, phase=phase)
            case events.Retrying(name, why):
                self.tell("retrying", "warning", unit=name, why=why)
            case events.ProcessEnded(name, usage):
                cpu_s, seconds = None if usage.cpu_s is None else round(usage.cpu_s, 2), round(usage.seconds, 3)
                self.tell("ended", unit=name, seconds=seconds, cpu_s=cpu_s, peak_mib=round(usage.peak_mib, 1))


# Seconds between the lines of a plain log which say that a long step still runs.
HEARTBEAT_S = 15.0


class Lines(events.Progress):
    """One line per event, with the time since the start; a heartbeat when a step takes long."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._clocks = Clocks()

    def emit(self, event: events.Event) -> None:
        """Print new events; a wait with a common reason only once."""
        self._clocks.follow(event)
        match event:
            case events.Waiting(name, why):
                if self._clocks.note_wait(name, why, once=True):
                    self._print(f"{name}: waiting: {why}")
            case events.Started(name, where):
                self._clocks.start(name)
                self._print(f"{name} ..." if where == "here" else f"{name} ... on {where}")
            case events.Retrying(name, why):
                self._print(f"{name}: once more: {why}")
            case events.Finished(name):
                self._clocks.stop(name)
                self._print(f"{name}: {event.outcome}")
            case events.VerdictReached(name):
                self._print(f"verdict on {name}: {event.outcome}")
            case events.VersionSettled(name, text):
                self._print(f"{name}: {text}")

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Print a line every `HEARTBEAT_S` while the work goes on."""
        stop_event = threading.Event()

        def beat() -> None:
            while not stop_event.wait(HEARTBEAT_S):
                if clock := self._clocks.of(name):
                    self._print(f"{name}: still running, {clock.text}")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join()
            self._clocks.stop(name)

    def _print(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._begun:6.1f} s] {visible(text)}", file=sys.stderr, flush=True)


_MARKS = {"failed": "[red]✗[/red]", "unproven": "[yellow]-[/yellow]"}


class LiveTable(events.Progress):
    """What runs, with phase, elapsed and predicted time, and what waits; above it a line for what is finished."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._clocks = Clocks()
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def __enter__(self) -> "LiveTable":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def emit(self, event: events.Event) -> None:
        """Change the table, or print a line above it."""
        self._clocks.follow(event)
        match event:
            case events.Waiting(name, why):
                self._clocks.note_wait(name, why)
            case events.Started(name):
                self._clocks.start(name)
            case events.Retrying(name, why):
                self._console.print(f"[yellow]↻[/yellow] {_plain(name)}: once more: {_plain(why)}", highlight=False)
            case events.Finished(name, state):
                seconds = self._clocks.stop(name)
                # The words of a build have the compiler's own time, without the start of its process.
                time_text = "" if seconds is None or state == "built" else f" [dim]{seconds:.1f} s[/dim]"
                self._print(state, name, event.outcome, time_text)
            case events.VerdictReached(name, verdict):
                self._print(verdict, f"verdict on {name}", event.outcome)
            case events.VersionSettled(name, text):
                self._print("done", name, text)

    def _print(self, state: str, name: str, words: str, took: str = "") -> None:
        mark = _MARKS.get(state, "[green]✓[/green]")
        self._console.print(f"{mark} {_plain(name)}: {_plain(words)}{took}", highlight=False)

    def _draw(self) -> "RenderableType":
        from rich.spinner import Spinner
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        for clock in self._clocks.list_running():
            table.add_row(Spinner("dots"), _plain(clock.name), f"[dim]{_plain(clock.text)}[/dim]")
        for names, reason in self._clocks.waits():
            wait_text = f"{join_first(names)}: waiting: {reason}"
            table.add_row("…", f"[dim]{_plain(wait_text)}[/dim]", "")
        return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(visible(text))


def together(display: Progress, *listeners: Progress) -> Progress:
    """A `Progress` that sends each event to all of these, the display first.

    An error in the display stops the run. Another listener that raises gets no more events, with a warning on stderr.
    """
    return _Together(display, list(listeners)) if listeners else display


class _Together(Progress):
    def __init__(self, display: Progress, listeners: list[Progress]) -> None:
        self._display, self._others, self.by = display, listeners, display.by

    def of_run(self, model: str, run: str) -> Progress:
        return _Together(self._display.of_run(model, run), [listener.of_run(model, run) for listener in self._others])

    def emit(self, event: Event) -> None:
        self._display.emit(event)
        for listener in list(self._others):
            try:
                listener.emit(event)
            except Exception as error:  # whatever is wrong with a listener, builds are worth more than what it sees
                if listener in self._others:
                    self._others.remove(listener)
                    listener_type = type(listener).__name__
                    print(f"warning: {listener_type} gets no more events of this run: {error!r}", file=sys.stderr)

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
        with LiveTable() as display:
            yield display
    else:
        yield Lines()
