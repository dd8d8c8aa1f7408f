"""The state of the run of this process, kept up to date by its events."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from builders.execution.jobs import Usage
from enginesmith.compile_caches.recipe import BACKEND, PRECISION
from enginesmith.core.errors import StepError
from enginesmith.core.text import pluralize, precise_now
from enginesmith.registry.builds.build_history import Past
from enginesmith.registry.builds.runs import OVER, ItemState, RunItem, RunState, State, limit_items
from pipeline.orchestration.runs.logs import KeptLog
from pipeline.progress import events

if TYPE_CHECKING:
    from pipeline.cache_unit import CacheUnit
    from pipeline.values import BuildPlan


class Tracker(events.Progress):
    """Receives every event and keeps the state that follows; `RunRecorder` writes it. Jobs wait for each method, so all
    are short. scrub: replaces what is secret in a text."""

    def __init__(self, run: RunState, scrub: Callable[[str], str]) -> None:
        self._lock = threading.Lock()
        self._run, self._scrub = run, scrub
        self._items: dict[str, RunItem] = {item.name: item for item in run.items}
        self._graphs: dict[str, tuple[str, int]] = {}
        self._logs: dict[str, KeptLog] = {}
        self._closed: list[tuple[str, KeptLog]] = []
        self._pasts: list[tuple[str, str, Past]] = []
        self._changes = self._printed = 0

    def emit(self, event: events.Event) -> None:
        """Keep what follows from an event; printed text without credentials."""
        match event:
            case events.Planned(plan):
                self._plan(plan)
            case events.PlannedCaches(units):
                self._plan_caches(units)
            case events.Finished(name, state, reason):
                kept = state if state in get_args(ItemState) else "done"
                self._note(name, state=kept, why=self._scrub(reason), phase="")
                self._learn(name, state)
            case events.VerdictReached(name):
                self._note(name, verdict=self._scrub(event.outcome))
            case events.RunConcluded(outcome):
                failed = len(outcome.failed)
                reason = f"{pluralize(failed, 'unit')} failed" if failed else ""
                with self._lock:
                    reason = "no engine passed" if outcome.version is None else reason
                    self._run = replace(self._run, version=outcome.version, reason=reason)
                    self._changes += 1
            case _:
                self._follow(event)

    def _follow(self, event: events.Event) -> None:
        """Keep what happens to a step or unit before it ends."""
        match event:
            case events.Predicted(name, expectation):
                self._note(name, predicted=expectation)
            case events.Waiting(name, why):
                known = self._items.get(name)
                if known is None or (known.state, known.why) != ("waiting", why):
                    self._note(name, state="waiting", why=why, phase="")
            case events.Started(name, where):
                at = precise_now()
                self._note(name, state="running", where=where, why="", phase="", started_at=at, ended_at=None)
            case events.PhaseEntered(name, phase):
                self._note(name, phase=phase)
            case events.Printed(name, text):
                self._print(name, text)
            case events.Retrying(name, why):
                known = self._items.get(name)
                self._note(name, retries=(*(known.retries if known else ()), self._scrub(why)), phase="")
            case events.ProcessEnded(name, usage):
                self._end_process(name, usage)

    def _plan(self, plan: "BuildPlan") -> None:
        with self._lock:
            for unit in plan.units:
                request, refused = unit.request, unit.action == "refused"
                named = (request.target.name, request.precision, request.backend)
                why = unit.reason if refused else ""
                self._items[unit.name] = RunItem(unit.name, "refused" if refused else "planned", *named, why=why)
                self._graphs[unit.name] = request.model, unit.graph.shard_bytes
            self._changes += 1

    def _plan_caches(self, units: "Sequence[CacheUnit]") -> None:
        with self._lock:
            for unit in units:
                state: ItemState = "refused" if unit.action == "refused" else "planned"
                why = unit.reason if state == "refused" else ""
                self._items[unit.name] = RunItem(unit.name, state, unit.target.name, PRECISION, BACKEND, why=why)
            self._changes += 1

    def _print(self, name: str, text: str) -> None:
        with self._lock:
            if name not in self._logs:
                self._logs[name] = KeptLog(self._scrub)
            self._logs[name].feed(text)
            self._printed += 1

    def _end_process(self, name: str, usage: Usage) -> None:
        """Keep what a job took, and close its log."""
        cpu_s = None if usage.cpu_s is None else round(usage.cpu_s, 2)
        took = {"seconds": round(usage.seconds, 3), "cpu_s": cpu_s, "peak_mib": round(usage.peak_mib, 1)}
        self._note(name, **took, ended_at=precise_now())
        with self._lock:
            if log := self._logs.pop(name, None):
                log.close()
                if not log.empty:
                    self._closed.append((name, log))
                self._printed += 1

    @property
    def run(self) -> str:
        """The run's id in the registry."""
        return self._run.id

    @property
    def cached(self) -> int:
        """Units that were found built."""
        with self._lock:
            return sum(item.is_unit and item.state == "cached" for item in self._items.values())

    @property
    def changes(self) -> int:
        """A number that grows with every event except printed text."""
        return self._changes

    @property
    def printed(self) -> int:
        """A number that grows with every piece of printed text."""
        return self._printed

    def end(self, error: BaseException | None) -> None:
        """Set how the run ended, and end the steps and units that still ran. error: what ended it, None for nothing."""
        with self._lock:
            # Ctrl-C, SIGTERM and Prefect's cancelling raise no Exception; the job that they kill may be reported first.
            cancelled = isinstance(error, StepError) and error.kind == "cancelled"
            stopped = cancelled or not isinstance(error, Exception | None)
            bad = error is not None or bool(self._run.reason)
            state: State = "interrupted" if stopped else "failed" if bad else "done"
            reason = self._scrub(str(error).strip()[:2000]) if error and not stopped else self._run.reason
            left: ItemState = "cancelled" if stopped or error is not None else "done"
            ended = self._run.ended_at or precise_now()
            for name, item in self._items.items():
                if item.state not in OVER:
                    at = item.ended_at or (ended if item.started_at else None)
                    self._items[name] = replace(item, state=left, phase="", ended_at=at)
            self._run = replace(self._run, state=state, reason=reason, ended_at=ended)
            self._changes += 1

    def snapshot(self, heard_at: str) -> RunState:
        """The state of the run now, with so many items that it fits into a document."""
        with self._lock:
            items = limit_items(list(self._items.values()))
            return replace(self._run, heard_at=heard_at, items=items, left_out=len(self._items) - len(items))

    def live(self) -> dict[str, str]:
        """The end of what each running job has printed, by name."""
        with self._lock:
            return {name: log.last() for name, log in self._logs.items() if not log.empty}

    def closed_logs(self) -> Iterator[tuple[str, KeptLog]]:
        """The logs of jobs that ended, each once; `note_log` takes where they were stored."""
        with self._lock:
            closed, self._closed = self._closed, []
        yield from closed

    def note_log(self, name: str, digest: str, size_bytes: int) -> None:
        """Keep where a job's log is: digest of its blob."""
        self._note(name, log=digest, log_bytes=size_bytes)

    def pasts(self) -> list[tuple[str, str, Past]]:
        """Builds that ended since the last time: backend, digest of the graph, and what it took. graph_bytes: of the
        graph's shards alone."""
        with self._lock:
            found, self._pasts = self._pasts, []
        return found

    def _note(self, name: str, **fields: object) -> None:
        with self._lock:
            known = self._items.get(name) or RunItem(name, "running")
            self._items[name] = replace(known, **fields)  # type: ignore[arg-type]
            self._changes += 1

    def _learn(self, name: str, state: str) -> None:
        item = self._items[name]
        if item.is_unit and name in self._graphs and item.seconds is not None and state != "cached":
            took = (item.seconds, item.peak_mib or 0.0)
            graph, shard_bytes = self._graphs[name]
            past = Past(self._run.model, item.target, item.precision, shard_bytes, *took, state, precise_now())
            with self._lock:
                self._pasts.append((item.backend, graph, past))
