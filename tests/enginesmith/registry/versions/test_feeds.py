"""Feeds: shards that are split, writers that race, feeds that are damaged, late or of a newer format."""

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from enginesmith.cli import enginesmith
from enginesmith.core.errors import EnginesmithError, InputError, UnknownNameError
from enginesmith.registry import gc
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, feed_key
from enginesmith.registry.verification import repair, verify
from enginesmith.registry.versions import channels, feeds
from enginesmith.registry.versions.feeds import (
    Feed,
    parse_shard,
    read_feed,
    read_shard,
    remove_feed,
    set_feed,
    update_feeds,
)
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.state import Channel, Move, read_channel
from tests.enginesmith.registries import engine, on_each_store, overwrite, publish_engines
from tests.enginesmith.registry.counting import CountingStore

KEY = feed_key("all")


def publish(store: Store, model: str, data: str) -> None:
    publish_engines(store, [engine(store, data=f"{model}{data}".encode())], data, model=model, channel="stable")


def entries(store: Store, name: str = "all") -> dict[str, Channel]:
    return {key: item for digest in read_feed(store, name).shards for key, item in read_shard(store, digest).items()}


@on_each_store
def test_a_feed_has_the_states_of_its_channels_and_follows_their_moves(store: Store) -> None:
    publish(store, "digits", "one")
    publish(store, "other", "one")
    _, count = set_feed(store, "all", ["*:stable"])
    assert count == 2 and entries(store) == {
        f"{model}:stable": read_channel(store, model, "stable") for model in ("digits", "other")
    }
    set_feed(store, "few", ["o*:*"])
    publish(store, "digits", "two")
    publish(store, "omega", "one")
    assert {key: item.version for key, item in entries(store).items()} == {
        "digits:stable": "2", "omega:stable": "1", "other:stable": "1",
    }  # fmt: skip
    assert sorted(entries(store, "few")) == ["omega:stable", "other:stable"]
    channels.rollback(store, "digits", "stable")
    assert entries(store)["digits:stable"] == read_channel(store, "digits", "stable")
    assert verify(store).sound
    remove_feed(store, "few")
    with pytest.raises(UnknownNameError, match="feed name 'a/b'"):
        set_feed(store, "a/b", ["*:*"])
    with pytest.raises(UnknownNameError, match="there are: all"):
        read_feed(store, "few")


def channel(number: int, moves: int = 1) -> Channel:
    return Channel(f"model{number}", "stable", moves, Move(str(moves), f"{number:064x}", "2026-01-01"))


def test_shards_are_split_as_they_grow_and_a_move_writes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr(feeds, "MOST_IN_SHARD", 8)
    set_feed(store, "all", ["*:stable"])
    with hold_lease(store, "test") as guard:
        for number in range(60):
            update_feeds(guard, channel(number))
        feed = read_feed(store, "all")
        assert len(feed.shards) >= 16 and len(entries(store)) == 60
        assert max(len(read_shard(store, digest)) for digest in feed.shards) <= 8
        with store.counted() as found:
            update_feeds(guard, channel(7, 2))
    changed = [after != before for after, before in zip(read_feed(store, "all").shards, feed.shards, strict=True)]
    assert sum(changed) == 1 and changed[feed.shard_of("model7:stable")]
    assert found.kinds["PUT"] == 2  # the shard and the root


def test_the_state_with_more_moves_stays(store: Store) -> None:
    set_feed(store, "all", ["*:*"])
    with hold_lease(store, "test") as guard:
        update_feeds(guard, channel(1, 3))
        update_feeds(guard, channel(1, 2))
        assert entries(store)["model1:stable"] == channel(1, 3)


def test_a_damaged_feed_hinders_no_move_and_a_lost_shard_is_made_anew(store: Store) -> None:
    publish(store, "digits", "one")
    set_feed(store, "all", ["*:*"])
    (digest,) = read_feed(store, "all").shards
    store.remove(blob_key(digest))
    publish(store, "digits", "two")
    found = verify(store)
    assert {(item.kind, item.what) for item in found.problems} >= {("stale", "feed all")} and not found.sound
    assert repair(store, found).feeds == ("all",)
    assert verify(store).sound and entries(store)["digits:stable"] == read_channel(store, "digits", "stable")
    overwrite(store, KEY, b"{}")
    publish(store, "digits", "three")
    (problem,) = [item for item in verify(store).problems if item.kind == "stale"]
    assert "feed 'all'" in problem.detail and "`enginesmith feed set` writes it anew" in problem.detail


def test_a_late_feed_is_a_fault_and_repaired(store: Store) -> None:
    publish(store, "digits", "one")
    set_feed(store, "all", ["*:*"])
    late = store.read(KEY)
    publish(store, "digits", "two")
    overwrite(store, KEY, late or b"")
    (problem,) = [item for item in verify(store).problems if item.kind == "stale"]
    assert problem.detail == "digits:stable: has version 1, and the channel version 2"
    repair(store, verify(store))
    assert verify(store).sound


def test_newer_formats_are_refused_and_stay(store: Store) -> None:
    publish(store, "digits", "one")
    one = load(store, "digits", "1")
    set_feed(store, "all", ["*:*"])
    newer = json.dumps({**json.loads(store.read(KEY) or b""), "format": 2, "waves": []}).encode()
    overwrite(store, KEY, newer)
    with pytest.raises(InputError, match=r"feed 'all': format is 2; this enginesmith reads 1: upgrade enginesmith"):
        read_feed(store, "all")
    with pytest.raises(InputError, match="upgrade enginesmith"):
        channels.promote(store, one, "candidate")
    assert store.read(KEY) == newer


@pytest.mark.parametrize("data", [b"", b"no zlib", zlib.compress(b"[]"), zlib.compress(b'{"format":1}')[:-1]])
def test_what_is_no_shard_is_damage(data: bytes) -> None:
    with pytest.raises(EnginesmithError):
        parse_shard(data)


@pytest.mark.parametrize("change", [{"shards": []}, {"shards": ["x"]}, {"name": "other"}, {"unknown": 1}])
def test_what_is_no_feed_is_damage(store: Store, change: dict[str, object]) -> None:
    set_feed(store, "all", ["*:*"])
    overwrite(store, KEY, json.dumps({**json.loads(store.read(KEY) or b""), **change}).encode())
    with pytest.raises(EnginesmithError, match="feed 'all'"):
        read_feed(store, "all")


def test_what_is_no_pattern_is_told(store: Store) -> None:
    for wrong in ("digits", "a:b:c", "a b:c", ":stable", ""):
        with pytest.raises(InputError, match="is no pattern of channels"):
            set_feed(store, "all", [wrong])
    with pytest.raises(InputError, match="needs a pattern"):
        set_feed(store, "all", [])
    with pytest.raises(InputError):
        set_feed(store, "../all", ["*:*"])


def test_a_collection_keeps_shards(store: Store) -> None:
    publish(store, "digits", "one")
    set_feed(store, "all", ["*:*"])
    for _ in range(3):
        gc.collect(store, grace=gc.GRACE * 0, delete=True)
    assert entries(store)


def test_patterns_are_of_model_and_channel() -> None:
    feed = Feed("x", ("digits*:stable", "o?:candidate"))
    names = ("digits:stable", "digits2:stable", "digits:candidate", "ox:candidate", "oxx:candidate")
    assert [feed.covers(name) for name in names] == [True, True, False, True, False]
    assert replace(feed, shards=("",) * 7).shard_of("digits:stable") in range(7)


def test_the_commands(store: Store, tmp_path: Path) -> None:
    publish(store, "digits", "one")

    def run(*given: str) -> Result:
        return CliRunner().invoke(enginesmith, [*given, *([] if given[0] == "notify" else ["--registry", store.uri])])

    assert json.loads(run("feed", "set", "edge", "*:stable", "--json").output)["channels"] == 1
    assert "edge" in run("feed", "list").output and "digits:stable" in run("feed", "show", "edge").output
    watch = ("pull", "--follow", "--once", "--feed", "edge", "--target", "cpu", "--dest", str(tmp_path / "e"))
    assert [item["version"] for item in json.loads(run(*watch, "--json").stdout)] == ["1"]
    assert (tmp_path / "e" / "digits" / "stable" / "current").is_symlink()
    assert run("pull", "--feed", "edge").exit_code == 2 and run("pull", "--follow").exit_code == 2
    assert run("feed", "remove", "edge").exit_code == 0
    assert isinstance(run("feed", "show", "edge").exception, UnknownNameError)
    assert run("notify", "digits:stable", "--to", "http://127.0.0.1:9").exit_code == 3
