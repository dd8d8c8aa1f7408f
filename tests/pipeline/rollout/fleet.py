"""A small registry with a rollout, and nodes that look, swap and report with the real code, in simulated time."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heapify, heapreplace
from typing import Any

from enginesmith.client.locate import VersionLocator
from enginesmith.client.watching.server import GRACE_S
from enginesmith.core.errors import digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.reports import HEARTBEAT_S, LEAST_S, NodeReport, report_key, write_report
from enginesmith.registry.rollouts.rollout_state import (
    Gates,
    Rollout,
    RolloutPlan,
    ServingNode,
    format_time,
    is_reached,
    is_reporter,
    parse_wave,
)
from enginesmith.registry.store.layout import MARKER, MARKER_CONTENT, channel_key
from enginesmith.registry.versions.channel_state import Channel, read_channel
from pipeline.rollout.advance import advance
from pipeline.rollout.operations import Operator, start
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore

BEGIN = datetime(2026, 11, 1, 12, tzinfo=UTC)
WHERE = ("digits", "stable")
NODES = [ServingNode(f"node-{number}") for number in range(400)]


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def look(store: Any, seconds: float) -> Rollout:
    """The controller's look; where it reached more nodes, another in the same second, so that their time begins."""
    store.clock.now = at(seconds)
    result = advance(store, *WHERE)
    assert result is not None
    if result.action in ("wave", "raised"):
        advance(store, *WHERE)
    return result


def tell(
    store: Any, rollout: Rollout, seconds: float, nodes: Iterable[ServingNode], failure: str = "", **counted: int
) -> None:
    store.clock.now = at(seconds)
    for node in nodes:
        time = format_time(at(seconds))
        report = NodeReport(node.name, "", "2", time, time, failure, "told", **counted)
        key = report_key(*WHERE, rollout.id, node.name)
        write_report(store, key, report, store.objects.get(key))


def reached(rollout: Rollout) -> list[ServingNode]:
    """The nodes of `NODES` that a rollout reaches."""
    return [node for node in NODES if is_reached(node, rollout.id, rollout.reach)]


def plan(*waves: str, soak: int = 600, step: int | None = None, nodes: int | None = None, **gates: Any) -> RolloutPlan:
    result = tuple(parse_wave(text) for text in waves or ("1%", "5%", "25%", "100%"))
    return RolloutPlan(result, (soak,) * len(result), Gates(**gates), look_s=30, step_ppm=step, nodes=nodes)


def registry() -> tuple[Any, Manifest, Manifest]:
    """A store in memory with digits:stable at version 1, and version 2."""
    store: Any = MemoryStore({MARKER: MARKER_CONTENT})
    manifest = publish_engines(store, [engine(store, data=b"one")], "one", channel="stable").manifest
    return store, manifest, publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest


def begin(store: Any, manifest: Manifest, plan: RolloutPlan, seconds: float = 0, by: str = "ada") -> Rollout:
    return start(store, manifest, "stable", plan, Operator(by, at(seconds), "a better one"))


def begin_and_look(store: Any, manifest: Manifest, plan: RolloutPlan) -> Rollout:
    """A rollout whose first wave's time has begun."""
    rollout = begin(store, manifest, plan)
    look(store, 0)
    return rollout


def running(*waves: str, **gates: Any) -> tuple[Any, Rollout]:
    """A registry in which one has begun."""
    store, _, second_manifest = registry()
    return store, begin_and_look(store, second_manifest, plan(*waves, **gates))


def served(store: Any, node: ServingNode) -> str:
    return VersionLocator(store, node=node).locate(parse_reference("digits:stable")).manifest.version


@dataclass
class Watcher:
    """A node that polls every 30 s, +-20 %, with the real code of channels and reports; parses changed channels."""

    node: ServingNode
    version: str = "1"
    swaps: list[float] = field(default_factory=list)
    cut_off: bool = False
    unwell_since: float | None = None
    written: bytes | None = None
    reported: float = -1e9
    told: tuple[str, str] = ("", "")
    seen: Channel | None = None
    reports: bool = False

    def look(self, fleet: "Fleet", second: float) -> None:
        if self.cut_off:
            return
        channel = fleet.read_channel()
        if channel is not self.seen:
            self.seen = channel
            self._follow(channel, second)
        if self.reports:
            self._report(fleet, channel, second)

    def _follow(self, channel: Channel, second: float) -> None:
        served_move = channel.served_to(self.node)
        if served_move.version != self.version:
            self.version, self.unwell_since = served_move.version, None
            self.swaps.append(second)
        message = channel.rollout
        self.reports = (
            message is not None
            and message.serves(self.node)
            and is_reporter(digest_of_bytes(self.node.name.encode()), message.reporters_ppm)
        )

    def _report(self, fleet: "Fleet", channel: Channel, second: float) -> None:
        message = channel.rollout
        assert message is not None
        failure = "unhealthy" if fleet.is_bad(self.node) and self.version == message.version else ""
        if failure:
            self.unwell_since = second if self.unwell_since is None else self.unwell_since
            if second - self.unwell_since < GRACE_S:
                return
        state = (message.id, failure)
        if state[0] != self.told[0]:
            self.written, self.reported = None, -1e9
        if second - self.reported < (LEAST_S if state != self.told else HEARTBEAT_S):
            return
        time = format_time(at(second))
        report = NodeReport(self.node.name, self.node.region, self.version, time, time, failure)
        key = report_key(*WHERE, message.id, self.node.name)
        fleet.store.clock.now = at(second)
        self.written = write_report(fleet.store, key, report, self.written)
        self.told, self.reported = state, second
        fleet.report_writes[int(second) // 10] += 1


@dataclass
class Fleet:
    """Nodes, and a controller that looks every 15 s, in simulated time. is_bad: nodes on which the candidate fails."""

    store: Any
    watchers: list[Watcher]
    is_bad: Callable[[ServingNode], bool] = lambda node: False
    seed: int = 0
    controller_s: float = 15.0
    second: float = 0.0
    actions: list[tuple[float, str, str]] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    report_writes: Counter[int] = field(default_factory=Counter)
    read_by_looks: list[tuple[int, int]] = field(default_factory=list)
    _parsed: tuple[bytes, Channel] | None = None

    @classmethod
    def of(cls, store: Any, count: int, regions: int = 1, **options: Any) -> "Fleet":
        nodes = (ServingNode(f"node-{number}", f"region-{number % regions}") for number in range(count))
        return cls(store, [Watcher(node) for node in nodes], **options)

    def read_channel(self) -> Channel:
        data = self.store.objects[channel_key(*WHERE)]
        if self._parsed is None or self._parsed[0] is not data:
            channel = read_channel(self.store, *WHERE)
            assert channel is not None
            self._parsed = data, channel
        return self._parsed[1]

    def serving(self, version: str) -> int:
        return sum(watcher.version == version for watcher in self.watchers)

    def run(self, until: float, ends: bool = True) -> str:
        """Go on until a second, or until the rollout is finished and every node has looked; the rollout's state."""
        rng = random.Random(self.seed)
        heap = [(self.second + rng.uniform(0, 30), number) for number in range(len(self.watchers))]
        heapify(heap)
        look_at, state = self.second, "running"
        while self.second < until:
            due_item, number = heap[0]
            if look_at <= due_item:
                self.second, look_at = look_at, look_at + self.controller_s
                state = self._control(state)
                if ends and state not in ("running", "paused"):
                    until, ends = min(until, self.second + 40), False
                continue
            self.second = due_item
            self.watchers[number].look(self, due_item)
            heapreplace(heap, (due_item + 30 * rng.uniform(0.8, 1.2), number))
        return state

    def _control(self, state: str) -> str:
        self.store.clock.now = at(self.second)
        result = advance(self.store, *WHERE)
        if result is None:
            return state
        if not self.actions or self.actions[-1][1:] != (result.action, result.why):
            self.actions.append((self.second, result.action, result.why))
        self.read_by_looks.append((result.heard.nodes, len(result.heard.reports)))
        version = result.rollout.version
        self.most[version] = max(self.most.get(version, 0), self.serving(version))
        return result.rollout.state
