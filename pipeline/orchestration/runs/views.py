"""A run's state as it reads at a moment, and its logs."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from builders.execution.scrub import HIDDEN
from enginesmith.core.parsing import Presence
from enginesmith.core.text import format_age
from enginesmith.registry.builds.runs import OVER, RunItem, RunState, find_ages
from enginesmith.registry.store.base import Store

# The output of a job, kept within bounds and without credentials.
#
# Whole lines are scrubbed before anything is cut, as a cut through a secret would hide it from the scrubber. A line
# that has not ended yet is not shown.

# Number of first and of last bytes of a job that are kept.
HEAD_BYTES = 1 << 20
TAIL_BYTES = 3 << 20
# Number of characters of a job that are shown while it runs.
LIVE_BYTES = 16 << 10
# Maximum length of a line. The margin is cut after scrubbing, because a secret may cross the first cut.
LONGEST_LINE = 64 << 10
MARGIN = 4 << 10
# Number of characters scrubbed at once: scrubbing line by line would cost more than the rest of watching a build.
PIECE = 64 << 10
_KEY_BEGINS, _KEY_ENDS = "-----BEGIN ", "-----END "
_LINE_END = re.compile(r"(?<=[\n\r])")


class KeptLog:
    """The log of one job; for one thread at a time. scrub: replaces what is secret in a text of whole lines."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub
        self._open = ""
        self._dropping = self._in_key = False
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._head_bytes = self._tail_bytes = self._left_out = 0

    def feed(self, text: str) -> None:
        """Add what was printed next; it may end anywhere."""
        for start in range(0, len(text), PIECE):
            piece = self._open + text[start : start + PIECE]
            end = max(piece.rfind("\n"), piece.rfind("\r")) + 1
            self._open = piece[end:]
            self._take(piece[:end])
            if len(self._open) > LONGEST_LINE:
                if not self._dropping:
                    self._keep(self._scrub(self._open)[: LONGEST_LINE - MARGIN] + " [the line is longer]\n")
                    self._dropping = True
                self._open = ""

    def close(self) -> None:
        """Take the last line, which has no end."""
        open_line, self._open = self._open, ""
        self._take(open_line)

    @property
    def empty(self) -> bool:
        """Whether nothing was printed."""
        return not (self._head or self._open)

    def text(self) -> str:
        """Head and tail, with a line that says what was left out between them."""
        gap_note = f"\n[... {self._left_out} bytes were left out ...]\n" if self._left_out else ""
        return "".join(self._head) + gap_note + "".join(self._tail)

    def last(self, limit: int = LIVE_BYTES) -> str:
        """The end of what is kept, at most so many characters."""
        texts: list[str] = []
        length = 0
        for lines in [*reversed(self._tail), *reversed(self._head)]:
            texts.append(lines)
            length += len(lines)
            if length >= limit:
                break
        return "".join(reversed(texts))[-limit:]

    def _take(self, lines: str) -> None:
        """Keep whole lines, without private keys and scrubbed."""
        if lines and self._dropping:  # first the rest of a line that was cut
            self._dropping = False
            lines = _LINE_END.split(lines, 1)[1] if _LINE_END.search(lines) else ""
        if self._in_key or _KEY_BEGINS in lines:
            lines = "".join(map(self._without_key, _LINE_END.split(lines)))
        if lines:
            self._keep(self._scrub(lines))

    def _without_key(self, line: str) -> str:
        """The line; a private key, whose lines look like any others, is replaced by one word."""
        if self._in_key:
            self._in_key = _KEY_ENDS not in line
            return ""
        self._in_key = _KEY_BEGINS in line and "PRIVATE KEY" in line and _KEY_ENDS not in line
        return f"{HIDDEN}\n" if self._in_key else line

    def _keep(self, lines: str) -> None:
        size = len(lines.encode(errors="replace"))
        if not self._tail and self._head_bytes + size <= HEAD_BYTES:
            self._head.append(lines)
            self._head_bytes += size
            return
        self._tail.append(lines)
        self._tail_bytes += size
        while self._tail_bytes > TAIL_BYTES:
            dropped_bytes = len(self._tail.popleft().encode(errors="replace"))
            self._tail_bytes -= dropped_bytes
            self._left_out += dropped_bytes


# A driver that has missed this many signs of life counts as dead, also on another machine.
MISSED_BEATS = 3


@dataclass(frozen=True)
class StepTime:
    """What the processes of one kind of step took: how many there were, their seconds, and those of CPU time."""

    step: str
    processes: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class RunView:
    """A run as it is read at `at`, by the clock of its machine."""

    run: RunState
    at: datetime

    @property
    def silent_s(self) -> float:
        """Seconds since its driver was last heard."""
        return max(0.0, _seconds(self.run.heard_at, self.at))

    @property
    def lost(self) -> str:
        """Why its driver counts as dead; '' when it does not."""
        if self.run.state != "running":
            return ""
        driver = f"its driver (process {self.run.pid} on {self.run.host})"
        silence = (
            f"no sign of life since {self.run.heard_at[:19].replace('T', ' ')} UTC, {format_age(self.silent_s)} ago"
        )
        # Not before a beat has passed: a run that ends writes so after its process was seen, and before it is gone.
        process = Presence(self.run.host, self.run.namespace, self.run.pid, self.run.began)
        if self.silent_s > self.run.beats_every_s and process.has_ended:
            return f"{silence}: {driver} is not running any more"
        if self.silent_s > MISSED_BEATS * self.run.beats_every_s:
            return f"{silence}: {driver} died, or does not reach the registry"
        return ""

    @property
    def state(self) -> str:
        """The run's state, or 'lost'."""
        return "lost" if self.lost else self.run.state

    @property
    def took_s(self) -> float:
        """Seconds from its start to its end; for a lost run, to its last heartbeat."""
        end = self.run.ended_at or (self.run.heard_at if self.lost else None)
        return _seconds(self.run.started_at, _moment(end) if end else self.at)

    @property
    def counts(self) -> str:
        """'2 built, 1 failed, 3 refused'."""
        state_counts = Counter(self.item_state(item) for item in self.run.units)
        return ", ".join(f"{count} {state}" for state, count in state_counts.items())

    def item_state(self, item: RunItem) -> str:
        """A unit's state; 'lost' where a dead driver left it running."""
        return "lost" if self.lost and item.state not in OVER else item.state

    def elapsed_s(self, item: RunItem) -> float | None:
        """Seconds that a unit took, or has taken so far; None when it has not begun."""
        if item.state in OVER and item.seconds is not None:
            return item.seconds
        if item.started_at is None:
            return None
        end = item.ended_at or (self.run.heard_at if self.lost else None)
        return _seconds(item.started_at, _moment(end) if end else self.at)

    def format_remaining(self, item: RunItem) -> str:
        """'~40 s left (predicted from 3 builds of this unit)', of a unit that runs."""
        if item.predicted is None or self.item_state(item) != "running":
            return ""
        return item.predicted.describe_left(self.elapsed_s(item) or 0.0)

    def describe(self, item: RunItem) -> str:
        """Why a unit waits or failed, how long it will take, and how often it was started again."""
        retry_text = f"started {len(item.retries) + 1} times: {item.retries[-1]}" if item.retries else ""
        return "; ".join(note for note in (self.format_remaining(item), item.why, item.verdict, retry_text) if note)

    def spent(self) -> list[StepTime]:
        """What the processes of each kind of step took together, the longest first."""
        times_by_step: dict[str, list[tuple[float, float]]] = {}
        for item in self.run.items:
            if item.seconds is not None:
                step = "build" if item.is_unit else item.name.split()[0]
                times_by_step.setdefault(step, []).append((item.seconds, item.cpu_s or 0.0))
        step_times = [
            StepTime(step, len(times), sum(seconds for seconds, _ in times), sum(cpu_s for _, cpu_s in times))
            for step, times in times_by_step.items()
        ]
        return sorted(step_times, key=lambda step_time: -step_time.seconds)

    def summary(self) -> dict[str, object]:
        """A run of `enginesmith status --json`."""
        run = self.run
        reason = self.lost or run.reason
        run_fields = {name: getattr(run, name) for name in ("model", "version", "spec", "host", "pid", "user", "by")}
        time_fields = {"started_at": run.started_at, "ended_at": run.ended_at, "seconds": round(self.took_s, 1)}
        return {"run": run.id, "state": self.state, **run_fields, **time_fields, "units": self.counts, "reason": reason}

    def to_json(self) -> dict[str, object]:
        """The run with its items, as `enginesmith status RUN --json` prints it."""
        items = []
        for item in self.run.items:
            elapsed_s = self.elapsed_s(item)
            row = {**asdict(item), "state": self.item_state(item), "unit": item.is_unit}
            items.append({**row, "elapsed_s": elapsed_s, "remaining": self.format_remaining(item)})
        step_documents = [asdict(step) for step in self.spent()]
        return {**self.summary(), "heard_at": self.run.heard_at, "spent": step_documents, "items": items}


def view_runs(store: Store, runs: Iterable[RunState]) -> list[RunView]:
    """The current view of runs: a running one was last heard when its document was written, by the store's clock."""
    run_states = list(runs)
    ages = find_ages(store) if any(run.state == "running" for run in run_states) else {}
    return [RunView(run, _later(_moment(run.heard_at), ages.get(run.id, timedelta(0)))) for run in run_states]


def _later(moment: datetime, age: timedelta) -> datetime:
    """A moment and what has passed since; the moment itself if the sum cannot be represented."""
    try:
        return moment + age
    except OverflowError:
        return moment


def _moment(stamp: str) -> datetime:
    """A time of a document, in UTC where it has no zone; 1970 for a text that is no time."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _seconds(stamp: str, end: datetime) -> float:
    return max(0.0, (end - _moment(stamp)).total_seconds())
