"""Progress for machines: one JSON object on one line of stderr for each event.

Every object has time (ISO 8601, UTC), level (info, warning or error) and event; where they apply model, run, and unit
(the name of a unit or a step). What an event adds beside these stands in docs/observability.md.
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from builders.jobs import Usage
from builders.visible import visible_json
from pipeline.moment import precise_now
from pipeline.progress.clocks import Clocks
from pipeline.progress.events import VERDICT, Silent, state_of

if TYPE_CHECKING:
    from pipeline.history import Expectation
    from pipeline.outcome import Outcome
    from pipeline.values import BuildPlan

_LEVELS = {"failed": "error", "unproven": "warning"}


class JsonLines(Silent):
    """Writes the events, each with `write`. about: what stands on every line."""

    def __init__(self, write: Callable[[str], object] | None = None, **about: str) -> None:
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._lock = threading.Lock()
        self._about = about
        self._clocks = Clocks()

    def tell(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write one line. Fields that are None are left out."""
        given = {name: value for name, value in fields.items() if value is not None}
        line = json.dumps(
            {"time": precise_now(), "level": level, "event": event, **self._about, **given}, ensure_ascii=False
        )
        self._write_alone(visible_json(line))

    def of_run(self, model: str, run: str) -> "JsonLines":
        """Both stand on every line about it."""
        return JsonLines(self._write_alone, **self._about, model=model, run=run)

    def began(self, model: str, run: str) -> None:  # noqa: ARG002 - they stand on the line
        """That it did."""
        self.tell("began")

    def _write_alone(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def planned(self, plan: "BuildPlan") -> None:
        """How many units are built, cached and refused."""
        found = Counter(unit.action for unit in plan.units)
        self.tell("planned", build=found["build"], cached=found["cached"], refused=found["refused"])

    def expects(self, name: str, expectation: "Expectation") -> None:
        """The prediction."""
        self.tell("predicted", unit=name, **expectation.to_json())

    def waiting(self, name: str, why: str) -> None:
        """What it waits for, when that is news."""
        if self._clocks.waiting(name, why):
            self.tell("waiting", unit=name, why=why)

    def started(self, name: str, where: str = "here") -> None:
        """Where it runs."""
        self._clocks.gone(name)
        self.tell("started", unit=name, where=where)

    def phase(self, name: str, phase: str) -> None:
        """What it does."""
        self.tell("phase", unit=name, phase=phase)

    def retrying(self, name: str, why: str) -> None:
        """Why it is started once more."""
        self.tell("retrying", "warning", unit=name, why=why)

    def ended(self, name: str, usage: Usage) -> None:
        """What it took."""
        self.tell("ended", unit=name, seconds=round(usage.seconds, 3), peak_mib=round(usage.peak_mib, 1))

    def finished(self, name: str, outcome: str) -> None:
        """How it ended; the verdict on a unit is an event of its own."""
        state, reason = state_of(outcome)
        event = "verdict" if name.startswith(VERDICT) else "finished"
        level = _LEVELS.get(state, "info")
        self.tell(event, level, unit=name.removeprefix(VERDICT), state=state, outcome=outcome, reason=reason or None)

    def concluded(self, outcome: "Outcome") -> None:
        """The version."""
        level = "error" if outcome.version is None or outcome.failed else "info"
        self.tell("concluded", level, version=outcome.version, cached=outcome.cached, failed=len(outcome.failed))
