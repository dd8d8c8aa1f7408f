"""Hostile documents about what stays: a collection deletes nothing that is needed, or stops. And client files."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import InputError, digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.exchange.oci import export_oci
from enginesmith.registry import leases
from enginesmith.registry import leases as marks
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.gc import collect
from enginesmith.registry.registered_specs import list_pinned, pin
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.cache import VerificationCache
from enginesmith.registry.store.download import Fill, download, journal_of
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import LEASES, MARK_STATE, lease_key, mark_shard_key, pin_key, policy_key
from enginesmith.registry.trust.policy import public_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, policies
from enginesmith.registry.versions.lookup import load, locate
from enginesmith.registry.versions.policies import ChannelPolicy
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.trust.keys import written
from tests.hostile import calm, damaged, either

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
EXAMPLES = int(os.environ.get("ENGINESMITH_HOSTILE_EXAMPLES", "60"))
FEW = settings(max_examples=max(1, EXAMPLES // 15))
DIGITS = parse_reference("digits@3")


class Scene:
    """A registry in which version 1 is garbage, 2 is pinned and 3 is served, with one of every document about that."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "registry"
        store = open_store(self.root, create=True)
        for content in "abc":
            publish_engines(store, [engine(store, data=content.encode())], content)
        pin(store, load(store, "digits", "2"), by="ada", why="the paper's")
        key = public_key(written(folder, "a")[1]).public_key.decode()
        policies.write(
            store, "digits", "stable", ChannelPolicy(("cpu",), canary=True, signed_by=(key,)), by="ada", why="rule 7"
        )
        policies.write(store, None, "candidate", ChannelPolicy())
        lease = leases.take_lease(store, "publishing")
        collect(store, Rules(versions=1, moves=0), delete=True)
        leases.take_lease(store, "publishing later")
        self.keys = {
            "policy": policy_key("digits", "stable"),
            "policy of all": policy_key(None, "candidate"),
            "pin": pin_key("digits", "2"),
            "lease": lease_key(lease.id),
            "marks": MARK_STATE,
        }
        self.waiting = marks.read_shards(store, marks.read_state(store).shards)
        self.keys["shard of marks"] = mark_shard_key(
            max(self.waiting, key=lambda shard: len(self.waiting[shard].waiting))
        )
        self.valid = {name: store.read(key) or b"" for name, key in self.keys.items()}
        assert all(self.valid.values()) and sum(len(shard.waiting) for shard in self.waiting.values()) > 1


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("retention"))


@pytest.mark.parametrize("name", ["policy", "policy of all", "pin", "lease", "marks", "shard of marks"])
def test_a_hostile_document_deletes_nothing_that_is_needed(scene: Scene, name: str) -> None:
    @FEW
    @given(either(json.loads(scene.valid[name])))
    def attack(data: bytes) -> None:
        place = scene.folder / "attacked"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(scene.root, place)
        (place / scene.keys[name]).write_bytes(data)
        store, names_before = open_store(place), sorted(path.name for path in scene.folder.iterdir())
        for work in (
            lambda: policies.of_channel(store, "digits", "stable"),
            lambda: channels.promote(store, load(store, "digits", "3"), "stable"),
            lambda: policies.write(store, "digits", "stable", ChannelPolicy()),
            lambda: leases.list_leases(store),
            lambda: collect(store),
            lambda: pin(store, load(store, "digits", "3")),
            lambda: collect(store, Rules(versions=1, moves=0), timedelta(0), delete=True),
        ):
            calm(work)
        assert list_pinned(store, "digits")[:1] == ["2"]
        faults = [problem for problem in verify(store).problems if problem.fault]
        assert {problem.kind for problem in faults} <= {"edited"}
        for version in "23":
            assert store.read_blob(str(load(store, "digits", version).engines[0].digest))
        assert sorted(path.name for path in scene.folder.iterdir()) == names_before

    attack()


def test_listed_names_that_lead_elsewhere_are_refused(scene: Scene) -> None:
    place = scene.folder / "elsewhere"
    shutil.copytree(scene.root, place)
    (outer_path := scene.folder / "outside").mkdir()
    (outer_path / "manifest.json").write_bytes(b"mine")
    store, valid_document = open_store(place), json.loads(scene.valid["shard of marks"])
    some = next(iter(valid_document["waiting"].values()))
    for lease in (place / LEASES).iterdir():
        lease.unlink()
    for name in (
        "../outside@1",
        "digits@../../../../outside",
        "../../outside/manifest.json",
        "/etc@passwd",
        "A" * 64,
        "@",
    ):
        hostile_fields = {**valid_document, "waiting": {**valid_document["waiting"], name: some}, "going": {name: some}}
        (place / scene.keys["shard of marks"]).write_text(json.dumps(hostile_fields))
        for _ in range(2):
            calm(lambda: collect(store, Rules(versions=1, moves=0), timedelta(0), delete=True))
    assert (outer_path / "manifest.json").read_bytes() == b"mine" and verify(store).sound


def test_hostile_stamps_and_journals_are_ignored(tmp_path: Path) -> None:
    blob = bytes(range(256)) * 20
    blob_digest, verifications = BlobDigest(digest_of_bytes(blob)), VerificationCache(tmp_path / "stamps")
    (path := tmp_path / "blob").write_bytes(blob)
    (bad_path := tmp_path / "bad").write_bytes(b"x" + blob[1:])
    verifications.add(blob_digest, path)
    stamp = json.loads((verifications.folder / blob_digest.name).read_bytes())

    @contextmanager
    def source(start: int, size: int) -> Iterator[Fill]:
        stream = io.BytesIO(blob[start : start + size])

        def fill(into: memoryview) -> None:
            assert stream.readinto(into) == len(into)

        yield fill

    part = 1000
    assert download(tmp_path / "part", blob_digest, len(blob), source, lambda _: None, part=part) == blob_digest.digest
    journal = journal_of(tmp_path / "part").read_bytes()
    numbers = st.sampled_from([b"9" * 5000, b"-1", b"\xd9\xa1", b"7", b"1e3", b"", b"\x00", b" 1"])
    more = numbers.map(lambda number: journal + number + b"\n")

    @settings(max_examples=EXAMPLES)
    @given(st.one_of(damaged(json.dumps(stamp).encode()), either({"a": stamp})), st.one_of(damaged(journal), more))
    def attack(stamped: bytes, journalled: bytes) -> None:
        (verifications.folder / blob_digest.name).write_bytes(stamped)
        assert not verifications.is_verified(blob_digest, bad_path) and verifications.is_verified(blob_digest, path)
        journal_of(tmp_path / "part").write_bytes(journalled)
        assert (
            download(tmp_path / "part", blob_digest, len(blob), source, lambda _: None, part=part) == blob_digest.digest
        )

    attack()
    (verifications.folder / blob_digest.name).write_bytes(b"[" * 100_000)
    assert verifications.is_verified(blob_digest, path)
    (tmp_path / "part").write_bytes(bytes(len(blob)))  # a journal that says that all is there
    result = download(tmp_path / "part", blob_digest, len(blob), source, lambda _: None, part=part)
    assert result == hashlib.sha256((tmp_path / "part").read_bytes()).hexdigest() != blob_digest.digest


def test_existing_oci_layouts_are_checked(scene: Scene) -> None:
    store, layout = open_store(scene.root), scene.folder / "oci"
    located_version = locate(store, DIGITS)
    export_oci(store, located_version, layout)
    valid_data = (layout / "index.json").read_bytes()

    for hostile_fields in ({"annotations": [1]}, [], None, {"annotations": float("nan")}):
        (layout / "index.json").write_text(json.dumps({**json.loads(valid_data), "manifests": [hostile_fields]}))
        with pytest.raises(InputError, match="is damaged"):
            export_oci(store, located_version, layout)

    @FEW
    @given(either(json.loads(valid_data)))
    def attack(data: bytes) -> None:
        (layout / "index.json").write_bytes(data)
        calm(lambda: export_oci(store, located_version, layout))
        with suppress(ValueError):
            assert isinstance(json.loads((layout / "index.json").read_bytes()), dict | list | int | str)

    attack()
