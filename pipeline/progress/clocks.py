"""What runs now, since when, in which phase, and for how long still; and what waits, and why: for the displays."""

import re
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        left = self.expectation.describe_left(self.elapsed_s) if self.expectation else ""
        return ", ".join(part for part in (f"{self.elapsed_s:.0f} s", self.phase, left) if part)


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

    def expects(self, name: str, expectation: "Expectation") -> None:
        """Keep the prediction until the unit starts."""
        with self._lock:
            self._expected[name] = expectation

    def note_wait(self, name: str, why: str, *, once: bool = False) -> bool:
        """Whether a wait is to be shown: its reason is another one, or its times have changed for `RECOUNT_S`.

        once: a reason for which something else waits already is not to be shown either.
        """
        new = Wait(why, time.monotonic())
        with self._lock:
            alike = [wait for each, wait in self._waits.items() if (once or each == name) and wait.reason == new.reason]
            shown_at = max((wait.shown_at for wait in alike), default=None)
            if shown_at is not None and (why in {wait.why for wait in alike} or new.shown_at < shown_at + RECOUNT_S):
                self._waits[name] = Wait(why, shown_at)
                return False
            self._waits[name] = new
            return True

    def waits(self) -> list[tuple[list[str], str]]:
        """What waits now, together where the reason is the same, and why."""
        found: dict[str, tuple[list[str], str]] = {}
        with self._lock:
            for name, wait in self._waits.items():
                names, _ = found.setdefault(wait.reason, ([], wait.why))
                names.append(name)
        return list(found.values())

    def start(self, name: str) -> None:
        """Start its clock, afresh after a retry."""
        with self._lock:
            self._waits.pop(name, None)
            self._running[name] = StepClock(name, expectation=self._expected.get(name))

    def phase(self, name: str, phase: str) -> None:
        """Note its phase."""
        with self._lock:
            if known := self._running.get(name):
                self._running[name] = replace(known, phase=phase)

    def stop(self, name: str) -> float | None:
        """Stop its clock; how long it ran, None when it did not."""
        with self._lock:
            known = self._running.pop(name, None)
            self._expected.pop(name, None)
            self._waits.pop(name, None)
        return known.elapsed_s if known else None

    def of(self, name: str) -> StepClock | None:
        """Its clock while it runs."""
        return self._running.get(name)

    def list_running(self) -> list[StepClock]:
        """Every clock that runs, in the order in which they were started."""
        with self._lock:
            return list(self._running.values())
