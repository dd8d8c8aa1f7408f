"""Pointers and snapshots: what they say, what a killed writer leaves, how they are mended, what is refused."""

import json
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from enginery.client.locate import VersionLocator
from enginery.core.errors import EngineryError, InputError
from enginery.core.names import parse_reference
from enginery.registry import gc, leases
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.layout import attestation_key, blob_key, pointer_key
from enginery.registry.verification import repair, verify
from enginery.registry.versions import channels, refresh
from enginery.registry.versions.additions import add_attestation
from enginery.registry.versions.lookup import read_channel
from enginery.registry.versions.pointers import Pointer, parse_pointer, read_pointer
from enginery.registry.versions.snapshots import parse_snapshot
from tests.enginery.registries import engine, flip, on_each_store, overwrite, publish_engines, report
from tests.enginery.registry.counting import CountingStore
from tests.enginery.registry.memory import Actor, Killed, MemoryStore

KEY = pointer_key("digits", "stable")


def published(store: Store, data: bytes) -> Manifest:
    return publish_engines(store, [engine(store, data=data)], data.decode(), channel="stable").manifest


def pointer(store: Store) -> Pointer:
    found = read_pointer(store, "digits", "stable")
    assert found is not None
    return found


def located(store: Store) -> str:
    return VersionLocator(store).locate(parse_reference("digits:stable")).manifest.version


@on_each_store
def test_a_pointer_leads_where_its_channel_does(store: Store) -> None:
    one, two = published(store, b"one"), published(store, b"two")
    first, served = pointer(store), pointer(store).settled
    assert served is not None and (served.version, served.manifest, first.moves) == ("2", two.digest, 2)
    snapshot = parse_snapshot(store.read_blob(str(served.snapshot)))
    key = f"{snapshot.prefix}manifest.json"
    assert snapshot.documents == {key: store.read(key)}
    channels.rollback(store, "digits", "stable")
    back = pointer(store)
    assert back.serves and back.serves.manifest == one.digest and back.moves == 3 and located(store) == "1"
    assert verify(store).problems == ()


def test_evidence_comes_into_the_snapshot_of_every_channel_that_serves_the_version(store: Store) -> None:
    one = published(store, b"one")
    channels.promote(store, one, "candidate")
    add_attestation(store, one, report(one.engines[0], "failed"))
    for name in ("stable", "candidate"):
        found = VersionLocator(store).locate(parse_reference(f"digits:{name}"))
        assert found.documents is not None
        (key,) = found.documents.list(f"models/digits/versions/{one.version}/attestations/")
        assert found.documents.read(key) == store.read(key) is not None
    assert verify(store).problems == ()


def test_only_these_functions_add_evidence() -> None:
    """Whoever else attached a report or a signature would leave snapshots without it."""
    bare = (
        "attestations import attest",
        "import attach_latency",
        "signing import sign",
        "signing import SigningKey, sign",
    )
    for package in ("pipeline", "validation", "builders"):
        for path in (Path(__file__).parents[4] / package).rglob("*.py"):
            assert not [line for line in path.read_text().splitlines() if line.strip().endswith(bare)], path


@pytest.mark.parametrize("steps", range(1, 60))
def test_a_writer_killed_anywhere_leaves_no_pointer_that_leads_astray(steps: int) -> None:
    store = MemoryStore()
    published(store, b"one")  # type: ignore[arg-type]
    two = publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest  # type: ignore[arg-type]
    actor = Actor("mover", kill_at=steps)
    actor.turn = lambda call: _die_at(actor)  # type: ignore[method-assign]
    with suppress(Killed):
        channels.promote(store.seen_by(actor), two, "stable")  # type: ignore[arg-type]
    channel, found = read_channel(store, "digits", "stable"), pointer(store)  # type: ignore[arg-type]
    assert channel is not None and (found.settled is None or found.settled.version == channel.version)
    repair(store, verify(store))  # type: ignore[arg-type]
    mended = pointer(store).settled  # type: ignore[arg-type]
    assert mended is not None and mended.version == channel.version
    assert not {problem.kind for problem in verify(store).problems} & {"stale", "unsettled"}  # type: ignore[arg-type]


def _die_at(actor: Actor) -> None:
    actor.steps += 1
    if actor.kill_at is not None and actor.steps >= actor.kill_at:
        raise Killed


def test_the_next_writer_mends_what_a_killed_one_left(store: Store) -> None:
    published(store, b"one")
    refresh.mark_moving(store, "digits", "stable")
    assert pointer(store).settled is None and located(store) == "1"
    (problem,) = verify(store).problems
    assert problem.kind == "unsettled" and not problem.fault and "a writer began to move it" in problem.detail
    published(store, b"two")
    served = pointer(store).settled
    assert served is not None and served.version == "2" and verify(store).problems == ()


def test_a_mark_of_another_writer_is_left_to_that_one(store: Store) -> None:
    one = published(store, b"one")
    mark = refresh.mark_moving(store, "digits", "stable")
    add_attestation(store, one, report(one.engines[0]))
    assert pointer(store).moving == mark
    with leases.hold_lease(store, "moving") as guard:
        refresh.refresh_channel(guard, "digits", "stable", mark)
    assert pointer(store).settled


def test_registries_without_pointers_are_served_as_ever_and_get_them_by_repair(store: Store) -> None:
    published(store, b"one")
    store.remove(KEY)
    assert located(store) == "1"
    (missing,) = verify(store).problems
    assert missing.kind == "unsettled" and "there is no pointer" in missing.detail
    assert repair(store, verify(store)).pointers == ("digits:stable",)
    assert pointer(store).settled and verify(store).problems == ()


def test_a_stale_pointer_is_a_fault_and_repaired(store: Store) -> None:
    published(store, b"one")
    old = store.read(KEY)
    published(store, b"two")
    overwrite(store, KEY, old or b"")
    found = verify(store)
    (problem,) = found.problems
    assert (problem.kind, problem.what) == ("stale", "digits:stable") and not found.sound
    assert "leads to version 1, and the channel to 2" in problem.detail
    repair(store, found)
    assert located(store) == "2" and verify(store).problems == ()


def test_a_lost_or_damaged_snapshot_costs_requests_and_is_repaired(store: Store) -> None:
    published(store, b"one")
    snapshot = str(pointer(store).serves.snapshot)  # type: ignore[union-attr]
    flip(store, snapshot)
    assert located(store) == "1"
    found = verify(store)
    assert [(item.kind, item.what) for item in found.problems] == [("corrupt", snapshot)]
    repair(store, found)
    assert verify(store).problems == ()
    store.remove(blob_key(snapshot))
    assert located(store) == "1"
    repair(store, verify(store))
    assert verify(store).problems == ()


def test_a_snapshot_that_lacks_evidence_is_told(store: Store) -> None:
    one = published(store, b"one")
    old = store.read(KEY)
    add_attestation(store, one, report(one.engines[0]))
    overwrite(store, KEY, old or b"")
    (problem,) = verify(store).problems
    assert problem.kind == "stale" and "has not all documents of version 1" in problem.detail


def test_newer_formats_are_refused_with_the_remedy_and_overwritten_by_nobody(store: Store) -> None:
    one, two = published(store, b"one"), published(store, b"two")
    data = json.loads(store.read(KEY) or b"")
    for change in ({"format": 3, "waves": []}, {"registry": 2}):
        newer = json.dumps({**data, **change}).encode()
        overwrite(store, KEY, newer)
        for work in (lambda: located(store), lambda: channels.promote(store, one, "stable")):
            with pytest.raises(
                InputError, match=r"pointer digits:stable has format [23].*reads [12]: upgrade enginery"
            ):
                work()
        with pytest.raises(InputError, match="upgrade enginery"):
            gc.collect(store, delete=True)
        assert store.read(KEY) == newer
    channel = read_channel(store, "digits", "stable")
    assert channel is not None and channel.version == two.version


@pytest.mark.parametrize("damage", [{"serves": 3}, {"model": "other"}, {"unknown": 1}, {"moves": -1}, {"format": "1"}])
def test_a_damaged_pointer_costs_requests(store: Store, damage: dict[str, object]) -> None:
    published(store, b"one")
    data = json.loads(store.read(KEY) or b"")
    overwrite(store, KEY, json.dumps({**data, **damage}).encode())
    with pytest.raises(EngineryError, match="pointer digits:stable"):
        parse_pointer(store.read(KEY), "digits", "stable")
    assert located(store) == "1"
    published(store, b"two")
    assert pointer(store).settled


@pytest.mark.parametrize("data", [b"", b"no zlib", zlib.compress(b"{}"), zlib.compress(b'{"format":1}')[:-1]])
def test_what_is_no_snapshot_is_damage(data: bytes) -> None:
    with pytest.raises(EngineryError):
        parse_snapshot(data)


def test_a_snapshot_that_inflates_without_end_is_refused() -> None:
    with pytest.raises(EngineryError, match="is cut, or over"):
        parse_snapshot(zlib.compress(b"[" * (200 << 20)))


def test_documents_outside_of_the_version_are_refused(store: Store) -> None:
    published(store, b"one")
    found = parse_snapshot(store.read_blob(str(pointer(store).serves.snapshot)))  # type: ignore[union-attr]
    evil = replace(found, documents={**found.documents, f"{found.prefix}../../channels/stable.json": b"{}"})
    with pytest.raises(EngineryError, match="is no document of a version"):
        parse_snapshot(evil.to_bytes())


def test_a_collection_keeps_what_pointers_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store, b"one")
    old = store.read(KEY)
    for data in (b"two", b"three"):
        published(store, data)
    overwrite(store, KEY, old or b"")  # as a writer that knows no pointers leaves it
    rules = gc.Rules(versions=1, moves=0)
    assert "pointer stable" in gc.collect(store, rules).kept["digits@1"]
    monkeypatch.setattr(leases, "now", lambda now=leases.now: now() + 8 * (gc.GRACE / 7))
    for _ in range(2):
        gc.collect(store, rules, gc.GRACE * 0, delete=True)
    assert located(store) == "1" and store.has(str(pointer(store).serves.snapshot))  # type: ignore[union-attr]


def test_versions_with_much_evidence_have_no_snapshot_and_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr("enginery.registry.versions.snapshots.MAX_BYTES", 100)
    published(store, b"one")
    served = pointer(store).settled
    assert served is not None and served.snapshot is None and located(store) == "1" and verify(store).problems == ()


def test_damaged_evidence_comes_into_no_snapshot(store: Store) -> None:
    one = published(store, b"one")
    digest = add_attestation(store, one, report(one.engines[0]))
    before = pointer(store)
    overwrite(store, attestation_key("digits", "1", str(one.engines[0].digest), digest), b"{}")
    assert {problem.kind for problem in verify(store).problems} == {"edited"}
    repair(store, verify(store))
    add_attestation(store, one, report(one.engines[0], host="there"))
    assert pointer(store) == before and located(store) == "1"
