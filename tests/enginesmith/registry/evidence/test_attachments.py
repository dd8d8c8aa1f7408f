from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.client.pull import Pulled
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import InputError, IntegrityError, digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Gpu
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.evidence.attachments import DESCRIPTION, Attachment, attachments
from enginesmith.registry.gc import collect
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import attachment_key, blob_key, signature_key
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.verification import repair, verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.publish import add_signatures
from tests.enginesmith.registries import attach, engine, flip, names_in, on_each_store, overwrite, publish_engines
from tests.enginesmith.registry.memory import MemoryStore, run_alone, steps_of
from tests.enginesmith.registry.trust.keys import written
from tests.enginesmith.registry.trust.test_signing import NEEDS_RELEASE, policy_file

WORDS = digest_of_bytes(b"one two")


def publish(store: Store, content: str = "a", model: str = "digits") -> Manifest:
    return publish_engines(store, [engine(store)], content, channel="stable", model=model).manifest


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words.txt").write_text("one two")
    return tmp_path / "words.txt"


def pulled(store: Store, dest: Path, reference: str = "digits:stable", **policy: object) -> Pulled:
    return Client(store.uri, policy=Policy(**policy)).pull(reference, dest)  # type: ignore[arg-type]


@on_each_store
def test_an_attachment_is_pulled_kept_verified_and_mirrored_with_its_version(
    store: Store, words: Path, tmp_path: Path
) -> None:
    manifest = publish(store)
    attachment = attach(store, manifest, words)
    assert attach(store, manifest, words, created_at="2026-02-02T00:00:00+00:00") == attachment  # says the same
    assert [item for item, _ in attachments(store, manifest)] == [attachment] and attachment.digest == WORDS
    (result,) = pulled(store, tmp_path / "dest").attachments
    assert result.path == tmp_path / "dest" / "attachments" / "words.txt" and result.path.read_text() == "one two"
    assert result.attachment == attachment and names_in(result.path.parent) == ["words.txt", f"words.txt{DESCRIPTION}"]
    collect(store, Rules(versions=1, moves=1), timedelta(0), delete=True)
    collect(store, Rules(versions=1, moves=1), timedelta(0), delete=True)
    assert store.has(WORDS) and verify(store).problems == ()
    other_store = open_store(tmp_path / "other", create=True)
    mirror(store, [parse_reference("digits:stable")], other_store, with_channels=True)
    assert verify(other_store).problems == () and attachments(other_store, manifest) == attachments(store, manifest)
    assert [item.path.read_text() for item in pulled(other_store, tmp_path / "elsewhere").attachments] == ["one two"]


def test_a_collection_deletes_it_with_its_version(store: Store, words: Path) -> None:
    attach(store, publish(store), words)
    last_manifest = publish(store, "b")
    channels.promote(store, last_manifest, "stable")
    for _ in range(2):
        collect(store, Rules(versions=1, moves=0), timedelta(0), delete=True)
    assert not store.has(WORDS) and verify(store).problems == ()


@pytest.mark.parametrize("damage", ["lost", "flipped", "cut"])
def test_fsck_reports_damage_and_the_engine_stays_usable(store, words, tmp_path, damage):
    manifest = publish(store)
    attach(store, manifest, words)
    if damage == "lost":
        store.remove(blob_key(WORDS))
    elif damage == "flipped":
        flip(store, WORDS)
    else:
        overwrite(store, blob_key(WORDS), b"one")
    result = verify(store)
    kinds = {problem.kind for problem in result.problems if "digits@1 attachment words.txt" in problem.affects}
    assert kinds == {"lost": {"missing"}, "flipped": {"corrupt"}, "cut": {"corrupt", "size"}}[damage]
    actual = pulled(store, tmp_path / "dest")
    assert actual.path.is_file() and not actual.attachments and actual.left_out[0][0] == "words.txt"
    repair(store, result)
    with pytest.raises(IntegrityError, match=r"lost its attachment words.txt"):
        mirror(store, [parse_reference("digits@1")], open_store(tmp_path / "other", create=True))
    attach(store, manifest, words)  # again, which mends it
    assert verify(store).sound and pulled(store, tmp_path / "dest").attachments


def test_an_edited_or_moved_document_is_reported_and_the_engine_stays_usable(store, words, tmp_path):
    first_manifest = publish(store)
    attachment = attach(store, first_manifest, words)
    second_manifest = publish(store, "b")
    document = attachment.to_bytes()
    store.create(attachment_key("digits", "2", WORDS, digest_of_bytes(document)), document)
    with pytest.raises(IntegrityError, match=r"moved or damaged; delete it, and attach its file again"):
        attachments(store, second_manifest)
    other_attachment = replace(attachment, version="2")  # of a manifest that had this name before
    store.remove(attachment_key("digits", "2", WORDS, digest_of_bytes(document)))
    store.create(other_attachment.key(), other_attachment.to_bytes())
    with pytest.raises(IntegrityError, match="moved or damaged"):
        attachments(store, second_manifest)
    overwrite(store, attachment.key(), document.replace(b"tester", b"nobody"))
    assert {item.what for item in verify(store).problems if item.kind == "edited"} == {"digits@1", "digits@2"}
    for reference in ("digits@1", "digits@2"):
        result = pulled(store, tmp_path / reference, reference)
        assert result.path.is_file() and not result.attachments and "edited by hand" in result.left_out[0][1]


def test_an_attachment_for_another_machine_is_omitted_and_the_newest_name_counts(store, words, tmp_path):
    manifest = publish(store)
    attach(store, manifest, words)
    words.write_text("three")
    attach(store, manifest, words, created_at="2026-01-03T00:00:00+00:00")
    words.write_text("of a GPU")
    attach(store, manifest, words, requires=[Gpu("l4", (8, 9))], created_at="2026-01-04T00:00:00+00:00")
    result = pulled(store, tmp_path / "dest")
    assert [item.path.read_text() for item in result.attachments] == ["three"] and not result.left_out
    other_manifest = publish(store, "b")
    attach(store, other_manifest, words, requires=[Gpu("l4", (8, 9))])
    result = pulled(store, tmp_path / "other", "digits@2")
    assert not result.attachments and "built for l4" in result.left_out[0][1]


def test_two_models_in_one_folder_keep_their_attachments_and_a_new_version_replaces_its_own(store, words, tmp_path):
    attach(store, publish(store), words)
    dest = tmp_path / "dest"
    pulled(store, dest)
    words.write_text("three")
    attach(store, publish(store, "b"), words)
    assert pulled(store, dest, "digits@2").attachments[0].path.read_text() == "three"
    attach(store, publish(store, "c", "letters"), words)
    result = pulled(store, dest, "letters@1")
    assert not result.attachments and "belongs to digits@2; give another folder" in result.left_out[0][1]


def test_a_followed_channel_downloads_attachments_beside_the_engine(store: Store, words: Path, tmp_path: Path) -> None:
    attach(store, publish(store), words)
    Client(store.uri).watch("digits:stable", tmp_path / "dest", once=True, say=lambda _: None)
    assert (tmp_path / "dest" / "current" / "attachments" / "words.txt").read_text() == "one two"


def test_a_policy_with_signatures_requires_them_for_all_attachments(store, words, tmp_path):
    manifest, key = publish(store), SigningKey(written(tmp_path, "release")[0])
    policy = policy_file(tmp_path, NEEDS_RELEASE)
    add_signatures(store, manifest, key)
    attachment = attach(store, manifest, words)
    for is_allowed in (False, True):
        result = pulled(store, tmp_path / "dest", trust=policy, allow_unsigned=is_allowed)
        assert not result.attachments and "lacks the signatures that the trust policy needs" in result.left_out[0][1]
    assert not any(item.new for item in add_signatures(store, manifest, key))  # only a file that the signer holds
    with pytest.raises(InputError, match=r"has no attachment 000.*attach the file first"):
        add_signatures(store, manifest, key, ["0" * 64])
    added_names = [item.what for item in add_signatures(store, manifest, key, [WORDS]) if item.new]
    assert added_names == ["attachment words.txt (vocabulary)"]
    assert [item.signed_by for item in pulled(store, tmp_path / "dest", trust=policy).attachments] == [("release",)]
    # A signature of this document is worth nothing for another one, and one of an attestation nothing for either.
    other_attachment = replace(attachment, note="other")
    signed_item = next(item for item in sign(store, manifest, key, [WORDS]) if item.what.startswith("attachment"))
    data = store.read(signature_key("digits", "1", digest_of_bytes(attachment.to_bytes()), signed_item.key_id)) or b""
    store.create(other_attachment.key(), other_attachment.to_bytes())
    store.create(signature_key("digits", "1", digest_of_bytes(other_attachment.to_bytes()), signed_item.key_id), data)
    (found_again_attachment,) = pulled(store, tmp_path / "again", "digits@1", trust=policy).attachments
    assert found_again_attachment.attachment == attachment


def test_an_attachment_killed_at_any_call_damages_nothing_and_can_be_repeated(words: Path) -> None:
    begun_store = MemoryStore()
    manifest = publish(begun_store)
    work = partial(attach, manifest=manifest, file=words)
    for step in steps_of(begun_store, work)[::2]:
        store, _ = run_alone(begun_store, work, kill_at=step)
        assert {item.kind for item in verify(store).problems if item.fault} <= {"stale"}, step  # the snapshot
        work(store)
        assert verify(store).sound and len(attachments(store, manifest)) == 1, step


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "../evil"}, "file name"),
        ({"name": f"a{DESCRIPTION}"}, "file name"),
        ({"kind": "Two Words"}, "kind"),
        ({"note": "x" * 1001}, "1000"),
        ({"size_bytes": -1}, "size"),
    ],
)
def test_invalid_attachments_are_refused_before_they_are_stored(change: dict[str, object], words: str) -> None:
    attachment = Attachment("a.bin", "vocabulary", "digits", "1", "0" * 64, WORDS, 7, "me", "2026-01-01T00:00:00+00:00")
    assert attachment.to_bytes()
    with pytest.raises(Malformed, match=words):
        replace(attachment, **change).to_bytes()  # type: ignore[arg-type]
