"""A small registry with a rollout, and nodes that look, swap and report with the real code, in simulated time."""

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from enginery.client.locate import VersionLocator
from enginery.core.errors import UnavailableError
from enginery.core.names import parse_reference
from enginery.registry.manifest import Manifest
from enginery.registry.rollouts.reports import NodeReport, report_key, write_report
from enginery.registry.rollouts.state import Gates, Rollout, RolloutPlan, format_time
from enginery.registry.rollouts.waves import ServingNode, is_reached, parse_wave, reports
from enginery.registry.store.layout import MARKER, MARKER_CONTENT
from enginery.registry.versions.pointers import read_pointer
from pipeline.rollout.operations import Operator, start
from tests.enginery.registries import engine, publish_engines
from tests.enginery.registry.memory import MemoryStore

BEGIN = datetime(2026, 11, 1, 12, tzinfo=UTC)
WHERE = ("digits", "stable")


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def plan(*waves: str, soak: int = 600, step: int | None = None, **gates: Any) -> RolloutPlan:
    found = tuple(parse_wave(text) for text in waves or ("1%", "5%", "25%", "100%"))
    return RolloutPlan(found, (soak,) * len(found), Gates(**gates), step_ppm=step)


def registry() -> tuple[Any, Manifest, Manifest]:
    """A store in memory with digits:stable at version 1, and version 2."""
    store: Any = MemoryStore({MARKER: MARKER_CONTENT})
    one = publish_engines(store, [engine(store, data=b"one")], "one", channel="stable").manifest
    two = publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest
    return store, one, two


def begin(store: Any, manifest: Manifest, wanted: RolloutPlan, seconds: float = 0, by: str = "ada") -> Rollout:
    return start(store, manifest, "stable", wanted, Operator(by, at(seconds), "a better one"))


def served(store: Any, node: ServingNode) -> str:
    return VersionLocator(store, node=node).locate(parse_reference("digits:stable")).manifest.version


@dataclass
class Watcher:
    """A node that looks every 30 s, a fifth more or less; `bad` is what fails on it, '' for nothing."""

    node: ServingNode
    due: float
    version: str = "1"
    swaps: list[float] = field(default_factory=list)
    cut_off: bool = False
    written: bytes | None = None

    def look(self, store: Any, second: float, rng: random.Random, bad: Any) -> None:
        self.due = second + 30 * rng.uniform(0.8, 1.2)
        if self.cut_off:
            return
        pointer = read_pointer(store, *WHERE)
        assert pointer is not None
        found = pointer.served_to(self.node)
        if found is None:
            raise UnavailableError("the pointer is marked")
        if found.version != self.version:
            self.version = found.version
            self.swaps.append(second)
        told = pointer.rollout
        if told is None or not is_reached(self.node, told.id, told.reach):
            return
        if reports(self.node, told.id, told.reporters_ppm):
            time = format_time(at(second))
            failure = "unhealthy" if bad(self.node) and self.version == told.candidate.version else ""
            report = NodeReport(self.node.name, self.node.region, self.version, time, time, failure)  # type: ignore[arg-type]
            key = report_key(*WHERE, told.id, self.node.name)
            self.written = write_report(store, key, report, store.objects.get(key))


def fleet(count: int, seed: int = 0, regions: int = 1) -> list[Watcher]:
    rng = random.Random(seed)
    return [
        Watcher(ServingNode(f"node-{number}", f"region-{number % regions}"), rng.uniform(0, 30))
        for number in range(count)
    ]
