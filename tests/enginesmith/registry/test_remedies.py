import errno
import os
from pathlib import Path

import pytest

from enginesmith.core.errors import EnginesmithError, IntegrityError, UnavailableError
from enginesmith.core.names import parse_reference
from enginesmith.registry.gc import collect
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.folder import FileStore
from enginesmith.registry.store.layout import MARKER, channel_key, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channels, lookup
from tests.enginesmith.registries import engine, publish_engines


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    actual = open_store(tmp_path / "my registry", create=True)
    assert isinstance(actual, FileStore)
    return actual


def test_the_messages_remedy_removes_a_garbage_manifest(store: FileStore) -> None:
    publish_engines(store, [engine(store)], "a")
    path = store.root / manifest_key("digits", "1")
    path.chmod(0o644)
    path.write_text("garbage")
    for look in (lambda: lookup.load(store, "digits", "1"), lambda: collect(store)):
        with pytest.raises(IntegrityError) as error:
            look()
        assert f"({path}): is not JSON" in str(error.value)
        assert "build again" in str(error.value) and "then delete this file" in str(error.value)
    assert str(path) in verify(store).problems[0].detail
    assert publish_engines(store, [engine(store)], "a").version == "2"
    path.unlink()
    assert verify(store).sound
    collect(store)


def test_the_messages_remedy_removes_a_garbage_channel(store: FileStore) -> None:
    published_manifest = publish_engines(store, [engine(store)], "a", channel="candidate")
    path = store.root / channel_key("digits", "candidate")
    path.write_text("garbage")
    with pytest.raises(IntegrityError) as error:
        channel_state.read_channel(store, "digits", "candidate")
    assert f"({path}): is not JSON" in str(error.value) and "delete this file and promote" in str(error.value)
    path.unlink()
    channels.promote(store, published_manifest.manifest, "candidate")
    assert verify(store).sound


def test_a_channel_without_its_version_proposes_a_promotion(store: FileStore) -> None:
    published_manifests = [publish_engines(store, [engine(store)], content) for content in ("a", "b")]
    (store.root / manifest_key("digits", "2")).unlink()
    with pytest.raises(IntegrityError, match=r"points nowhere: .*; promote an existing version to it"):
        lookup.locate(store, parse_reference("digits:candidate"))
    channels.promote(store, published_manifests[0].manifest, "candidate")
    assert verify(store).sound


@pytest.mark.parametrize("marker", [None, "garbage"])
def test_the_messages_remedy_restores_a_lost_marker(store: FileStore, marker: str | None) -> None:
    publish_engines(store, [engine(store)], "a")
    path = store.root / MARKER
    path.chmod(0o644)
    path.write_text(marker) if marker else path.unlink()
    with pytest.raises(EnginesmithError) as error:
        open_store(store.root, create=True)
    output = str(error.value)
    assert str(path) in output and 'write {"format":1} into' in output
    path.write_text('{"format":1}')
    assert lookup.models(open_store(store.root)) == ["digits"]


def test_a_full_disk_after_publication_reports_the_published_version(store, monkeypatch):
    replace = FileStore.replace

    def full(self: FileStore, key: str, data: bytes, expected: bytes | None) -> bool:
        if key == channel_key("digits", "candidate"):
            raise UnavailableError(f"writing {key}: {os.strerror(errno.ENOSPC)}")
        return replace(self, key, data, expected)

    with monkeypatch.context() as patched_context:
        patched_context.setattr(FileStore, "replace", full)
        pattern = "^digits@1 is published, but the move of channel candidate could not be written: writing .*No space"
        with pytest.raises(UnavailableError, match=pattern):
            publish_engines(store, [engine(store)], "a", channel="candidate")
    second_manifest = publish_engines(store, [engine(store)], "a", channel="candidate")
    assert second_manifest.existed and channel_state.read_channel(store, "digits", "candidate") is not None


def test_a_garbage_channel_after_publication_reports_the_published_version(store: FileStore) -> None:
    publish_engines(store, [engine(store)], "a", channel="candidate")
    (store.root / channel_key("digits", "candidate")).write_text("garbage")
    with pytest.raises(IntegrityError, match=r"^digits@2 is published, but the move of channel candidate "):
        publish_engines(store, [engine(store)], "b", channel="candidate")
