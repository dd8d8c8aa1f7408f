import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from enginesmith.core.errors import ConflictError, EnginesmithError
from enginesmith.registry import leases
from enginesmith.registry.collection import references, sweep
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.collection.sweep import SWEEPING, hold_claim
from enginesmith.registry.gc import collect
from enginesmith.registry.leases import (
    MarkShard,
    Tombstone,
    hold_lease,
    read_shards,
    read_state,
    shard_of,
    update_shard,
)
from enginesmith.registry.store.layout import MARK_SHARDS, MARK_STATE, blob_key, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, lookup
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore, run_alone, run_two, set_clocks, steps_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("one_thread")
ONE = Rules(versions=1, moves=1)
GRACE = timedelta(days=1)
DATA = b"an engine that comes again"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[timedelta], None]]:
    """A clock that stands still until it is moved."""
    yield set_clocks(monkeypatch, datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One name is going at a time, so that a sweep of a few names has many steps."""
    monkeypatch.setattr(sweep, "BATCH", 1)
    monkeypatch.setattr(sweep, "_SHARDS_AT_ONCE", 1)


@pytest.fixture
def due(clock: Callable[[timedelta], None]) -> MemoryStore:
    """A registry whose version 1 was marked longer ago than the grace period; 2 is garbage and not marked yet."""
    store = MemoryStore()
    for content in "ab":
        publish_engines(store, [engine(store, data=DATA + content.encode())], content, channel=None)
    collect(store, ONE, GRACE, delete=True)
    publish_engines(store, [engine(store)], "c", channel=None)
    clock(2 * GRACE)
    return store


def gather(store: MemoryStore) -> None:
    collect(store, ONE, GRACE, delete=True)


def republish(store: MemoryStore) -> None:
    """Publish what version 1 had under new content: its engine is found, and not uploaded."""
    publish_engines(store, [engine(store, data=DATA + b"a")], "again", channel=None)


def test_a_collection_killed_at_every_call_leaves_a_sound_registry(due, few, clock):
    """The next one, when its claim is over, ends what it began; until then a writer is served or told."""
    for step in steps_of(due, gather):
        store, _ = run_alone(due, gather, kill_at=step)
        assert verify(store).sound, step
        try:
            republish(store)
        except EnginesmithError as error:
            assert "being deleted" in str(error) or "is not in" in str(error), step
        assert verify(store).sound, step
        clock(2 * SWEEPING)
        gather(store)
        republish(store)
        clock(2 * GRACE)
        gather(store)
        assert verify(store).sound and read_state(store).sweeper is None, step
        assert lookup.versions(store, "digits")[-1:] != ["1"], step
        shards = read_shards(store, read_state(store).shards)
        assert not any(shard.going for shard in shards.values()), step


@pytest.mark.parametrize(
    "work", [republish, lambda store: channels.promote(store, lookup.load(store, "digits", "1"), "stable")]
)
def test_a_writer_between_any_two_calls_of_a_collection_is_safe(due, few, work):
    """It begins and ends while the collection stands still: no version and no channel is hurt."""
    refused_number = 0
    for step in steps_of(due, gather):
        store, collector, writer = run_two(due, gather, work, step)
        assert collector.error is None and (writer.error is None or isinstance(writer.error, EnginesmithError)), step
        assert verify(store).sound, step
        refused_number += writer.error is not None
    assert refused_number < step / 2


def test_a_lease_that_ends_during_a_collection_is_safe(due: MemoryStore) -> None:
    """What it counts on was marked under its lease: either the lease is seen, or what the writer wrote."""
    del due.objects[MARK_STATE]  # nothing is marked; without a grace period a collection marks and deletes in one go

    def collect_at_once(store: MemoryStore) -> None:
        collect(store, ONE, timedelta(0), delete=True)

    length, writing_count = (len(steps_of(due, work)) for work in (collect_at_once, republish))
    for own_index in range(writing_count // 3, writing_count - 1, 4):
        for their_index in range(length // 2, length, 3):
            store, _, collector = run_two(due, republish, collect_at_once, own_index, their_index)
            assert collector.error is None and verify(store).sound, (own_index, their_index)


def test_the_second_of_two_concurrent_collections_gets_an_error(due: MemoryStore, few: None) -> None:
    for step in steps_of(due, gather)[:-1:2]:
        store, *actors = run_two(due, gather, gather, step)
        errors = [actor.error for actor in actors if actor.error]
        assert len(errors) <= 1 and all("is running" in str(error) for error in errors), step
        assert verify(store).sound and read_state(store).sweeper is None, step


def test_a_collection_reads_its_clock_before_each_deletion(due, clock, monkeypatch):
    monkeypatch.setattr(sweep, "side_by_side", lambda work, items: ((item, work(item)) for item in items))
    removed_keys: list[str] = []

    class Slow(MemoryStore):
        def remove(self, key: str) -> None:
            removed_keys.append(key)
            super().remove(key)
            clock(SWEEPING if key.startswith("blobs/") else timedelta(0))

    with pytest.raises(ConflictError, match="stopped for so long that another may count it as dead"):
        gather(Slow(due.objects))
    assert sum(key.startswith("blobs/") for key in removed_keys) == 1


def test_a_suspended_collection_deletes_no_republished_document(due, clock):
    """Of a version the manifest goes first; what lies beside it is deleted later, and may be of a new one by then."""
    gone_keys: list[str] = []

    class Slow(MemoryStore):
        def remove(self, key: str) -> None:
            super().remove(key)
            if key.endswith("/manifest.json") and not gone_keys:
                gone_keys.append(key)
                clock(SWEEPING)
                self.objects[key] = due.objects[key]  # by a writer, after another collection ended this one's work

    slow_store = Slow(dict(due.objects))
    with pytest.raises(ConflictError, match="stopped for so long that another may count it as dead"):
        gather(slow_store)
    assert gone_keys[0] in slow_store.objects


def test_marks_of_an_unpublished_generation_are_ignored(due: MemoryStore) -> None:
    """Whoever read that generation would take them for marks that were there before it began."""
    with pytest.raises(KeyboardInterrupt), hold_claim(due) as garbage:
        generation = garbage.begin_generation(["ab"])
        raise KeyboardInterrupt
    name = "ab" + "0" * 62
    due.objects[blob_key(name)] = b"garbage"
    update_shard(due, "ab", lambda _: MarkShard({name: Tombstone(due.now() - 9 * GRACE, generation)}))
    assert read_state(due).abandoned == (generation,) and read_state(due).generation < generation
    states = {item.name: item.state for item in collect(due, ONE, GRACE).items}
    assert states[name] == "new"
    assert {item.name: item.state for item in collect(due, ONE, GRACE, delete=True).items}[name] == "waiting"
    assert due.has(name)


def test_publications_affect_only_later_collections(due: MemoryStore) -> None:
    """A lease taken before the marks were complete protects its names, though it was taken after they were begun."""
    before = read_state(due).generation
    gather(due)
    after_it_state = read_state(due)
    assert (after_it_state.generation, after_it_state.latest, after_it_state.abandoned) == (before + 1, before + 1, ())


def test_blobs_marked_under_a_lease_are_shown_as_leased(due, clock):
    with hold_lease(due, "building for days", timedelta(days=3)):
        gather(due)
        clock(2 * GRACE)
        collection = collect(due, ONE, GRACE, delete=True)
        assert {item.state for item in collection.items} == {"held"} and "building for days" in collection.leases[0]
    assert {item.state for item in collect(due, ONE, GRACE, delete=True).items} == {"deleted"}


def test_blobs_of_an_undeletable_version_stay(due: MemoryStore, clock: Callable[[timedelta], None]) -> None:
    """Its mark was taken away and theirs were not: deleting them would leave a version without its engine."""
    shard = shard_of("digits@1")
    old_manifest = lookup.load(due, "digits", "1")
    blobs, own_text = old_manifest.blobs(), str(old_manifest.engines[0].digest)
    update_shard(due, shard, lambda state: state.without(frozenset({"digits@1"})))
    gather(due)
    assert all(map(due.has, blobs)) and verify(due).sound
    clock(2 * GRACE)
    gather(due)
    assert due.read(manifest_key("digits", "1")) is None and not due.has(own_text)


def test_a_writer_reads_only_the_shards_of_its_names(due: MemoryStore) -> None:
    state = read_state(due)
    name = next(name for shard in read_shards(due, state.shards).values() for name in shard.waiting)
    read: list[str] = []

    class Watched(MemoryStore):
        def read(self, key: str) -> bytes | None:
            read.append(key)
            return super().read(key)

    watched_store = Watched(due.objects)
    unmarked_digit = next(digit * 64 for digit in "0123456789abcdef" if digit * 2 not in state.shards)
    leases.unmark(watched_store, [unmarked_digit])
    assert read == [MARK_STATE]
    leases.unmark(watched_store, [name, unmarked_digit])
    assert set(read) == {MARK_STATE, f"{MARK_SHARDS}{shard_of(name)}.json"}


def test_a_sweep_reads_each_manifest_once(due: MemoryStore, few: None) -> None:
    """Each document of the registry is read once in a sweep."""
    last = lookup.load(due, "digits", "3")
    reads: dict[str, int] = {}

    class Watched(MemoryStore):
        def read(self, key: str) -> bytes | None:
            reads[key] = reads.get(key, 0) + 1
            return super().read(key)

    items = collect(Watched(due.objects), ONE, GRACE, delete=True).items
    assert sum(item.state == "deleted" for item in items) > 2 and reads[manifest_key(last.model, last.version)] == 1


@pytest.mark.timeout(60)
def test_a_claim_is_renewed_while_a_collection_works(due, clock, monkeypatch):
    """Also while nothing is written for longer than it lasts: between any two reads minutes pass."""
    monkeypatch.setattr(sweep, "RENEW_S", 0.001)
    monkeypatch.setattr(references, "side_by_side", lambda work, items: ((item, work(item)) for item in items))
    renewed_event = threading.Event()

    class Slow(MemoryStore):
        def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
            if result := super().replace(key, data, expected):
                renewed_event.set()
            return result

        def read(self, key: str) -> bytes | None:
            if key != MARK_STATE and threading.current_thread() is threading.main_thread():
                clock(timedelta(minutes=2))
                renewed_event.clear()
                assert renewed_event.wait(PATIENCE_S), "a collection that reads does not renew its claim"
            return super().read(key)

    start_time, slow_store = due.now(), Slow(due.objects)
    # Nothing new is marked, which would write the claim anyway.
    collection = collect(slow_store, Rules(versions=2, moves=1), GRACE, delete=True)
    assert {item.name: item.state for item in collection.items}["digits@1"] == "deleted"
    assert due.now() - start_time > SWEEPING
    with hold_claim(due), pytest.raises(ConflictError, match=r"another collection .* is running"):
        gather(due)
    with hold_lease(due, "writing"):  # no lock on writers
        republish(due)


def test_marks_of_a_newer_format_stop_collections_and_writers(due: MemoryStore) -> None:
    due.objects[MARK_STATE] = b'{"format":2,"generation":3,"going":{},"sweeper":null,"waiting":{}}'
    for work in (gather, republish):
        with pytest.raises(EnginesmithError, match=r"format is 2; this enginesmith reads 1: upgrade enginesmith"):
            work(due)


def test_a_mark_is_dated_when_it_is_written(due, clock, monkeypatch):
    """And not when the references were read: a channel may have led to the name since."""
    begin = sweep.Claim.begin_generation
    late_function = lambda claim, shards: clock(timedelta(minutes=5)) or begin(claim, shards)  # noqa: E731
    monkeypatch.setattr(sweep.Claim, "begin_generation", late_function)
    gather(due)
    shards = read_shards(due, read_state(due).shards)
    assert {mark.since for shard in shards.values() for mark in shard.waiting.values()} == {due.now()}
