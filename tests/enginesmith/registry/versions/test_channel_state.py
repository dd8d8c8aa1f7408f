import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from enginesmith.client.locate import VersionLocator
from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError
from enginesmith.core.names import parse_reference
from enginesmith.registry import gc
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.rollout_state import MOST_DECISIONS, MOST_WAVES, MOST_WHY
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import channel_history_key, channel_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import MAX_BYTES, Channel, read_channel, read_history
from tests.enginesmith.registries import engine, on_each_store, overwrite, publish_engines
from tests.enginesmith.registry.memory import MemoryStore, run_alone, steps_of
from tests.pipeline.rollout import fleet

KEY, HISTORY = channel_key("digits", "stable"), channel_history_key("digits", "stable")


def published(store: Store, data: bytes) -> Manifest:
    return publish_engines(store, [engine(store, data=data)], data.decode(), channel="stable").manifest


def state(store: Store) -> Channel:
    channel = read_channel(store, "digits", "stable")
    assert channel is not None
    return channel


def versions(store: Store) -> list[str]:
    return [move.version for move in read_history(store, state(store)).moves]


def located(store: Store) -> str:
    return VersionLocator(store).locate(parse_reference("digits:stable")).manifest.version


@on_each_store
def test_the_state_has_the_last_move_and_the_history_the_earlier_ones(store: Store) -> None:
    published(store, b"one")
    assert versions(store) == ["1"] and store.read(HISTORY) is None
    published(store, b"two")
    assert versions(store) == ["1", "2"] and len(json.loads(store.read(HISTORY) or b"")["moves"]) == 1
    channels.rollback(store, "digits", "stable")
    assert versions(store) == ["1", "2", "1"] and state(store).moves == 3 and located(store) == "1"
    assert verify(store).problems == ()


def test_a_killed_writer_has_moved_the_channel_or_not() -> None:
    begun_store: Any = MemoryStore()
    published(begun_store, b"one")
    second_manifest = publish_engines(begun_store, [engine(begun_store, data=b"two")], "two", channel=None).manifest
    work = partial(channels.promote, manifest=second_manifest, name="stable")
    for step in steps_of(begun_store, work):
        store: Any = run_alone(begun_store, work, kill_at=step)[0]
        assert located(store) == state(store).version and versions(store) in (["1"], ["1", "2"]), step
        assert not [item for item in verify(store).problems if item.fault], step
        channels.promote(store, second_manifest, "stable")
        channels.rollback(store, "digits", "stable")
        assert versions(store) == ["1", "2", "1"] and located(store) == "1", step


def test_newer_formats_are_refused_with_the_remedy_and_never_overwritten(store: Store) -> None:
    manifest = published(store, b"one")
    data = json.loads(store.read(KEY) or b"")
    for change in ({"format": 3, "waves": []}, {"registry": 2}):
        newer_value = json.dumps({**data, **change}).encode()
        overwrite(store, KEY, newer_value)
        for work in (
            lambda: located(store),
            lambda: channels.promote(store, manifest, "stable"),
            lambda: gc.collect(store, delete=True),
        ):
            with pytest.raises(InputError, match=r"digits:stable.*(format|registry) is [23].*upgrade enginesmith"):
                work()
        assert store.read(KEY) == newer_value


@pytest.mark.parametrize(
    "damage", [{"move": 3}, {"model": "other"}, {"unknown": 1}, {"moves": -1}, {"format": "1"}, {"rollout": {}}]
)
def test_the_error_of_a_damaged_state_names_the_repair(store: Store, damage: dict[str, object]) -> None:
    published(store, b"one")
    overwrite(store, KEY, json.dumps({**json.loads(store.read(KEY) or b""), **damage}).encode())
    for work in (lambda: located(store), lambda: gc.collect(store), lambda: published(store, b"two")):
        with pytest.raises(EnginesmithError, match=r"channel digits:stable.*restore it from a copy"):
            work()
    assert [problem.kind for problem in verify(store).problems if problem.what == "digits:stable"] == ["dangling"]


def test_a_lost_history_is_a_fault_and_does_not_affect_nodes(store: Store) -> None:
    for data in (b"one", b"two", b"three"):
        published(store, data)
    store.remove(HISTORY)
    assert located(store) == "3"
    assert [problem.kind for problem in verify(store).problems if problem.what == "digits:stable"] == ["dangling"]
    for work in (lambda: channels.rollback(store, "digits", "stable"), lambda: gc.collect(store)):
        with pytest.raises(
            IntegrityError, match=r"has 0 moves, which do not lead to move 3 of the channel; restore it"
        ):
            work()


def test_a_deleted_channel_continues_with_its_history(store: Store) -> None:
    for data in (b"one", b"two", b"three"):
        published(store, data)
    store.remove(KEY)
    published(store, b"four")
    assert versions(store) == ["1", "2", "4"] and state(store).moves == 3


def test_gc_keeps_both_versions_of_a_rollout() -> None:
    store, _, second_manifest = fleet.registry()
    fleet.begin(store, second_manifest, fleet.plan("50%", "100%"))
    publish_engines(store, [engine(store, data=b"three")], "three", channel=None)
    rules = gc.Rules(versions=1, moves=0)
    kept_reasons = gc.collect(store, rules).kept
    assert kept_reasons["digits@1"] == ("channel stable",) and kept_reasons["digits@2"] == ("rollout stable",)
    store.clock.now += 8 * (gc.GRACE / 7)
    for _ in range(2):
        gc.collect(store, rules, gc.GRACE * 0, delete=True)
    assert {fleet.served(store, node) for node in fleet.NODES} == {"1", "2"}


def test_the_channel_document_stays_small() -> None:
    store, _, second_manifest = fleet.registry()
    waves = [*(f"label={number:0>120}" for number in range(MOST_WAVES - 1)), "100%"]
    with pytest.raises(InputError, match="101 waves; at most 100 are allowed"):
        fleet.begin(store, second_manifest, fleet.plan("label=one-more", *waves))
    rollout = replace(fleet.begin(store, second_manifest, fleet.plan(*waves)), reach=fleet.plan(*waves[:-1]).waves)
    for _ in range(2 * MOST_DECISIONS):
        rollout = rollout.decide(fleet.at(1), "wave", "\U0001f600" * 999, "\U0001f600" * 999)
    assert len(rollout.history) == MOST_DECISIONS and len(rollout.history[-1].why) == MOST_WHY
    assert rollout.history[0].what.startswith("started")
    channel = read_channel(store, *fleet.WHERE)
    assert channel is not None and len(replace(channel, rollout=rollout).to_bytes()) < MAX_BYTES
