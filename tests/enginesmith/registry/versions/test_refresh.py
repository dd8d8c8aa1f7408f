import json
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from enginesmith.client.locate import VersionLocator
from enginesmith.core import parsing
from enginesmith.core.errors import ConflictError, EnginesmithError, UnavailableError, UndecidedError
from enginesmith.core.names import parse_reference
from enginesmith.registry.gc import collect
from enginesmith.registry.leases import PUBLISHING, Guard, take_lease
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import attestation_key, blob_key, manifest_key
from enginesmith.registry.verification import repair, verify
from enginesmith.registry.versions import channel_state as versions_state
from enginesmith.registry.versions import channel_writes, channels, lookup, publish
from enginesmith.registry.versions.channel_state import Channel, read_channel
from enginesmith.registry.versions.channel_writes import with_snapshots
from enginesmith.registry.versions.lookup import Snapshot, parse_snapshot
from enginesmith.registry.versions.publish import add_attestation
from tests.enginesmith.registries import flip, on_each_store, overwrite, report
from tests.enginesmith.registry.counting import CountingStore
from tests.enginesmith.registry.memory import MemoryStore, set_clocks
from tests.enginesmith.registry.versions.test_channel_state import KEY, located, published, state


def snapshot(store: Store) -> str:
    channel = state(store)
    return channel.snapshots[channel.manifest]


def test_documents_over_the_limit_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{Snapshot('digits', '1', {}).prefix}manifest.json"
    with monkeypatch.context() as limits:
        limits.setattr(lookup, "MAX_DOCUMENTS_BYTES", 8)
        packed_data = [channel_writes.pack_snapshot(Snapshot("digits", "1", {key: b"x" * size})) for size in (8, 9)]
    assert parse_snapshot(packed_data[0] or b"").documents == {key: b"x" * 8} and packed_data[1] is None


@on_each_store
def test_a_channel_names_the_documents_of_its_version(store: Store) -> None:
    first_manifest, second_manifest = published(store, b"one"), published(store, b"two")
    documents = parse_snapshot(store.read_blob(snapshot(store)))
    key = f"{documents.prefix}manifest.json"
    assert documents.documents == {key: store.read(key)} and list(state(store).snapshots) == [second_manifest.digest]
    channels.rollback(store, "digits", "stable")
    assert list(state(store).snapshots) == [first_manifest.digest] and located(store) == "1"
    assert verify(store).problems == ()


def test_evidence_enters_the_snapshots_of_all_channels_of_its_version(store: Store) -> None:
    manifest = published(store, b"one")
    channels.promote(store, manifest, "candidate")
    add_attestation(store, manifest, report(manifest.engines[0], "failed"))
    for name in ("stable", "candidate"):
        result = VersionLocator(store).locate(parse_reference(f"digits:{name}"))
        assert result.documents is not None
        (key,) = result.documents.list(f"models/digits/versions/{manifest.version}/attestations/")
        assert result.documents.read(key) == store.read(key) is not None
    assert verify(store).problems == ()


def test_a_state_with_an_expired_lease_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version may have been deleted since it was looked at: then it has no snapshot, and nothing else asks."""
    store, move = MemoryStore(), set_clocks(monkeypatch, datetime(2026, 1, 1, tzinfo=UTC))
    published(store, b"one")
    guard = Guard(store, take_lease(store, "a promotion"), parsing.steady_s())
    state = read_channel(store, "digits", "stable")
    assert state is not None
    del store.objects[manifest_key("digits", "1")]
    assert with_snapshots(guard, state).snapshots == {}
    move(PUBLISHING)
    with pytest.raises(ConflictError, match="took longer than its lease"):
        with_snapshots(guard, state)


def test_evidence_of_a_disconnected_writer_enters_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    manifest = published(store, b"one")
    with monkeypatch.context() as context:
        context.setattr(publish, "refresh_version", Mock(side_effect=UnavailableError("503")))
        with pytest.raises(UnavailableError):
            _attest(store, manifest)
    assert not verify(store).sound
    store.clock.now += PUBLISHING
    collect(store, delete=True)
    assert verify(store).problems == ()


def test_evidence_enters_the_snapshot_after_a_lost_race_and_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster writer's snapshot may be older: it stood still between reading the evidence and writing the state."""
    store, swap = MemoryStore(), MemoryStore.replace
    manifest = published(store, b"one")
    faster_states = [replace(state(store), revision=state(store).revision + 1)]

    def lose_both(store: MemoryStore, key: str, data: bytes, expected: bytes | None) -> bool:
        if key == KEY and faster_states:
            assert swap(store, key, faster_states.pop().to_bytes(), expected)
            raise UndecidedError("the response was lost")
        return swap(store, key, data, expected)

    monkeypatch.setattr(MemoryStore, "replace", lose_both)
    _attest(store, manifest)
    assert not faster_states and verify(store).problems == ()


def test_evidence_during_a_move_enters_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    store, keep = MemoryStore(), versions_state.keep_history
    manifest, _ = published(store, b"one"), published(store, b"two")

    def attest_before(store: MemoryStore, channel: Channel) -> None:
        _attest(store, manifest)
        keep(store, channel)

    monkeypatch.setattr(versions_state, "keep_history", attest_before)
    channels.promote(store, manifest, "stable")
    assert verify(store).problems == ()


def _attest(store: MemoryStore, manifest: Manifest) -> None:
    add_attestation(store, manifest, report(manifest.engines[0], "failed"))


def test_only_these_functions_add_evidence() -> None:
    """Whoever else attached a report or a signature would leave snapshots without it."""
    bare_texts = (
        "attestations import attest",
        "import attach_latency",
        "signing import sign",
        "signing import SigningKey, sign",
    )
    for package in ("pipeline", "validation", "builders"):
        for path in (Path(__file__).parents[4] / package).rglob("*.py"):
            assert not [line for line in path.read_text().splitlines() if line.strip().endswith(bare_texts)], path


def test_a_lost_or_damaged_snapshot_costs_requests_and_is_repaired(store: Store) -> None:
    published(store, b"one")
    actual = snapshot(store)
    flip(store, actual)
    assert located(store) == "1"
    result = verify(store)
    assert [(item.kind, item.what) for item in result.problems] == [("corrupt", actual)]
    repair(store, result)
    assert verify(store).problems == ()
    store.remove(blob_key(actual))
    assert located(store) == "1"
    repair(store, verify(store))
    assert verify(store).problems == ()


def test_a_snapshot_that_lacks_evidence_is_reported_and_repaired(store: Store) -> None:
    manifest = published(store, b"one")
    old_content = store.read(KEY)
    add_attestation(store, manifest, report(manifest.engines[0]))
    overwrite(store, KEY, old_content or b"")
    (problem,) = verify(store).problems
    assert problem.kind == "stale" and "does not have the same documents as version 1" in problem.detail
    assert repair(store, verify(store)).channels == ("digits:stable",)
    assert verify(store).sound
    data = json.loads(store.read(KEY) or b"")
    overwrite(store, KEY, json.dumps({**data, "snapshots": {}}).encode())
    assert located(store) == "1" and [item.kind for item in verify(store).problems] == ["stale"]


def test_an_invalid_snapshot_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginesmith.registry.versions.lookup.MAX_DOCUMENTS_BYTES", 1000)
    for data in (b"", b"no zlib", zlib.compress(b"{}")):
        with pytest.raises(EnginesmithError):
            parse_snapshot(data)
    for data in (zlib.compress(b'{"format":1}')[:-1], zlib.compress(b"[" * 2001)):
        with pytest.raises(EnginesmithError, match="is cut, or over"):
            parse_snapshot(data)


def test_documents_outside_of_the_version_are_refused(store: Store) -> None:
    published(store, b"one")
    documents = parse_snapshot(store.read_blob(snapshot(store)))
    evil = replace(documents, documents={**documents.documents, f"{documents.prefix}../../channels/stable.json": b"{}"})
    with pytest.raises(EnginesmithError, match="must be a document of a version"):
        parse_snapshot(evil.to_bytes())


def test_versions_with_much_evidence_are_served_without_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr("enginesmith.registry.versions.lookup.SNAPSHOT_MAX_BYTES", 100)
    published(store, b"one")
    assert state(store).snapshots == {} and located(store) == "1" and verify(store).problems == ()


def test_damaged_evidence_enters_no_snapshot(store: Store) -> None:
    manifest = published(store, b"one")
    digest = add_attestation(store, manifest, report(manifest.engines[0]))
    state_before = state(store)
    overwrite(store, attestation_key("digits", "1", str(manifest.engines[0].digest), digest), b"{}")
    assert {problem.kind for problem in verify(store).problems} == {"edited"}
    repair(store, verify(store))
    add_attestation(store, manifest, report(manifest.engines[0], host="there"))
    assert state(store) == state_before and located(store) == "1"
