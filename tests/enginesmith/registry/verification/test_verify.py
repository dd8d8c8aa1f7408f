from pathlib import Path

import pytest

from enginesmith.core.names import parse_reference
from enginesmith.registry.builds.runs import remember
from enginesmith.registry.gc import collect
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import FileStore, Store
from enginesmith.registry.store.layout import attestation_key, channel_key, manifest_key, pin_key, record_key
from enginesmith.registry.verification import repair, verify
from enginesmith.registry.versions.channel_state import read_channel
from tests.enginesmith.registries import engine, flip, on_each_store, publish_engines, refusal


@pytest.fixture
def manifest(store: Store) -> Manifest:
    return publish_engines(
        store, [engine(store), engine(store, "sm_89", status="unproven")], others=[refusal()]
    ).manifest


def found(store: Store, reference: str | None = None) -> list[tuple[str, str]]:
    result = verify(store, parse_reference(reference) if reference else None)
    return [(problem.kind, problem.what) for problem in result.problems]


def edit(store: Store, key: str, data: bytes) -> None:
    assert store.replace(key, data, store.read(key))


def test_a_sound_registry_has_no_problem(store: Store, manifest: Manifest) -> None:
    read: list[str] = []
    result = verify(store, progress=read.append)
    assert result.sound and result.problems == () and result.versions == 1
    channel = read_channel(store, "digits", "candidate")
    assert channel is not None
    assert sorted(read) == sorted([*manifest.blobs(), channel.snapshots[manifest.digest]]) and result.blobs == len(read)
    assert result.size_bytes == sum(store.size(digest) for digest in read)


@on_each_store
def test_a_flipped_bit_names_the_engine_it_spoils_and_can_be_repaired(store: Store, manifest: Manifest) -> None:
    digest = str(manifest.engines[1].digest)
    flip(store, digest)
    result = verify(store)
    (problem,) = result.problems
    assert (problem.kind, problem.what) == ("corrupt", digest) and not result.sound
    assert problem.affects == ("digits@1 engine sm_89 fp32 tensorrt-rtx",)
    assert found(store, "digits@1") == [("corrupt", digest)]
    assert repair(store, result).blobs == (digest,)
    assert found(store) == [("missing", digest)]
    engine(store, "sm_89", status="unproven")
    assert found(store) == []


def test_an_edited_manifest_and_its_channel_are_reported(store: Store, manifest: Manifest) -> None:
    edit(store, manifest_key("digits", "1"), manifest.to_bytes().replace(b'"unproven"', b'"proven"'))
    kinds = found(store)
    assert kinds == [("edited", "digits@1"), ("dangling", "digits:candidate")], "its blobs are no orphans"


@on_each_store
def test_litter_is_reported_and_harmless(store: Store, manifest: Manifest) -> None:
    orphan, remembered_digest = store.put_bytes(b"orphan"), store.put_bytes(b"remembered")
    remember(store, "export", "0" * 64, {}, [remembered_digest])
    store.create(record_key("export", "1" * 64), b"garbage")
    store.create("blobs/sha256/ab/notes.txt", b"")
    if isinstance(store, FileStore):
        (store.root / "tmp" / ".enginesmith-landing-0").write_bytes(b"half")
    result = verify(store)
    assert result.sound and all(not problem.fault for problem in result.problems)
    assert [(problem.kind, Path(problem.what).name) for problem in result.problems] == [
        ("stray", "notes.txt"),
        ("forgotten", "1" * 64 + ".json"),
        ("orphaned", orphan),
        *([("stray", ".enginesmith-landing-0")] if isinstance(store, FileStore) else []),
    ]


def test_a_foreign_folder_is_reported_and_stops_nothing(store: FileStore) -> None:
    publish_engines(store, [engine(store)])
    (store.root / "blobs" / "sha256" / ".Trash").mkdir()
    verification = verify(store)
    assert verification.sound
    assert [problem.what for problem in verification.problems if problem.kind == "stray"] == ["blobs/sha256/.Trash/"]


def test_a_manifest_in_another_versions_place_is_reported(store: Store, manifest: Manifest) -> None:
    assert store.create(manifest_key("digits", "7"), manifest.to_bytes())
    (problem,) = verify(store).problems
    assert (problem.kind, problem.what, problem.fault) == ("misplaced", "digits@7", True)
    assert "it belongs to digits@1" in problem.detail


def test_dangling_documents_are_reported(store: Store, manifest: Manifest) -> None:
    keys = (attestation_key("digits", "9", "0" * 64, "1" * 64), pin_key("digits", "9"), channel_key("gone", "stable"))
    for key in keys:
        assert store.create(key, b"{}")
    result = verify(store)
    assert {(problem.kind, problem.what, problem.fault) for problem in result.problems} == {
        ("unreferenced", keys[0], False),
        ("unreferenced", keys[1], False),
        ("dangling", keys[2], True),
    }


def test_blobs_named_by_documents_beside_a_manifest_are_no_orphans(store: Store, manifest: Manifest) -> None:
    """A latency report is a blob and a document; a mirror has no record that speaks of it."""
    report, empty_digest = store.put_bytes(b"a report"), store.put_bytes(b"nobody's")
    store.create(f"models/digits/versions/1/later/{report}.json", b"{}")
    assert found(store) == [("orphaned", empty_digest)]
    assert [item.name for item in collect(store).items] == [empty_digest]


def test_unreachable_folders_are_named_and_stop_nothing(store: FileStore, manifest: Manifest) -> None:
    """Copies by hand under names that are none: nobody is served from them."""
    for place in ("models/DIGITS/versions/1/manifest.json", "models/digits/versions/1.bak./manifest.json"):
        (store.root / place).parent.mkdir(parents=True)
        (store.root / place).write_bytes(manifest.to_bytes())
        assert ("unreferenced", place) in found(store)
    assert verify(store).sound and collect(store).items == ()
