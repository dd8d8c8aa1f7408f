from functools import partial
from pathlib import Path

import pytest

from enginesmith.core.errors import ConflictError, InputError, IntegrityError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.evidence.attestations import attest, judge_entries
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import blob_key, page_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channels, policies
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.policies import ChannelPolicy
from enginesmith.registry.versions.publish import attach_page
from tests.enginesmith.registries import engine, flip, on_each_store, publish_engines, pull, report
from tests.enginesmith.registry.memory import MemoryStore, run_alone, steps_of
from tests.enginesmith.registry.versions.test_policies import passed


def publish(store: Store, content: str = "a") -> Manifest:
    entries = [
        engine(store, data=content.encode()),
        engine(store, "sm_89", status="unproven", data=content.encode() * 9),
    ]
    manifest = publish_engines(store, entries, content, channel=None).manifest
    attach_page(store, manifest, b"<html>", b"{}")
    attest(store, manifest, report(entries[1], "proven"))
    return manifest


@on_each_store
@pytest.mark.parametrize("back", [False, True], ids=["into a folder", "out of a folder"])
def test_a_version_arrives_whole_and_once(store: Store, tmp_path: Path, back: bool) -> None:
    other_store = open_store(tmp_path / "other", create=True)
    source, dest = (other_store, store) if back else (store, other_store)
    manifest = publish(source)
    channels.promote(source, manifest, "stable", why="good")
    copy = mirror(source, [parse_reference("digits:stable")], dest, with_channels=True, by="ada")
    blobs = len(manifest.blobs())
    assert (copy.versions, copy.copied, copy.present, copy.moved) == (("digits@1",), blobs, 0, ("digits:stable",))
    assert copy.size_bytes == sum(dest.size(digest) for digest in manifest.blobs())
    assert verify(dest).problems == () and locate(dest, parse_reference("digits")).manifest == manifest
    assert [entry.status for entry in judge_entries(dest, manifest)] == ["proven", "proven"]
    assert dest.read(page_key("digits", "1")) == b"<html>"
    move = channel_state.read_channel(dest, "digits", "stable").move  # type: ignore[union-attr]
    assert (move.by, move.why) == ("ada", f"mirror of {source.uri}: good")
    pulled_engine = pull(dest, parse_reference("digits:stable"), parse_targets("l4")[0], tmp_path / "out")
    assert pulled_engine.path.read_bytes() == b"a" * 9
    names_before = set(dest.list())
    second_mirror = mirror(source, [parse_reference("digits@1")], dest)
    assert (second_mirror.copied, second_mirror.present, set(dest.list())) == (0, blobs, names_before)


def test_a_mirror_killed_at_any_call_can_continue(tmp_path: Path) -> None:
    source = MemoryStore(uri="memory://source")
    manifest = publish(source)
    work = partial(mirror, source, [parse_reference("digits")])
    for step in steps_of(MemoryStore(), work)[1::2]:
        dest, _ = run_alone(MemoryStore(), work, kill_at=step)
        assert verify(dest).sound, step
        blob_keys = [key for key in dest.objects if key.startswith("blobs/")]
        assert work(dest).present >= len(blob_keys) - 1 and verify(dest).sound and manifest.blobs(), step


def test_damaged_blobs_are_not_copied(store: Store, tmp_path: Path) -> None:
    manifest = publish(store)
    dest = open_store(tmp_path / "other", create=True)
    flip(store, str(manifest.engines[0].digest))
    with pytest.raises(IntegrityError, match="holds other bytes"):
        mirror(store, [parse_reference("digits")], dest)
    store.remove(blob_key(str(manifest.engines[0].digest)))
    with pytest.raises(IntegrityError, match="has lost its engine cpu fp32"):
        mirror(store, [parse_reference("digits")], dest)
    assert not list(dest.list("models/"))


def test_another_version_of_that_name_stays(store: Store, tmp_path: Path) -> None:
    dest = open_store(tmp_path / "other", create=True)
    publish(store, "a")
    their_manifest = publish(dest, "b")
    names_before = set(dest.list())
    with pytest.raises(ConflictError, match="has another digits@1"):
        mirror(store, [parse_reference("digits")], dest)
    assert locate(dest, parse_reference("digits")).manifest == their_manifest and set(dest.list()) == names_before
    with pytest.raises(InputError, match="is the registry itself"):
        mirror(store, [parse_reference("digits")], store)


def test_channels_move_with_their_evidence_under_the_other_sites_policy(store: Store, tmp_path: Path) -> None:
    first_manifest, second_manifest = publish(store, "a"), publish(store, "b")
    channels.promote(store, first_manifest, "stable")
    result = passed(store, second_manifest, first_manifest)
    channels.promote(store, second_manifest, "stable", canaries=[result])
    dest = open_store(tmp_path / "other", create=True)
    policies.write(dest, None, "stable", ChannelPolicy(canary=True))
    mirror(store, [parse_reference("digits:stable")], dest, with_channels=True)
    stable_channel = channel_state.read_channel(dest, "digits", "stable")
    assert dest.has(result.report) and stable_channel is not None and stable_channel.move.canary == (result.report,)
    policies.write(dest, None, "stable", ChannelPolicy(("sm_90",)))
    third_manifest = publish(store, "c")
    channels.promote(store, third_manifest, "stable")
    with pytest.raises(InputError, match="needs a proven engine for sm_90"):
        mirror(store, [parse_reference("digits:stable")], dest, with_channels=True)
