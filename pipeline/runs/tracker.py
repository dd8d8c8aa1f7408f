"""The state of this run, kept up to date by what is told of it."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from builders.errors import StepError
from builders.jobs import Usage
from builders.plural import pluralize
from pipeline.history import Past
from pipeline.moment import precise_now
from pipeline.progress.events import VERDICT, Silent, state_of
from pipeline.runs.logs import KeptLog
from pipeline.runs.state import ITEM_STATES, OVER, Item, RunState, told_of

if TYPE_CHECKING:
    from pipeline.history import Expectation
    from pipeline.outcome import Outcome
    from pipeline.values import BuildPlan


class Tracker(Silent):
    """Hears everything and keeps the last of it; `Recorder` writes it down. Every method is short: jobs wait for it."""

    def __init__(self, run: RunState, scrub: Callable[[str], str]) -> None:
        self._lock = threading.Lock()
        self._run, self._scrub = run, scrub
        self._items: dict[str, Item] = {item.name: item for item in run.items}
        self._graphs: dict[str, str] = {}
        self._logs: dict[str, KeptLog] = {}
        self._closed: list[tuple[str, KeptLog]] = []
        self._pasts: list[tuple[str, str, Past]] = []
        self._changes = self._printed = 0

    # what is told

    def planned(self, plan: "BuildPlan") -> None:
        """List the units."""
        with self._lock:
            for unit in plan.units:
                request, refused = unit.request, unit.action == "refused"
                state, why = ("refused", unit.reason) if refused else ("planned", "")
                named = (request.target.name, request.precision, request.backend)
                self._items[unit.name] = Item(unit.name, state, *named, why=why)
                self._graphs[unit.name] = request.model
            self._changes += 1

    def expects(self, name: str, expectation: "Expectation") -> None:
        """Note the prediction."""
        self._note(name, predicted=expectation)

    def waiting(self, name: str, why: str) -> None:
        """Note what it waits for."""
        known = self._items.get(name)
        if known is None or (known.state, known.why) != ("waiting", why):
            self._note(name, state="waiting", why=why, phase="")

    def started(self, name: str, where: str = "here") -> None:
        """Note where and since when."""
        self._note(name, state="running", where=where, why="", phase="", started_at=precise_now(), ended_at=None)

    def phase(self, name: str, phase: str) -> None:
        """Note it."""
        self._note(name, phase=phase)

    def said(self, name: str, text: str) -> None:
        """Keep it, without credentials."""
        with self._lock:
            if name not in self._logs:
                self._logs[name] = KeptLog(self._scrub)
            self._logs[name].feed(text)
            self._printed += 1

    def retrying(self, name: str, why: str) -> None:
        """Note why."""
        known = self._items.get(name)
        self._note(name, retries=(*(known.retries if known else ()), self._scrub(why)), phase="")

    def ended(self, name: str, usage: Usage) -> None:
        """Note what it took, and hand its log over."""
        self._note(name, seconds=round(usage.seconds, 3), peak_mib=round(usage.peak_mib, 1), ended_at=precise_now())
        with self._lock:
            if log := self._logs.pop(name, None):
                log.close()
                if not log.empty:
                    self._closed.append((name, log))
                self._printed += 1

    def finished(self, name: str, outcome: str) -> None:
        """Note how it ended; a verdict belongs to its unit."""
        state, reason = state_of(outcome)
        if name.startswith(VERDICT):
            self._note(name.removeprefix(VERDICT), verdict=self._scrub(outcome))
            return
        if name.startswith(f"{self._run.model}@"):
            return  # the version, of which `concluded` tells
        self._note(name, state=state if state in ITEM_STATES else "done", why=self._scrub(reason), phase="")
        self._learn(name, state)

    def concluded(self, outcome: "Outcome") -> None:
        """Note the version."""
        failed = len(outcome.failed)
        reason = (
            "no engine passed" if outcome.version is None else f"{pluralize(failed, 'unit')} failed" if failed else ""
        )
        with self._lock:
            self._run = replace(self._run, version=outcome.version, reason=reason)
            self._changes += 1

    # what is asked

    @property
    def run(self) -> str:
        """The run's name in the registry."""
        return self._run.id

    @property
    def cached(self) -> int:
        """Units that were found built."""
        with self._lock:
            return sum(item.is_unit and item.state == "cached" for item in self._items.values())

    @property
    def changes(self) -> int:
        """Grows with every event but output."""
        return self._changes

    @property
    def printed(self) -> int:
        """Grows with every piece of output."""
        return self._printed

    def end(self, error: BaseException | None) -> None:
        """The run is over; what still ran is not running any more."""
        with self._lock:
            # Ctrl-C, SIGTERM, Prefect's cancelling: none is an Exception, and what they kill may be told of first.
            cancelled = isinstance(error, StepError) and error.kind == "cancelled"
            stopped = cancelled or not isinstance(error, Exception | None)
            bad = error is not None or bool(self._run.reason)
            state = "interrupted" if stopped else "failed" if bad else "done"
            reason = self._scrub(str(error).strip()[:2000]) if error and not stopped else self._run.reason
            left = "cancelled" if stopped or error is not None else "done"
            ended = self._run.ended_at or precise_now()
            for name, item in self._items.items():
                if item.state not in OVER:
                    at = item.ended_at or (ended if item.started_at else None)
                    self._items[name] = replace(item, state=left, phase="", ended_at=at)
            self._run = replace(self._run, state=state, reason=reason, ended_at=ended)
            self._changes += 1

    def snapshot(self, heard_at: str) -> RunState:
        """The run as it is now."""
        with self._lock:
            items = told_of(list(self._items.values()))
            return replace(self._run, heard_at=heard_at, items=items, left_out=len(self._items) - len(items))

    def live(self) -> dict[str, str]:
        """The end of what each running job printed."""
        with self._lock:
            return {name: log.last() for name, log in self._logs.items() if not log.empty}

    def closed_logs(self) -> Iterator[tuple[str, KeptLog]]:
        """Logs of jobs that ended, each once; `stored` says where they are."""
        with self._lock:
            closed, self._closed = self._closed, []
        yield from closed

    def stored(self, name: str, digest: str, size_bytes: int) -> None:
        """A log is in the registry."""
        self._note(name, log=digest, log_bytes=size_bytes)

    def pasts(self) -> list[tuple[str, str, Past]]:
        """Builds that ended since the last time: backend, digest of the graph, and what it took (graph_bytes 0)."""
        with self._lock:
            found, self._pasts = self._pasts, []
        return found

    def _note(self, name: str, **fields: object) -> None:
        with self._lock:
            known = self._items.get(name) or Item(name, "running")
            self._items[name] = replace(known, **fields)  # type: ignore[arg-type]
            self._changes += 1

    def _learn(self, name: str, state: str) -> None:
        item = self._items[name]
        if item.is_unit and item.seconds is not None and state != "cached":
            past = Past(
                self._run.model,
                item.target,
                item.precision,
                0,
                item.seconds,
                item.peak_mib or 0.0,
                state,
                precise_now(),
            )
            with self._lock:
                self._pasts.append((item.backend, self._graphs[name], past))
