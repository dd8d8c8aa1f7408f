import json
from datetime import timedelta

import pytest

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError, canonical_json
from enginesmith.core.names import parse_reference
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.gc import collect
from enginesmith.registry.leases import read_shards, read_state
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, policy_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channels, policies
from enginesmith.registry.versions.index import history
from enginesmith.registry.versions.policies import CanaryPass, ChannelPolicy
from tests.enginesmith.registries import engine, on_each_store, publish_engines, report


def publish(store: Store, content: str, *entries: object) -> Manifest:
    result = entries or (engine(store, data=content.encode()),)
    return publish_engines(store, result, content, channel=None).manifest  # type: ignore[arg-type]


def passed(store: Store, manifest: Manifest, baseline: Manifest, which: int = 0) -> CanaryPass:
    """A canary's PASS, as the registry keeps it."""
    candidate = {"engine": str(manifest.engines[which].digest)}
    document = {"verdict": "PASS", "candidate": candidate, "baseline": {"manifest": baseline.digest}}
    return policies.canary_pass(store, store.put_bytes(canonical_json(document)))


@on_each_store
def test_a_target_may_require_a_proven_engine(store: Store) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish(store, "a", engine(store), entry)
    policies.write(store, "digits", "stable", ChannelPolicy(("ada", "CPU")), by="ada")
    with pytest.raises(
        InputError, match=r"policy of digits:stable needs a proven engine for sm_89.*enginesmith validate"
    ):
        channels.promote(store, manifest, "stable", proven_only=True)
    attest(store, manifest, report(entry, "proven"))
    assert channels.promote(store, manifest, "stable").version == "1"
    # candidate takes anything, unless a policy says otherwise
    policies.write(store, None, "candidate", ChannelPolicy(("sm_90",)))
    actual = publish_engines(store, [engine(store, data=b"b")], "b")
    assert actual.channel_refusal and "needs a proven engine for sm_90" in actual.channel_refusal
    assert channel_state.read_channel(store, "digits", "candidate") is None


def test_a_models_policy_replaces_the_general_one(store: Store) -> None:
    policies.write(store, None, "stable", ChannelPolicy(("sm_90",)))
    assert policies.of_channel(store, "digits", "stable").proven == ("sm_90",)
    policies.write(store, "digits", "stable", ChannelPolicy(), by="ada", why="has no GPU")
    channel = policies.of_channel(store, "digits", "stable")
    assert channel.proven == () and (channel.by, channel.why) == ("ada", "has no GPU")
    assert channels.promote(store, publish(store, "a"), "stable").version == "1"
    assert policies.of_channel(store, "other", "stable").proven == ("sm_90",)


@pytest.mark.parametrize(
    ("target", "error", "words"), [("amper", UnknownNameError, "did you mean"), ("gpu", InputError, "stands for sm_75")]
)
def test_a_policys_targets_are_unique_names(store: Store, target: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        policies.write(store, "digits", "stable", ChannelPolicy((target,)))


@on_each_store
def test_every_engine_of_the_targets_needs_a_canary(store: Store) -> None:
    first_manifest = publish(store, "a")
    channels.promote(store, first_manifest, "stable")
    pair = engine(store, data=b"x"), engine(store, precision="int8", data=b"y")
    two = publish(store, "b", *pair)
    policies.write(store, "digits", "stable", ChannelPolicy(("cpu",), canary=True))
    with pytest.raises(InputError, match=r"needs a canary's PASS: run `enginesmith canary run --candidate digits@2"):
        channels.promote(store, two, "stable")
    first, second = passed(store, two, first_manifest), passed(store, two, first_manifest, 1)
    with pytest.raises(InputError, match="none ran cpu int8 onnxruntime: run one for each"):
        channels.promote(store, two, "stable", canaries=[first])
    assert channels.promote(store, two, "stable", by="ada", canaries=[first, second]).version == "2"
    (before, move) = history(store, parse_reference("digits:stable"))
    assert move.move.canary == (first.report, second.report) and move.report == two.report and before.move.canary == ()
    assert move.move.by == "ada" and store.has(first.report)
    assert verify(store).problems == ()
    store.remove(blob_key(first.report))
    (problem,) = verify(store).problems
    assert (problem.kind, problem.affects) == ("missing", ("digits:stable canary report of the move to 2",))
    # Going back is always allowed.
    assert channels.rollback(store, "digits", "stable").version == "1"


def test_without_targets_one_pass_is_enough(store: Store) -> None:
    first_manifest = publish(store, "a")
    channels.promote(store, first_manifest, "stable")
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    two = publish(store, "b", engine(store, data=b"x"), engine(store, precision="int8", data=b"y"))
    assert channels.promote(store, two, "stable", canaries=[passed(store, two, first_manifest)]).version == "2"


def test_a_collection_that_marked_a_canarys_report_keeps_it_for_the_channel(store: Store) -> None:
    first_manifest, second_manifest = publish(store, "a"), publish(store, "b")
    channels.promote(store, first_manifest, "stable")
    result = passed(store, second_manifest, first_manifest)
    collect(store, Rules(), timedelta(days=1), delete=True)

    def marked() -> bool:
        return any(result.report in shard.waiting for shard in read_shards(store, read_state(store).shards).values())

    assert marked()
    channels.promote(store, second_manifest, "stable", canaries=[result])
    assert not marked()


def test_a_pass_counts_against_the_served_version_at_the_move(store: Store) -> None:
    first_manifest, second_manifest, third_manifest = (publish(store, it) for it in "abc")
    channels.promote(store, first_manifest, "stable")
    result = passed(store, second_manifest, first_manifest)
    channels.promote(store, third_manifest, "stable")
    with pytest.raises(ConflictError, match="now serves 3, not the canary's baseline"):
        channels.promote(store, second_manifest, "stable", canaries=[result])
    lost_pass = CanaryPass("0" * 64, result.engine, third_manifest.digest)
    with pytest.raises(IntegrityError, match="canary report 0000"):
        channels.promote(store, second_manifest, "stable", canaries=[lost_pass])


def test_a_blob_without_a_pass_is_refused(store: Store) -> None:
    for text in (b"{}", b"[", b'{"verdict": "FAIL"}'):
        with pytest.raises(IntegrityError, match="canary report"):
            policies.canary_pass(store, store.put_bytes(text))


def test_a_policy_edited_by_hand_is_refused_and_reported(store: Store) -> None:
    manifest = publish(store, "a")
    policies.write(store, "digits", "stable", ChannelPolicy(("cpu",)))
    key = policy_key("digits", "stable")
    document = json.loads(store.read(key) or b"")
    for edited_fields in ({**document, "extra": 1}, {**document, "canary": "no"}, {}, {**document, "format": 2}):
        store.replace(key, json.dumps(edited_fields).encode(), store.read(key))
        remedy = "upgrade enginesmith$" if edited_fields.get("format") == 2 else "enginesmith registry policy set"
        with pytest.raises(IntegrityError, match=f"policy of digits:stable.*{remedy}"):
            channels.promote(store, manifest, "stable")
        assert [(problem.kind, problem.what) for problem in verify(store).problems] == [("edited", key)]
    with pytest.raises(IntegrityError, match=remedy):  # that of a newer release is not replaced
        policies.write(store, "digits", "stable", ChannelPolicy())


def test_history(store: Store) -> None:
    first_manifest, second_manifest = publish(store, "a"), publish(store, "b")
    channels.promote(store, first_manifest, "candidate", by="ada", why="first")
    channels.promote(store, second_manifest, "stable", by="ada")
    channels.promote(store, first_manifest, "stable", by="bob")
    channels.rollback(store, "digits", "stable", by="eve", why="slow")
    rows = history(store, parse_reference("digits:stable"))
    assert [(row.move.version, row.move.by, row.move.action) for row in rows] == [
        ("2", "ada", "promote"),
        ("1", "bob", "promote"),
        ("2", "eve", "rollback"),
    ]
    assert rows[2].move.why == "slow" and all(row.report == first_manifest.report for row in rows)
    assert [row.move.by for row in history(store, parse_reference("digits:stable"), 1)] == ["eve"]
    assert {row.channel for row in history(store, parse_reference("digits"))} == {"candidate", "stable"}
    for text, words in (("digits@1", "only channels"), ("digits:no", "channels of digits: candidate, stable")):
        with pytest.raises(UnknownNameError, match=words):
            history(store, parse_reference(text))
