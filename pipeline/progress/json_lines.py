"""Progress for machines: one JSON object on one line of stderr for each event.

Every object has time (ISO 8601, UTC), level (info, warning or error) and event; where they apply model, run, and unit
(the name of a unit or a step). What an event adds beside these stands in docs/guides/observability.md.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable

from enginesmith.core.text import format_line
from pipeline.progress import events
from pipeline.progress.clocks import Clocks

_LEVELS = {"failed": "error", "unproven": "warning"}


class JsonLines(events.Progress):
    """Writes the events, each with `write`. about: what stands on every line."""

    def __init__(self, write: Callable[[str], object] | None = None, **about: str) -> None:
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._lock = threading.Lock()
        self._about = about
        self._clocks = Clocks()

    def tell(self, event: str, level: str = "info", **fields: object) -> None:
        """Write one line. Fields that are None are left out."""
        self._write_alone(format_line(event, level, **self._about, **fields))

    def of_run(self, model: str, run: str) -> "JsonLines":
        """Both stand on every line about it."""
        return JsonLines(self._write_alone, **self._about, model=model, run=run)

    def _write_alone(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def emit(self, event: events.Event) -> None:
        """Write the event's line; of a wait when it is news, of what is printed nothing."""
        match event:
            case events.RunBegan():  # model and run stand on the line
                self.tell("began")
            case events.Planned(plan):
                found = Counter(unit.action for unit in plan.units)
                counts = {action: found[action] for action in ("build", "cached", "refused", "failed")}
                self.tell("planned", "info", **counts)
            case events.RunConcluded(outcome):
                level = "error" if outcome.version is None or outcome.failed else "info"
                failed = len(outcome.failed)
                self.tell("concluded", level, version=outcome.version, cached=outcome.cached, failed=failed)
            case events.VersionSettled(name, words):
                self.tell("finished", unit=name, state="done", outcome=words)
            case events.Finished(name, state, reason):
                level, why = _LEVELS.get(state, "info"), reason or None
                self.tell("finished", level, unit=name, state=state, outcome=event.outcome, reason=why)
            case events.VerdictReached(name, verdict, reason):
                told = {"unit": name, "state": verdict, "outcome": event.outcome, "reason": reason}
                self.tell("verdict", _LEVELS.get(verdict, "info"), **told)
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
