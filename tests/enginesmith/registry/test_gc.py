from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from enginesmith.core.errors import ConflictError, IntegrityError, UnknownNameError, digest_of_bytes
from enginesmith.registry import leases
from enginesmith.registry.builds.runs import recall, remember
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.gc import collect
from enginesmith.registry.leases import take_lease
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.registered_specs import list_pinned, pin, unpin
from enginesmith.registry.rollouts.reports import OUTSIDE, NodeReport, report_key, write_report
from enginesmith.registry.rollouts.rollout_state import is_reporter
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import (
    LEASES,
    MARK_STATE,
    MARKER,
    MARKER_CONTENT,
    SERVING,
    attestation_key,
    channel_key,
    manifest_key,
    page_key,
    record_key,
)
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.channel_state import change_channel, read_channel
from enginesmith.registry.versions.publish import attach_page
from tests.enginesmith.registries import engine, on_each_store, publish_engines, report, run_together
from tests.enginesmith.registry.memory import MemoryStore
from tests.one_thread import registry_in_one_thread
from tests.pipeline.rollout.fleet import NODES, at, running, tell

ONE = Rules(versions=1, moves=1)
AT_ONCE = timedelta(0)


def publish(store: Store, *contents: object, model: str = "digits") -> list[Manifest]:
    return [
        publish_engines(store, [engine(store, data=f"{model} {it}".encode())], it, channel=None, model=model).manifest
        for it in contents
    ]


def left(store: Store, model: str = "digits") -> list[str]:
    return lookup.versions(store, model)


def states(store: Store, **how: object) -> dict[str, str]:
    return {item.name: item.state for item in collect(store, ONE, **how).items}  # type: ignore[arg-type]


@on_each_store
def test_garbage_is_deleted_in_two_steps_after_the_grace_period(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old_manifest, new_manifest = publish(store, "a", "b")
    attach_page(store, old_manifest, b"<html>", b"{}")
    engine_of_old = str(old_manifest.engines[0].digest)
    keys_before = set(store.list())
    names = {"digits@1", engine_of_old, str(old_manifest.engines[0].report)}
    assert states(store) == dict.fromkeys(names, "new") and set(store.list()) == keys_before
    assert states(store, delete=True) == dict.fromkeys(names, "waiting") and left(store) == ["1", "2"]
    later_time = store.now() + timedelta(days=8)
    monkeypatch.setattr(type(store), "now", lambda _: later_time)
    assert states(store) == dict.fromkeys(names, "due") and left(store) == ["1", "2"]
    collection = collect(store, ONE, delete=True)
    assert {item.name: item.state for item in collection.items} == dict.fromkeys(names, "deleted")
    assert collection.size_bytes("deleted") == sum(item.size_bytes for item in collection.items) > 0
    assert left(store) == ["2"] and not store.has(engine_of_old)
    assert store.has(new_manifest.sources["onnx"])  # of the version that stays, though the other one had it too
    assert store.read(page_key("digits", "1")) is None
    assert verify(store).problems == () and states(store) == {}


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


def test_gc_keeps_versions_that_channels_can_roll_back_to(memory: MemoryStore) -> None:
    result = publish(memory, *"abcdef")
    for manifest in result[:5]:
        channels.promote(memory, manifest, "stable")
    collect(memory, Rules(versions=1, moves=2), AT_ONCE, delete=True)
    assert left(memory) == ["3", "4", "5", "6"]
    channels.rollback(memory, "digits", "stable")
    assert channels.rollback(memory, "digits", "stable").version == "3"
    with pytest.raises(UnknownNameError, match="served version 2 before, which was deleted since; promote another"):
        channels.rollback(memory, "digits", "stable")
    # Rolled back to 3, the moves before lead there from 5 and 4.
    collect(memory, Rules(versions=1, moves=1), AT_ONCE, delete=True)
    assert left(memory) == ["3", "4", "6"]


def test_pinned_versions_are_kept(memory: MemoryStore) -> None:
    manifest, *_ = publish(memory, *"abc")
    assert pin(memory, manifest, by="ada", why="for the paper") and not pin(memory, manifest)
    assert list_pinned(memory, "digits") == ["1"]
    collect(memory, ONE, AT_ONCE, delete=True)
    assert left(memory) == ["1", "3"] and verify(memory).problems == ()
    unpin(memory, "digits", "1")
    with pytest.raises(UnknownNameError, match="is not pinned"):
        unpin(memory, "digits", "1")
    collect(memory, ONE, AT_ONCE, delete=True)
    assert left(memory) == ["3"]
    with pytest.raises(IntegrityError, match="was deleted"):
        pin(memory, manifest)


def test_a_version_number_is_never_used_twice(memory: MemoryStore) -> None:
    """The highest number stays though other names sort after it: the next one is counted from it."""
    publish(memory, *"ab")
    for content, name in (("zeros", "007"), ("time", "1764460430123456789"), ("named", "v1")):
        publish_engines(memory, [engine(memory)], content, channel=None, version=name)
    collect(memory, ONE, AT_ONCE, delete=True)
    assert left(memory) == ["2", "v1"]
    assert publish(memory, "c")[0].version == "3"


def test_documents_that_a_later_release_adds_are_kept(memory: MemoryStore) -> None:
    (manifest,) = publish(memory, "a")
    entry = manifest.engines[0]
    signed_digest, named_digest = memory.put_bytes(b"a bill of materials"), memory.put_bytes(b"named by a key")
    memory.create("models/digits/versions/1/future/statement.json", f'{{"sbom": "sha256:{signed_digest}"}}'.encode())
    memory.create(f"models/digits/versions/1/future/{named_digest}.json", b"{}")
    attest(memory, manifest, report(entry, "proven", host="elsewhere"))
    collect(memory, ONE, AT_ONCE, delete=True)
    assert memory.has(signed_digest) and memory.has(named_digest) and verify(memory).sound


def test_records_go_with_their_blobs_and_stay_with_them(memory: MemoryStore) -> None:
    (manifest,) = publish(memory, "a")
    source, loose_digest = manifest.sources["onnx"], memory.put_bytes(b"observations")
    remember(memory, "export", "0" * 64, {}, [source])
    remember(memory, "ranges", "1" * 64, {}, [loose_digest])
    memory.create(record_key("ranges", "2" * 64), b"garbage")
    (item,) = collect(memory, ONE, AT_ONCE).items
    assert item.name == loose_digest and item.why == "only a step record (ranges) refers to it"
    kinds = [item.kind for item in collect(memory, ONE, AT_ONCE, delete=True).items]
    assert kinds == ["blob", "record", "record"]
    assert recall(memory, "export", "0" * 64) == {} and memory.read(record_key("ranges", "1" * 64)) is None


def test_remains_of_a_version_are_deleted(memory: MemoryStore) -> None:
    (manifest,) = publish(memory, "a")
    entry = manifest.engines[0]
    memory.create(attestation_key("digits", "7", str(entry.digest), "0" * 64), b"{}")
    assert [(item.kind, item.name) for item in collect(memory, ONE, AT_ONCE, delete=True).items] == [
        ("remains", "digits@7")
    ]
    assert not list(memory.list("models/digits/versions/7/"))


def test_a_marked_name_that_is_needed_again_is_unmarked(memory: MemoryStore) -> None:
    manifest, _ = publish(memory, *"ab")
    collect(memory, ONE, delete=True)
    channels.promote(memory, manifest, "stable")
    assert collect(memory, ONE, AT_ONCE, delete=True).items == () and left(memory) == ["1", "2"]
    # It is also taken off when nothing points to it yet: whoever asked for it has the whole grace again.
    channels.promote(memory, publish(memory, "c")[0], "stable")
    channels.promote(memory, publish(memory, "d")[0], "stable")
    assert "digits@1" in states(memory, delete=True)
    assert publish(memory, "a")[0].version == "1" and states(memory)["digits@1"] == "new"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (MARK_STATE, "state.json: is not JSON"),
        (f"{LEASES}0.json", "delete it when nobody publishes"),
        (channel_key("digits", "stable"), "channel digits:stable"),
    ],
)
def test_gc_stops_at_an_unreadable_document(memory: MemoryStore, key: str, words: str) -> None:
    publish(memory, *"ab")
    memory.create(key, b"{")
    objects_before = set(memory.objects)
    with pytest.raises(IntegrityError, match=words):
        collect(memory, ONE, AT_ONCE, delete=True)
    assert objects_before <= set(memory.objects) and any(
        p.what in (key, LEASES) or p.kind == "dangling" for p in verify(memory).problems
    )


def test_leases_of_dead_writers_are_found_and_deleted(memory: MemoryStore) -> None:
    publish(memory, "a")
    lease = take_lease(memory, "publishing digits")
    assert verify(memory).problems == () and collect(memory, ONE).leases[0].startswith("publishing digits (")
    memory.clock.now += timedelta(hours=1)
    (problem,) = verify(memory).problems
    assert problem.kind == "stray" and lease.id in problem.what
    collect(memory, ONE, delete=True)
    assert list(memory.list(LEASES)) == []


def test_a_publication_leaves_no_lease(memory: MemoryStore) -> None:
    publish(memory, "a")
    assert list(memory.list(LEASES)) == [] and memory.read(MARK_STATE) is None


@on_each_store
def test_publications_and_collections_can_run_in_parallel(store: Store) -> None:
    """The interleavings are tested by tests/simulation; this is the same with processes, on the stores themselves."""
    publish(store, *range(3))

    def publish_some() -> None:
        for content in range(3):
            for _ in range(50):
                with suppress(ConflictError, IntegrityError):  # refused; the same again
                    publish(store, content)
                    break
            else:
                raise AssertionError("never published")

    def collect_some() -> None:
        for _ in range(4):
            with suppress(ConflictError):
                collect(store, ONE, AT_ONCE, delete=True)

    run_together([publish_some, collect_some, publish_some])
    result = verify(store)
    assert result.sound and not [problem for problem in result.problems if problem.kind == "stray"], result.problems
    assert left(store)


def test_an_unreadable_kept_manifest_stops_a_collection(store: Store) -> None:
    """Cut short, it names no engine any more; whoever restores it wants them back."""
    [manifest] = publish(store, "a")
    key = manifest_key("digits", "1")
    whole_data = store.read(key) or b""
    assert store.replace(key, whole_data[:40], whole_data)
    for delete in (False, True):
        with pytest.raises(IntegrityError, match=r"versions/1/manifest\.json\).*restore it"):
            collect(store, ONE, AT_ONCE, delete=delete)
    assert [problem.kind for problem in verify(store).problems] == ["edited"]
    assert store.replace(key, whole_data, whole_data[:40]) and states(store, delete=True, grace=AT_ONCE) == {}
    assert all(map(store.has, manifest.blobs()))


def test_a_collection_without_new_garbage_writes_no_marks_and_reads_one_index_shard(monkeypatch):
    store = MemoryStore()
    publish(store, "a", "b")
    collect(store, ONE, delete=True)
    read_key, read_document, written_args = store.read, [], []
    update = leases.update_shard
    monkeypatch.setattr(store, "read", lambda key: read_document.append(key) or read_key(key))
    monkeypatch.setattr(leases, "update_shard", lambda *args: written_args.append(args[1]) or update(*args))
    collect(store, ONE, delete=True)
    assert written_args == []
    assert len([key for key in read_document if key.startswith("index/")]) == 1


def test_a_collection_reads_histories_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reads = MemoryStore(), []
    (manifest,) = publish(store, "a")
    names = [f"c{number}" for number in range(8)]
    for name in names:
        channels.promote(store, manifest, name)
    read_key = store.read
    monkeypatch.setattr(store, "read", lambda key: reads.append(key) or read_key(key))
    with registry_in_one_thread():
        collect(store, ONE)
    histories = list(dict.fromkeys(key for key in reads if "/histories/" in key))
    assert len(histories) == len(names) and histories == sorted(histories)


def test_reports_of_gone_nodes_are_deleted_and_the_reporting_share_adapts(monkeypatch):
    monkeypatch.setattr("enginesmith.registry.rollouts.reports.MOST_REPORTERS", 100)
    store = MemoryStore({MARKER: MARKER_CONTENT})
    publish_engines(store, [engine(store)], "one", channel="stable")
    begin = datetime(2026, 11, 1, tzinfo=UTC)

    def collect_after(hours: float, nodes: int) -> tuple[int, int]:
        """After so many hours these nodes report; how many reports are left, and the share that is asked."""
        store.clock.now = begin + timedelta(hours=hours)
        share = read_channel(store, "digits", "stable").reporters_ppm
        for name in map(str, range(nodes)):
            if is_reporter(digest_of_bytes(name.encode()), share):
                key = report_key("digits", "stable", OUTSIDE, name)
                write_report(store, key, NodeReport(name, "", "1", "t", "t"), store.read(key))
        collect(store, delete=True)
        return len(list(store.list(SERVING))), read_channel(store, "digits", "stable").reporters_ppm

    assert collect_after(0, 125) == (125, 1_000_000)
    assert collect_after(1, 1000) == (1000, 100_000)
    assert collect_after(24 * 7, 1000) == (1000, 100_000), "no report is older than 7 days"
    assert 70 < collect_after(24 * 7 + 2, 1000)[0] < 130, "who is asked no longer is gone"
    assert [collect_after(24 * 8 + hours, 20)[1] for hours in (0, 24, 48, 72)] == [200_000, 400_000, 800_000, 1_000_000]


def test_a_collection_keeps_a_rollouts_reports_and_its_channels_share():
    store, rollout = running("100%")
    tell(store, rollout, 0, NODES[:3])
    data_before = {key: data for key, data in store.objects.items() if key.startswith(SERVING)}
    change_channel(store, "digits", "stable", lambda channel: replace(channel, reporters_ppm=1000))
    key = report_key("digits", "stable", OUTSIDE, "n1")
    write_report(store, key, NodeReport("n1", "", "1", "t", "t"), None)
    store.clock.now = at(8 * 86_400)
    assert [item.name for item in collect(store, delete=True).items if item.kind == "report"] == [key]
    assert {key: data for key, data in store.objects.items() if key.startswith(SERVING)} == data_before
    assert read_channel(store, "digits", "stable").reporters_ppm == 1000
