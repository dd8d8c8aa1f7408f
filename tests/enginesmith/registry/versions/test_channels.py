import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError
from enginesmith.core.names import parse_reference
from enginesmith.registry import registered_specs
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import channel_key, pin_key
from enginesmith.registry.versions import channel_state, channels, lookup
from enginesmith.registry.versions.channel_state import ChannelHistory, Move, read_history
from tests.enginesmith.registries import engine, on_each_store, publish_engines, report, run_together
from tests.enginesmith.registry.memory import MemoryStore, mark_late


def published(store: Store, *contents: object) -> list:
    return [publish_engines(store, [engine(store)], content, channel=None).manifest for content in contents]


@on_each_store
def test_promote_and_rollback_keep_a_history(store: Store) -> None:
    first_manifest, second_manifest, third_manifest = published(store, "a", "b", "c")
    for manifest in (first_manifest, second_manifest, third_manifest):
        channels.promote(store, manifest, "stable", by="ada", why="because")
    assert channels.rollback(store, "digits", "stable", by="bob").version == "2"
    assert channels.rollback(store, "digits", "stable").version == "1"
    with pytest.raises(UnknownNameError, match="served nothing before version 1; there is nothing to roll back to"):
        channels.rollback(store, "digits", "stable")
    after = channels.promote(store, third_manifest, "stable")
    history = read_history(store, after)
    assert [move.version for move in history.moves] == ["1", "2", "3", "2", "1", "3"]
    assert (history.moves[0].by, history.moves[0].why, history.moves[3].by) == ("ada", "because", "bob")
    assert channels.rollback(store, "digits", "stable").version == "1"
    assert channel_state.read_channel(store, "digits", "stable") != after and lookup.channel_names(store, "digits") == [
        "stable"
    ]


def test_promoting_the_served_version_changes_nothing(store: Store) -> None:
    (manifest,) = published(store, "a")
    first_move = channels.promote(store, manifest, "stable", why="first")
    assert channels.promote(store, manifest, "stable", why="again") == first_move


@pytest.mark.parametrize(
    ("moves", "active"),
    [("A Z B B -B", "A Z B"), ("A B B -B -A", "A"), ("A B -A", "A"), ("A B A -B", "A B"), ("A B B", "A B")],
)
def test_older_histories_may_roll_back_to_the_served_version(moves: str, active: str) -> None:
    written = tuple(Move(at[-1], at[-1], "", action="rollback" if "-" in at else "promote") for at in moves.split())
    assert " ".join(move.version for move in ChannelHistory(written).active_promotions()) == active


def test_rolling_back_an_unknown_move_is_refused(store: Store) -> None:
    with pytest.raises(UnknownNameError, match="does not exist"):
        channels.rollback(store, "digits", "stable")


def test_only_candidate_takes_unproven_engines(store: Store) -> None:
    entries = [engine(store), engine(store, "sm_89", status="unproven")]
    manifest = publish_engines(store, entries).manifest
    assert channel_state.read_channel(store, "digits", "candidate")
    for name in ("stable", "nightly"):
        with pytest.raises(InputError, match=r"sm_89 fp32 tensorrt-rtx.*enginesmith validate digits@1.*--proven-only"):
            channels.promote(store, manifest, name)
    only_move = channels.promote(store, manifest, "stable", proven_only=True)
    assert only_move.proven_only and channel_state.read_channel(store, "digits", "stable") == only_move


def test_a_version_with_nothing_proven_cannot_serve_only_proven_engines(store: Store) -> None:
    manifest = publish_engines(store, [engine(store, "sm_89", status="unproven")]).manifest
    with pytest.raises(InputError, match="no proven engine"):
        channels.promote(store, manifest, "stable", proven_only=True)
    with pytest.raises(InputError, match=r"enginesmith validate digits@1` on a node with that hardware$"):
        channels.promote(store, manifest, "stable")  # and not the advice that it just refused


def test_the_remedy_for_insufficient_golden_data_is_other_golden_data(store: Store) -> None:
    reason = "not measured: q: the same in all 8 golden samples"
    counts = {"passed": 9, "failed": 0, "not_measured": 1}
    blind = replace(engine(store, "cpu", status="unproven"), reason=reason, checks=counts)
    other_engine = engine(store, "sm_89", status="unproven")

    def refusal(*entries: EngineEntry, model: str) -> str:
        with pytest.raises(InputError) as error:
            channels.promote(store, publish_engines(store, list(entries), model=model).manifest, "stable")
        return str(error.value)

    output = refusal(blind, model="one")
    assert output.endswith(f"build again with other golden data ({blind.unit}: {reason})") and "validate" not in output
    both_refusal = refusal(blind, other_engine, engine(store, "sm_80"), model="two")
    assert "run `enginesmith validate two@1` on a node with that hardware and build again" in both_refusal
    assert "or add --proven-only" in both_refusal


def test_references_are_resolved(store: Store) -> None:
    first_manifest, second_manifest = published(store, "a", "b")

    def located(text: str) -> str:
        return lookup.locate(store, parse_reference(text)).manifest.version

    assert (located("digits"), located("digits@1")) == ("2", "1")
    channels.promote(store, first_manifest, "candidate")
    assert located("digits") == "1"
    channels.promote(store, second_manifest, "stable")
    assert (located("digits"), located("digits:candidate")) == ("2", "1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("digit", "no model 'digit'.*did you mean 'digits'"),
        ("other:stable", "no model 'other'.*known: digits"),
        ("empty", "model 'empty' in .* has no version"),
        ("digits@7", "no version of digits '7'.*known: 1"),
        ("digits:stabel", "no channel of digits 'stabel'.*did you mean 'stable'"),
    ],
)
def test_an_unknown_reference_lists_the_known_names(store: Store, text: str, words: str) -> None:
    channels.promote(store, published(store, "a")[0], "stable")
    store.create("models/empty/specs/a.json", b"{}")
    with pytest.raises(UnknownNameError, match=words):
        lookup.locate(store, parse_reference(text))


def test_a_channel_edited_by_hand_is_refused(store: Store) -> None:
    manifest, _ = published(store, "a", "b")
    channels.promote(store, manifest, "stable")
    key = channel_key("digits", "stable")
    data = store.read(key) or b""
    document = json.loads(data)
    move = {**document["move"], "version": "2"}
    for edited_fields in (
        {**document, "move": {**move, "extra": 1}},
        {**document, "move": {**move, "at": None}},
        {**document, "move": {**move, "version": "../2"}},
        {**document, "snapshots": {"x": "y"}},
    ):
        store.replace(key, json.dumps(edited_fields).encode(), store.read(key))
        with pytest.raises(IntegrityError, match="digits:stable"):
            channel_state.read_channel(store, "digits", "stable")
    store.replace(key, json.dumps({**document, "move": move}).encode(), store.read(key))
    with pytest.raises(IntegrityError, match="replaced by hand"):
        lookup.locate(store, parse_reference("digits:stable"))


@on_each_store
def test_each_racing_promotion_moves_the_channel_or_names_the_winner(store: Store) -> None:
    entry, names = engine(store), [f"v{number}" for number in range(8)]
    manifests = [publish_engines(store, [entry], name, channel=None, version=name).manifest for name in names]

    def insist(manifest: Manifest) -> None:
        try:
            channels.promote(store, manifest, "stable", by=manifest.version)
        except ConflictError as error:
            assert re.search(r"digits:stable: (v\d) moved it to \1 meanwhile", str(error))
            insist(manifest)

    run_together(partial(insist, manifest) for manifest in manifests)
    channel = channel_state.read_channel(store, "digits", "stable")
    assert channel is not None and sorted(move.by for move in read_history(store, channel).moves) == names


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("way", ["promoted", "rolled back", "unpinned"])
def test_versions_no_longer_served_have_the_full_grace_period(
    way: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection that looked before version 2 was served marks it while it is; nobody may delete it by that mark.
    slow: it does so when the writer has taken the mark away, and before its write."""
    store: Any = MemoryStore()
    first_manifest, second_manifest, third_manifest = published(store, "a", "b", "c")
    channels.promote(store, first_manifest, "stable")
    if way == "unpinned":
        registered_specs.pin(store, second_manifest)
    else:
        channels.promote(store, second_manifest, "stable")
    marks = [] if slow else [mark_late(store, "digits@2")]
    for work in (MemoryStore.replace, MemoryStore.remove):

        def write(self: Any, key: str, *rest: Any, work: Any = work) -> Any:
            if key in (channel_key("digits", "stable"), pin_key("digits", "2")):
                assert slow or not marks[0](), "it may be killed after its write"
                marks.extend([mark_late(self, "digits@2")] if slow else [])
            return work(self, key, *rest)

        monkeypatch.setattr(MemoryStore, work.__name__, write)
    assert slow or marks[0]()
    if way == "unpinned":
        registered_specs.unpin(store, "digits", "2")
    elif way == "promoted":
        channels.promote(store, third_manifest, "stable")
    else:
        channels.rollback(store, "digits", "stable")
    assert len(marks) == 1 and not marks[0]()


def test_a_proof_on_random_inputs_opens_a_proven_channel_only_if_recorded(store: Store) -> None:
    manifest = publish_engines(store, [engine(store, status="proven on random inputs")]).manifest
    assert lookup.read_channel(store, "digits", "candidate")
    with pytest.raises(InputError, match=r"proven on random inputs: cpu fp32.*golden\.data.*--accept-random-inputs"):
        channels.promote(store, manifest, "stable")
    with pytest.raises(InputError, match="no proven engine"):
        channels.promote(store, manifest, "stable", proven_only=True)
    assert channels.promote(store, manifest, "stable", random_inputs=True).move.random_inputs
    after = lookup.read_channel(store, "digits", "stable")
    assert after and after.move.random_inputs, "the history says that it was accepted"
    unproven_manifest = publish_engines(store, [engine(store, "sm_89", status="unproven")], model="other").manifest
    with pytest.raises(InputError, match="unproven ones"):
        channels.promote(store, unproven_manifest, "stable", random_inputs=True)
    attest(store, unproven_manifest, report(unproven_manifest.engines[0], "proven on random inputs"))
    with pytest.raises(InputError, match="proven on random inputs: sm_89"):
        channels.promote(store, unproven_manifest, "stable")
