from collections.abc import Callable

import pytest

from enginesmith.client.client import Client
from enginesmith.core.errors import IntegrityError
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.names import Reference
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import FileStore, Store
from enginesmith.registry.store.layout import blob_key
from enginesmith.registry.store.objects.store import ObjectStore
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channels
from tests.enginesmith.client.watching.test_watch import following
from tests.enginesmith.faulty_proxy import FaultyProxy
from tests.enginesmith.registries import engine, flip, on_each_store, overwrite, publish_engines, pull

DIGITS = Reference("digits")
Damage = Callable[[Store, str], None]


def lose(store: Store, digest: str) -> None:
    store.remove(blob_key(digest))


def cut(store: Store, digest: str) -> None:
    overwrite(store, blob_key(digest), store.read_blob(digest)[:-1])


def lead_out(store: Store, digest: str) -> None:
    """The very bytes, elsewhere: who may write there may change what is served."""
    assert isinstance(store, FileStore)
    blob, outer_path = store.path(digest), store.root.parent / "outside"
    blob.rename(outer_path)
    blob.symlink_to(outer_path)


S3_CUT = pytest.param("s3", cut, "size", marks=pytest.mark.slow)
DAMAGES = [("file", lose, "missing"), ("s3", lose, "missing"), ("file", cut, "size"), S3_CUT]
each_damage = pytest.mark.parametrize(
    ("store", "damage", "kind"), [*DAMAGES, ("file", lead_out, "missing")], indirect=["store"]
)


@pytest.fixture
def entries(store: Store) -> tuple[EngineEntry, EngineEntry]:
    """The first is preferred on a CPU."""
    return engine(store, precision="fp32"), engine(store, precision="int8")


@pytest.fixture
def manifest(store: Store, entries: tuple[EngineEntry, EngineEntry]) -> Manifest:
    return publish_engines(store, entries).manifest


@each_damage
@pytest.mark.parametrize("proven_only", [True, False])
def test_promotion_of_a_version_with_missing_blobs_is_refused(
    store: Store, manifest: Manifest, damage: Damage, kind: str, proven_only: bool
) -> None:
    digest = str(manifest.engines[0].digest)
    damage(store, digest)
    with pytest.raises(
        IntegrityError, match=rf"digits@1 is damaged; .*registry fsck digits@1(.|\n)*engine cpu .*{digest}"
    ):
        channels.promote(store, manifest, "stable", proven_only=proven_only)
    assert channel_state.read_channel(store, "digits", "stable") is None
    assert (kind, digest) in {(problem.kind, problem.what) for problem in verify(store).problems}


@each_damage
def test_pull_continues_with_the_next_engine_and_resolve_omits_lost_ones(
    store, entries, manifest, damage, kind, tmp_path
):
    damage(store, str(entries[0].digest))
    pulled_engine = pull(store, DIGITS, CPU, tmp_path / "engines")
    assert pulled_engine.engine.precision == "int8" and pulled_engine.path.read_bytes() == b"engine cpu int8"
    (line,) = pulled_engine.warnings
    assert line.startswith("LOST: cpu fp32 onnxruntime: ")
    answer = Client(store.uri).resolve("digits", "cpu")
    assert [item.entry.precision for item in answer.candidates] == ["int8"]
    assert [unit for unit, reason in answer.rejected if reason.startswith("lost: ")] == ["cpu fp32 onnxruntime"]
    damage(store, str(entries[1].digest)) if damage is not lead_out else lose(store, str(entries[1].digest))
    with pytest.raises(IntegrityError, match=r"every engine of digits@1 that fits cpu is lost; .*build again"):
        pull(store, DIGITS, CPU, tmp_path / "engines")


@on_each_store
def test_pull_continues_after_an_engine_with_wrong_bytes(store, entries, manifest, tmp_path):
    flip(store, str(entries[0].digest))
    pulled_engine = pull(store, DIGITS, CPU, tmp_path)
    assert pulled_engine.engine.precision == "int8" and "holds other bytes" in pulled_engine.warnings[0]


@each_damage
def test_publishing_again_repairs_or_bypasses_damage(store, entries, manifest, damage, kind):
    damage(store, str(entries[0].digest))
    other_engine = engine(store, precision="fp32", data=b"other bytes of the compiler")
    assert publish_engines(store, (other_engine, entries[1])).manifest.version == "2"
    assert engine(store, precision="fp32") == entries[0]  # puts the very bytes back
    assert verify(store, DIGITS).sound


def test_a_link_within_the_registry_is_a_blob(store: FileStore, manifest: Manifest) -> None:
    digest = str(manifest.engines[0].digest)
    blob, moved_path = store.path(digest), store.root / "blobs" / "moved"
    blob.rename(moved_path)
    blob.symlink_to(moved_path)
    assert store.has(digest) and store.read_blob(digest) == b"engine cpu fp32"
    moved_path.unlink()
    assert not store.has(digest)


def test_checking_remote_engines_costs_one_request_each(store_behind_proxy: ObjectStore, proxy: FaultyProxy) -> None:
    manifest = publish_engines(store_behind_proxy, [engine(store_behind_proxy, precision=p) for p in ("fp32", "int8")])
    proxy.fine()
    assert Client(store_behind_proxy.uri).resolve("digits", "cpu").candidates
    assert proxy.count("HEAD", "blobs/") == 2
    proxy.fine()
    channels.promote(store_behind_proxy, manifest.manifest, "stable")
    assert proxy.count("HEAD", "blobs/") == len(manifest.manifest.blobs()) + 2  # the snapshot, twice


def test_a_watch_uses_the_next_engine_until_the_best_one_is_restored(store, entries, manifest, tmp_path):
    messages: list[str] = []
    seen_names: list[str] = []
    watch = following(Client(store.uri), tmp_path / "engines", say=messages.append, interval_s=0)

    class Stop:
        """Damages before the first look, restores before the third."""

        def is_set(self) -> bool:
            if len(seen_names) == 2:
                engine(store, precision="fp32")
            return len(seen_names) == 3

        def wait(self, seconds: float) -> None:
            seen_names.append((tmp_path / "engines" / "current").resolve().name)

    lose(store, str(entries[0].digest))
    swap = watch.run(Stop())  # type: ignore[arg-type]
    assert seen_names[0] == seen_names[1] != seen_names[2]
    assert swap is not None and swap.digest == entries[0].digest
    assert [line for line in messages if line.startswith("LOST: cpu fp32")] == messages[1:2], "told once"
