import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from enginesmith.core.errors import ConflictError, InputError, IntegrityError
from enginesmith.registry import leases
from enginesmith.registry.manifest import parse
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import blob_key, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, lookup
from enginesmith.registry.versions.channel_state import read_history
from enginesmith.registry.versions.publish import attach_page, find_published, publish
from tests.enginesmith.registries import (
    approval,
    draft,
    engine,
    in_child,
    on_each_store,
    publish_engines,
    refusal,
    run_together,
)
from tests.enginesmith.registry.fault_runs import die_at_write


@on_each_store
def test_versions_count_up_and_can_be_read(store: Store) -> None:
    first_manifest = publish_engines(store, [engine(store)], "a", others=[refusal()])
    second = publish_engines(store, [engine(store)], "b")
    assert (first_manifest.version, second.version, first_manifest.existed, second.existed) == ("1", "2", False, False)
    assert lookup.load(store, "digits", "1") == first_manifest.manifest
    assert [entry.status for entry in first_manifest.manifest.engines] == ["proven", "refused"]
    assert first_manifest.digest == first_manifest.manifest.digest != second.digest


@on_each_store
def test_repeated_content_gives_the_same_version(store: Store) -> None:
    first_manifest = publish_engines(store, [engine(store)], "a")
    keys_before = sorted(store.list())
    manifest = publish_engines(store, [engine(store)], "a")
    assert manifest.existed and manifest.manifest == first_manifest.manifest and sorted(store.list()) == keys_before


def test_older_content_is_found_behind_a_newer_version(store: Store) -> None:
    publish_engines(store, [engine(store)], "a")
    publish_engines(store, [engine(store)], "b")
    second_manifest = publish_engines(store, [engine(store)], "a")
    assert second_manifest.existed and second_manifest.version == "1"
    channel = channel_state.read_channel(store, "digits", "candidate")
    assert channel is not None and [move.version for move in read_history(store, channel).moves] == ["1", "2", "1"]


def test_a_unit_with_another_result_gives_another_version(store: Store) -> None:
    publish_engines(store, [engine(store)], "a", others=[replace(refusal("sm_89"), status="failed", reason="timeout")])
    repaired_manifest = publish_engines(store, [engine(store), engine(store, "sm_89", status="unproven")], "a")
    assert (repaired_manifest.version, repaired_manifest.existed) == ("2", False)


def test_other_bytes_from_equal_inputs_give_the_same_version_while_it_exists(store: Store) -> None:
    first_manifest = publish_engines(store, [engine(store, data=b"one build")], "a")
    assert publish_engines(store, [engine(store, data=b"another")], "a").existed
    store.remove(blob_key(str(first_manifest.manifest.engines[0].digest)))
    rebuilt_manifest = publish_engines(store, [engine(store, data=b"another")], "a")
    assert (rebuilt_manifest.version, rebuilt_manifest.existed) == ("2", False)


def test_a_damaged_version_is_replaced_by_the_next_and_a_wanted_one_refused(store: Store) -> None:
    for expected in (None, "1.0"):
        manifest = publish_engines(store, [engine(store)], "a", version=expected, channel=None)
        data = manifest.manifest.to_bytes()
        assert store.replace(manifest_key("digits", manifest.version), data.replace(b"proven", b"failed", 1), data)
    assert publish_engines(store, [engine(store)], "a").version == "2"
    with pytest.raises(IntegrityError, match="edited by hand"):
        publish_engines(store, [engine(store)], "a", version="1.0")


def test_a_version_of_a_run_killed_before_its_record_is_found(store: Store) -> None:
    publish_engines(store, [engine(store)], "a")
    publish_engines(store, [engine(store)], "b")
    for key in list(store.list("records/publish/")):
        assert store.replace(key, b"", store.read(key))
    actual = find_published(store, replace(draft(store, "a"), engines=(engine(store),)))
    second_manifest = publish_engines(store, [engine(store)], "a")
    assert actual == second_manifest.manifest and (second_manifest.version, second_manifest.existed) == ("1", True)


@on_each_store
def test_a_version_missing_in_the_next_listing_is_not_published_again(store, monkeypatch):
    first_manifest = publish_engines(store, [engine(store)], "a")
    for key in list(store.list("records/publish/")):
        assert store.replace(key, b"", store.read(key))
    highest_iterator = iter([1, 0])
    monkeypatch.setattr("enginesmith.registry.versions.publish._highest_number", lambda *_: next(highest_iterator, 1))
    second_manifest = publish_engines(store, [engine(store)], "a")
    assert second_manifest.existed and second_manifest.manifest == first_manifest.manifest


def test_a_wanted_version_is_used_kept_and_never_changed(store: Store) -> None:
    assert publish_engines(store, [engine(store)], "a", version="1.0").version == "1.0"
    assert publish_engines(store, [engine(store)], "a", version="1.0").existed
    with pytest.raises(ConflictError, match=r"^digits@1\.0 exists with other content"):
        publish_engines(store, [engine(store)], "b", version="1.0")
    assert leases.list_leases(store) == []
    with pytest.raises(ConflictError, match="other results"):
        publish_engines(store, [engine(store)], "a", version="1.0", others=[refusal()])
    assert publish_engines(store, [engine(store)], "b").version == "1"


def test_publication_requires_all_blobs(store: Store) -> None:
    entry = engine(store)
    store.remove(blob_key(str(entry.digest)))
    with pytest.raises(IntegrityError, match="engine cpu fp32 onnxruntime"):
        publish_engines(store, [entry])
    with pytest.raises(IntegrityError, match="the manifest says 3"):
        publish_engines(store, [replace(engine(store), size_bytes=3)])
    assert lookup.versions(store, "digits") == []


def test_publication_of_an_engine_requires_its_own_proof(store: Store) -> None:
    one_engine, other_engine = engine(store, data=b"one"), engine(store, "sm_89", status="unproven")
    for entry, proof in (
        (one_engine, approval(other_engine)),
        (replace(one_engine, status="unproven"), approval(one_engine)),
        (replace(other_engine, status="proven"), approval(other_engine)),
        (replace(one_engine, precision="int8"), approval(one_engine)),
    ):
        with pytest.raises(InputError, match="the proof of another one"):
            publish(store, draft(store), [(entry, proof)])
    for entry in (one_engine, other_engine, replace(one_engine, status="failed")):
        with pytest.raises(InputError, match="no approved report"):
            publish(store, draft(store), [], [entry])
    assert lookup.versions(store, "digits") == []


def test_a_refusing_channel_does_not_undo_the_version(store: Store) -> None:
    manifest = publish_engines(store, [engine(store, "sm_89", status="unproven")], channel="stable")
    assert manifest.version == "1" and "enginesmith validate digits@1" in str(manifest.channel_refusal)
    assert channel_state.read_channel(store, "digits", "stable") is None
    none_usable = publish_engines(store, [], "b", others=[refusal()])
    assert "no usable engine" in str(none_usable.channel_refusal)
    assert publish_engines(store, [engine(store)], "c", channel=None).channel_refusal is None


@on_each_store
def test_the_page_lies_beside_the_manifest(store: Store) -> None:
    manifest = publish_engines(store, [engine(store)]).manifest
    for page in (b"<html>", b"<html>2"):
        assert store.read(attach_page(store, manifest, page, b"{}")) == page
    assert lookup.versions(store, "digits") == ["1"]


@on_each_store
def test_racing_publishers_of_different_content_get_their_own_versions(store: Store) -> None:
    entry = engine(store)
    run_together(partial(publish_engines, store, [entry], n) for n in range(8))
    assert lookup.versions(store, "digits") == [str(n) for n in range(1, 9)]
    contents = {lookup.load(store, "digits", version).content for version in lookup.versions(store, "digits")}
    channel = channel_state.read_channel(store, "digits", "candidate")
    assert len(contents) == 8 and channel is not None
    assert sorted(move.version for move in read_history(store, channel).moves) == lookup.versions(store, "digits")


@on_each_store
def test_racing_publishers_of_one_content_make_one_version(store: Store) -> None:
    entry = engine(store)
    run_together([lambda: publish_engines(store, [entry])] * 8)
    assert lookup.versions(store, "digits") == ["1"]


@on_each_store
def test_one_of_several_racing_publishers_succeeds_and_the_others_get_an_error(store: Store) -> None:
    entry = engine(store)

    def publish_named(number: int) -> None:
        try:
            publish_engines(store, [entry], number, version="1.0")
        except ConflictError as error:
            assert "digits@1.0 exists with other content (manifest " in str(error)
        else:
            store.create(f"won/{number}", b"")

    run_together(partial(publish_named, number) for number in range(16))
    (winning_children,) = store.children("won/")
    assert lookup.load(store, "digits", "1.0").content == draft(store, int(winning_children)).content


@pytest.mark.slow
def test_a_killed_publication_leaves_no_half_version_and_the_next_run_completes(tmp_path: Path) -> None:
    """In a process of its own, which has loaded little: a fork of one that holds all tests takes 0.15 s of CPU time."""
    code = f"import os; os.fsync = os.fstat; from {__name__} import kill_all; kill_all({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], check=True)


def kill_all(folder: str) -> None:
    """SIGKILL before the 1st, 2nd, 3rd ... file operation of a publication, until one is not killed any more."""
    path_before = Path(folder, "before")
    publish_engines(first_store := open_store(path_before, create=True), [engine(first_store)], "before")
    for step in range(1, 1000):
        root = shutil.copytree(path_before, Path(folder, str(step)))
        status = os.waitpid(in_child(lambda root=root, step=step: _publish_until(root, step)), 0)[1]
        store = open_store(root, create=True)
        result = verify(store)
        assert result.sound and store.strays() == (), result
        assert lookup.versions(store, "digits") in (["1"], ["1", "2"])
        run_result = _publish(store)
        channel = channel_state.read_channel(store, "digits", "candidate")
        assert run_result.version == "2" and channel is not None and channel.version == "2"
        assert verify(store).sound and parse(run_result.manifest.to_bytes()) == run_result.manifest
        if status == 0:
            assert step > 30
            return
        assert status == signal.SIGKILL
    raise AssertionError("the publication never ended")


def _publish(store: Store):
    return publish_engines(store, [engine(store), engine(store, "sm_89", status="unproven")], "after")


def _publish_until(root: Path, step: int) -> None:
    store = open_store(root, create=True)
    die_at_write(step)
    _publish(store)


def test_a_named_version_without_its_engine_does_not_count_as_published(store: Store) -> None:
    first_manifest = publish_engines(store, [engine(store, data=b"one")], version="1.0")
    store.remove(blob_key(str(first_manifest.manifest.engines[0].digest)))
    with pytest.raises(IntegrityError, match=r"digits@1\.0 has lost its engine cpu fp32"):
        publish_engines(store, [engine(store, data=b"two")], version="1.0")
    publish_engines(store, [engine(store, data=b"one")], version="1.0")
