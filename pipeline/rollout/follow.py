"""Follows rollouts: looks at each again and again, and says what was done. A model that is damaged stops no other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from time import monotonic

from enginesmith.core.errors import EnginesmithError
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.rolling import running_rollouts
from pipeline.rollout.advance import Advance, advance

Where = tuple[str, str]
INTERVAL_S = 15.0


@dataclass
class RolloutFollower:
    """Looks at the rollouts of `chosen` (model, channel); None: at all that are not finished.

    say: called with what is new.  on_step: called with each step that this process made.
    """

    store: Store
    chosen: Sequence[Where] | None
    say: Callable[[str], object]
    on_step: Callable[[Advance], object] = lambda _: None
    last: dict[Where, Advance] = field(default_factory=dict)
    failed: dict[Where, str] = field(default_factory=dict)

    def look(self) -> bool:
        """Look at each once; whether one is not finished. Raises UnavailableError where the store does not answer."""
        going = False
        for where in self.chosen or running_rollouts(self.store):
            try:
                found = advance(self.store, *where)
            except EnginesmithError as error:
                going = True
                self._tell(where, f"not looked at: {error}")
                self.failed[where] = str(error)
                continue
            self.failed.pop(where, None)
            if found is not None:
                going = going or not found.rollout.is_finished
                self._take(where, found)
        return going

    def _take(self, where: Where, found: Advance) -> None:
        before = self.last.get(where)
        if before is None or (before.action, before.why) != (found.action, found.why):
            self._tell(where, f"{found.action}: {found.why}")
        self.last[where] = found
        if found.made:
            self.on_step(found)

    def _tell(self, where: Where, text: str) -> None:
        if self.failed.get(where) is None or not text.endswith(self.failed[where]):
            self.say(f"{where[0]}:{where[1]}: {text}")

    def run(self, interval_s: float, lasts_s: float | None = None, forever: bool = False) -> None:
        """Look until nothing is left to do, or so many seconds have passed. forever: wait for what starts later."""
        end = None if lasts_s is None else monotonic() + lasts_s
        while True:
            try:
                going = self.look()
            except EnginesmithError as error:
                going = True
                self.say(f"not looked at: {error}")
            over = end is not None and monotonic() + interval_s > end
            if over or not (going or forever):
                return
            Event().wait(interval_s)
