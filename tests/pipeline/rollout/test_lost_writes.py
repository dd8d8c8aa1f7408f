"""A request that fails at any position: nodes get what the channel says at once, and after a poll everything agrees."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest

from enginesmith.core.errors import EnginesmithError, UnavailableError, UndecidedError
from enginesmith.registry import leases, manifest
from enginesmith.registry.gc import collect
from enginesmith.registry.store.layout import ROLLOUTS
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channel_writes, channels
from enginesmith.registry.versions.channel_state import Channel, read_channel, read_history
from enginesmith.registry.versions.channel_writes import running_rollouts
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import add_attestation
from pipeline.rollout import operations
from pipeline.rollout.advance import RolloutFollower
from pipeline.rollout.operations import Operator
from tests.enginesmith.registries import report
from tests.enginesmith.registry.memory import Killed, MemoryStore, mark_late
from tests.pipeline.rollout.fleet import NODES, WHERE, at, begin, look, plan, registry, running, served, tell
from tests.scheduling import slow_after_first

Work = Callable[[Any], object]
NOBODY, SOME, ALL = {"1"}, {"1", "2"}, {"2"}


@pytest.fixture(autouse=True)
def manifests_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two manifests are read thousands of times."""
    monkeypatch.setattr(manifest, "_read", cache(manifest._read))


@pytest.fixture(autouse=True)
def ids_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id, a rollout chooses the nodes of a wave: one random id in some thousand chooses none of these nodes."""
    numbers = count()
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")


@dataclass
class FailingStore(MemoryStore):
    """A store whose request number `fails_at` fails. how: 'refused' before it is done; 'lost' after it, with no answer;
    'undecided' the same, where a swap says that; 'killed' where its process ends before it."""

    fails_at: int = 0
    how: str = ""
    count: int = 0

    def _do(self, call: str, work: Callable[[], Any]) -> Any:
        self.count += 1
        if self.count != self.fails_at:
            return work()
        if self.how in ("refused", "killed"):
            raise Killed if self.how == "killed" else UnavailableError("503 Slow Down")
        work()
        raise UndecidedError("?") if self.how == "undecided" and call == "replace" else UnavailableError("no answer")


@dataclass(frozen=True)
class Case:
    """store: before.  work: may be repeated.  before, after: nodes' versions and the rollout's states around it."""

    store: Any
    work: Work
    before: tuple[str, set[str]]
    after: tuple[str, set[str]]


def start() -> Case:
    store, _, second_manifest = registry()
    return Case(store, lambda seen: begin(seen, second_manifest, plan("50%", "100%")), ("", NOBODY), ("running", SOME))


def open_wave() -> Case:
    store, _ = running("50%", "100%")
    return Case(store, lambda seen: look(seen, 600), ("running", SOME), ("running", ALL))


def halt() -> Case:
    store, rollout = running("100%", health_ppm=900_000)
    tell(store, rollout, 10, NODES[:20], "unhealthy")
    return Case(store, lambda seen: look(seen, 20), ("running", ALL), ("halted", NOBODY))


def abort() -> Case:
    store, _ = running("100%")
    work: Work = lambda seen: operations.abort(seen, *WHERE, Operator("ada", at(20)))  # noqa: E731
    return Case(store, work, ("running", ALL), ("aborted", NOBODY))


def finish() -> Case:
    store, _ = running("50%", "100%")
    look(store, 600)
    return Case(store, lambda seen: look(seen, 1200), ("running", ALL), ("done", ALL))


def move_all_the_same() -> Case:
    store, _ = running("50%", "100%")
    second_manifest = load(store, "digits", "2")

    def work(seen: Any) -> object:
        with leases.hold_lease(seen, "a promotion by force") as guard:
            return channels.point(guard, second_manifest, "stable", "eve")

    return Case(store, work, ("running", SOME), ("aborted", ALL))


def start_another() -> Case:
    """After one that was halted, which the history has from then on."""
    store, _ = running("100%")
    operations.abort(store, *WHERE, Operator("ada", at(20)))
    two = load(store, "digits", "2")
    return Case(store, lambda seen: begin(seen, two, plan("100%"), 30), ("aborted", NOBODY), ("running", ALL))


def add_evidence() -> Case:
    store, _ = running("50%", "100%")
    second_manifest = load(store, "digits", "2")
    proof = report(second_manifest.engines[0], host="another")
    return Case(store, lambda seen: add_attestation(seen, second_manifest, proof), ("running", SOME), ("running", SOME))


CASES = (start, open_wave, halt, abort, finish, move_all_the_same, start_another, add_evidence)


def failing(case: Case, how: str) -> Iterator[tuple[MemoryStore, bool]]:
    """The store after each single failure, and whether the work was acknowledged all the same."""
    whole_store = FailingStore(dict(case.store.objects))
    case.work(whole_store)
    assert whole_store.count > 3
    for number in range(1, whole_store.count + 1):
        store = FailingStore(dict(case.store.objects), fails_at=number, how=how)
        is_acknowledged = False
        with suppress(EnginesmithError, Killed):
            is_acknowledged = getattr(case.work(store), "action", "") != "beaten"
        yield MemoryStore(store.objects), is_acknowledged


def seen(store: MemoryStore) -> tuple[str, set[str]]:
    """The state of the rollout, and the versions that nodes get. Whatever they get is there."""
    channel = state(store)
    nodes = {channel.served_to(node).version: node for node in NODES[:12]}
    assert all(served(store, node) == version for version, node in nodes.items())
    return channel.rollout.state if channel.rollout else "", set(nodes)


def state(store: Any) -> Channel:
    return read_channel(store, *WHERE)


@pytest.mark.parametrize("how", slow_after_first(["lost", "refused", "killed", "undecided"], 2))
@pytest.mark.parametrize("make", CASES)
def test_a_request_that_fails_anywhere_is_safe(make: Callable[[], Case], how: str) -> None:
    case = make()
    assert seen(case.store) == case.before
    for store, acknowledged_names in failing(case, how):
        after = seen(store)
        assert after in ((case.after,) if acknowledged_names else (case.before, case.after))
        # A controller of all rollouts finds each one that runs.
        assert state(store).active_rollout is None or running_rollouts(store) == [WHERE]
        follower = RolloutFollower(store, None, len)
        store.clock.now = at(20)
        follower.look()
        assert seen(store) == (case.after if make is halt else after) and not follower.failures
        runs = state(store).active_rollout
        assert [key for key in store.objects if key.startswith(ROLLOUTS)] == (
            [f"{ROLLOUTS}digits/stable/{runs.id}.json"] if runs else []
        )
        # Whoever does it again comes to the end, and nothing is done twice.
        with suppress(EnginesmithError):
            case.work(store)
        assert seen(store) == case.after
        moves = read_history(store, state(store)).moves
        assert [move.version for move in moves] == (["1", "2"] if make in (finish, move_all_the_same) else ["1"])
        assert not [item for item in verify(store).problems if item.fault]


@pytest.mark.parametrize("end", [UnavailableError("503"), KeyboardInterrupt()])
def test_evidence_at_a_rollouts_start_reaches_its_nodes_after_an_outage(monkeypatch, end):
    """Whoever attached it saw that no node gets the version; whoever began the rollout saw no evidence of it."""
    store, _, second = registry()
    reports = [report(second.engines[0], "failed", host="late")]
    monkeypatch.setattr(
        channel_state, "unmark_versions", lambda *_: reports and add_attestation(store, second, reports.pop()) and None
    )
    with monkeypatch.context() as outage_context:
        outage_context.setattr(channel_writes, "refresh_channel", Mock(side_effect=end))
        with pytest.raises(type(end)):
            begin(store, second, plan("100%"))
    assert not reports and [item.kind for item in verify(store).problems if item.fault] == ["stale"]
    store.clock.now += leases.PUBLISHING
    collect(store, delete=True)
    assert not [item for item in verify(store).problems if item.fault]


def test_an_aborted_rollouts_version_has_its_whole_grace_period() -> None:
    store, _ = running("50%", "100%")
    is_marked = mark_late(store, "digits@2")
    operations.abort(store, *WHERE, Operator("ada", at(60)))
    assert not is_marked()
