import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from enginesmith.core.errors import InputError, IntegrityError, canonical_json
from enginesmith.registry.evidence.canaries import attach_canary, canaries, covers, targets_named, verdict_on
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import FileStore, Store, open_store
from enginesmith.registry.store.layout import canary_key, evidence_prefix, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channels, lookup, policies
from enginesmith.registry.versions.policies import ChannelPolicy
from pipeline.canary.settle import attach, settle, settle_newest, target_verdicts
from pipeline.rollout import operations
from pipeline.rollout.advance import advance
from tests.enginesmith.registries import engine, publish_engines
from tests.pipeline.canary.files import report_about, write_observations
from tests.pipeline.canary.test_verdicts import refused, run
from tests.pipeline.rollout.fleet import at, plan
from validation.canary.report import read_report

Settle = Callable[..., str]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ENGINESMITH_REGISTRY", str(tmp_path / "registry"))
    return open_store(tmp_path / "registry", create=True)


def published(store: Store, content: str, *targets: str) -> Manifest:
    entries = [engine(store, target, data=f"{content} {target}".encode()) for target in targets]
    return publish_engines(store, entries, content, channel=None).manifest


@pytest.fixture
def pair(store: Store) -> tuple[Manifest, Manifest]:
    """Two versions with an engine for the CPU and one for sm_89 each; stable serves the first."""
    first_manifest, second_manifest = (published(store, content, "cpu", "sm_89") for content in ("one", "two"))
    channels.promote(store, first_manifest, "stable")
    return first_manifest, second_manifest


def serving(store: Store) -> str:
    channel = channel_state.read_channel(store, "digits", "stable")
    assert channel is not None
    return channel.version


@pytest.fixture
def keep(store: Store) -> Settle:
    """Keeps the verdict on a target's engines beside the version, as a worker does, without an event; its digest."""

    def attach_report(target: str, candidate: Manifest, baseline: Manifest, **seen: object) -> str:
        data = report_about(only(candidate, target), only(baseline, target), **seen).to_bytes()
        digest = store.put_bytes(data)
        attach(store, read_report(data), digest)
        return digest

    return attach_report


@pytest.fixture
def settled(store: Store, keep: Settle) -> Settle:
    """As `keep`, and the verdict is settled."""

    def settle_on(target: str, candidate: Manifest, baseline: Manifest, **fault: object) -> str:
        return settle(store, "digits", "stable", keep(target, candidate, baseline, **fault), lambda _: None)

    return settle_on


def hourly(store: Store) -> str:
    return settle_newest(store, "digits", "stable", lambda _: None)


def only(manifest: Manifest, target: str) -> Manifest:
    """The manifest with the engine of one target in front; its digest is the same."""
    order = sorted(manifest.engines, key=lambda entry: entry.target != target)

    class Ordered:
        model, version, digest, engines = manifest.model, manifest.version, manifest.digest, order

    return Ordered


def test_a_pass_on_all_targets_promotes(store: Store, pair, settled: Settle) -> None:
    baseline, two = pair
    output = settled("cpu", two, baseline)
    assert output.startswith("MISSING: digits:stable was not moved to 2: sm_89 MISSING: no canary ran there against 1")
    assert "enginesmith prefect deploy --only canary" in output and "--attach" in output and output.endswith("cpu PASS")
    assert serving(store) == "1"
    assert settled("sm_89", two, baseline) == "promoted: digits:stable -> 2"
    move = channel_state.read_channel(store, "digits", "stable").move
    assert len(move.canary) == 2 and move.why.startswith("canary PASS ")
    assert settled("cpu", two, baseline, seed=1) == "digits:stable serves 2 already", "one more PASS moves nothing"
    assert [(result.target, result.verdict, result.against) for result in canaries(store, two)] == [
        ("cpu", "PASS", "1"), ("cpu", "PASS", "1"), ("sm_89", "PASS", "1"),
    ]  # fmt: skip
    assert verify(store).sound


def test_under_a_policy_with_waves_a_pass_starts_one_rollout(store: Store, pair, settled: Settle) -> None:
    baseline, candidate = pair
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True, rollout=plan("5%", "100%", soak=0)))
    settled("cpu", candidate, baseline)
    assert settled("sm_89", candidate, baseline) == "rollout started: digits:stable -> 2, in 2 waves"
    assert serving(store) == "1"
    operations.abort(store, "digits", "stable", operations.Operator("ada", at(0), "no"))
    assert "a rollout of 2 is aborted; another one starts only by hand" in hourly(store)
    operations.start(store, candidate, "stable", plan("100%", soak=0), operations.Operator("ada", at(0)))
    result = advance(store, "digits", "stable")
    assert result is not None and result.action == "done" and serving(store) == "2"
    assert len(channel_state.read_channel(store, "digits", "stable").move.canary) == 2


def test_a_fail_on_one_target_blocks_passes_on_others(store: Store, pair, settled: Settle) -> None:
    baseline, candidate = pair
    assert settled("sm_89", candidate, baseline, slower=0.05).startswith(
        "FAIL: digits:stable was not moved to 2: cpu MISSING: no canary ran there"
    )
    text = settled("cpu", candidate, baseline)
    assert text.startswith("FAIL: digits:stable was not moved to 2: sm_89 FAIL: latency p50") and serving(store) == "1"
    assert "sm_89 FAIL" in settled("sm_89", candidate, baseline, seed=1), "another run there takes no FAIL back"
    assert serving(store) == "1"


def test_a_fail_on_one_target_rolls_back_and_blocks_promotion(store, pair, settled):
    one, candidate = pair
    settled("cpu", candidate, one)
    channels.promote(store, candidate, "stable")
    assert settled("sm_89", candidate, one, slower=0.05) == "rolled back: digits:stable -> 1" and serving(store) == "1"
    three = published(store, "three", "cpu", "sm_89")
    assert settled("cpu", three, one).startswith("MISSING") and settled("sm_89", three, one).startswith("promoted")
    channels.rollback(store, "digits", "stable")
    assert "promote it by hand to serve it again" in settle_newest(store, "digits", "stable", lambda _: None)
    assert serving(store) == "1"


def test_the_hourly_run_rolls_back_a_fail_with_a_lost_event(store: Store, pair, keep: Settle) -> None:
    first_manifest, second_manifest = pair
    channels.promote(store, second_manifest, "stable")
    keep("cpu", second_manifest, first_manifest)
    assert hourly(store) == "digits:stable serves 2 already"
    keep("sm_89", second_manifest, first_manifest, slower=0.05)
    assert hourly(store) == "rolled back: digits:stable -> 1" and serving(store) == "1"
    assert channel_state.read_channel(store, "digits", "stable").move.why.startswith("canary FAIL ")
    assert "promote it by hand to serve it again" in hourly(store) and serving(store) == "1"


def test_the_hourly_run_rolls_back_a_lost_fail_of_an_older_version(store: Store, pair, keep: Settle) -> None:
    first_manifest, second_manifest = pair
    channels.promote(store, second_manifest, "stable")
    published(store, "three", "cpu", "sm_89")
    keep("cpu", second_manifest, first_manifest, slower=0.05)
    assert hourly(store) == "rolled back: digits:stable -> 1" and serving(store) == "1"


def test_the_hourly_run_ignores_a_fail_known_at_promotion(store, pair, keep, monkeypatch):
    first_manifest, second_manifest = pair
    keep("sm_89", second_manifest, first_manifest, slower=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "now", lambda _: datetime(2999, 1, 1, tzinfo=UTC))
        channels.promote(store, second_manifest, "stable")
    assert hourly(store) == "digits:stable serves 2 already" and serving(store) == "2"


def test_the_hourly_run_ignores_uncounted_targets_and_comparisons(store, pair, keep):
    first_manifest, second_manifest = pair
    channels.promote(store, second_manifest, "stable")
    third_manifest = published(store, "three", "cpu", "sm_89")
    keep("cpu", second_manifest, third_manifest, slower=0.05)  # with what it was never served after
    run("registry", "policy", "set", "digits:stable", "--canary-on", "cpu")
    keep("sm_89", second_manifest, first_manifest, slower=0.05)
    assert hourly(store).startswith("MISSING: digits:stable was not moved to 3") and serving(store) == "2"


def test_without_an_earlier_version_the_newest_may_still_be_promoted(store: Store, pair, keep: Settle) -> None:
    first_manifest, second_manifest = pair
    channels.promote(store, second_manifest, "stable")
    keep("cpu", second_manifest, first_manifest, slower=0.05)
    store.remove(manifest_key("digits", "1"))
    output = hourly(store)
    assert "which was deleted since" in output and output.endswith("digits:stable serves 2 already")
    third_manifest = published(store, "three", "cpu", "sm_89")
    keep("cpu", third_manifest, second_manifest), keep("sm_89", third_manifest, second_manifest)
    assert hourly(store).endswith("promoted: digits:stable -> 3") and serving(store) == "3"


def test_too_few_requests_on_one_target_leave_the_channel(pair, settled: Settle) -> None:
    one, two = pair
    settled("sm_89", two, one)
    assert settled("cpu", two, one, count=50).startswith("INSUFFICIENT: digits:stable was not moved to 2: cpu INSUFF")
    assert settled("cpu", two, one) == "promoted: digits:stable -> 2", "more traffic may show it"


def test_a_target_without_an_engine_is_missing_with_a_remedy(store: Store, pair, settled) -> None:
    first_manifest, _ = pair
    text = settled("cpu", published(store, "three", "cpu"), first_manifest)
    assert "sm_89 MISSING: digits@3 has no engine for it; build one" in text
    assert run("registry", "policy", "set", "digits:stable", "--canary-on", "cpu").exit_code == 0
    text = settle_newest(store, "digits", "stable", lambda _: None)
    assert text.startswith("PASS, and digits:stable was not moved: ") and "digits@3 has nothing for sm_89 fp32" in text


def test_a_policy_names_the_counted_targets(store: Store, pair, settled: Settle) -> None:
    baseline, two = pair
    text = run("registry", "policy", "set", "digits:stable", "--canary-on", "l4").output
    assert "a canary's PASS on each of sm_89" in text
    assert policies.of_channel(store, "digits", "stable").canary_on == ("sm_89",), "a product is its generation"
    assert settled("cpu", two, baseline, slower=0.05).startswith("MISSING: digits:stable was not moved to 2: sm_89")
    assert "needs the PASS of a canary on sm_89" in refused(run("promote", "digits@2", "digits:stable"))
    assert settled("sm_89", two, baseline) == "promoted: digits:stable -> 2"
    text = settled("cpu", two, baseline, slower=0.05, seed=2)
    assert text == "FAIL on cpu, which does not count for digits:stable (sm_89 do); not moved" and serving(store) == "2"


def test_a_person_promotes_with_a_report_for_each_target(store: Store, pair, tmp_path) -> None:
    baseline, two = pair
    run("registry", "policy", "set", "digits:stable", "--canary-on", "sm_89,cpu")
    for target in ("cpu", "sm_89"):
        paths = write_observations(tmp_path / target, only(two, target), only(baseline, target))
        words = ("canary", "judge", "--candidate", paths[0], "--baseline", paths[1], "--out", tmp_path / target)
        result = run(*words, "--attach")
        assert result.exit_code == 0 and f"the verdict on {target}" in result.stderr
    report = tmp_path / "cpu/report.json"
    assert "on sm_89" in refused(run("promote", "digits@2", "digits:stable", "--canary", report))
    both_texts = ("--canary", report, "--canary", tmp_path / "sm_89/report.json")
    assert [
        actual.verdict for actual in target_verdicts(store, two, channel_state.read_channel(store, "digits", "stable"))
    ] == ["PASS"] * 2
    assert run("promote", "digits@2", "digits:stable", *both_texts).exit_code == 0 and serving(store) == "2"


def test_a_candidate_proven_after_its_canaries_is_promoted_later(store: Store, pair, settled: Settle) -> None:
    first_manifest, second_manifest = pair
    settled("cpu", second_manifest, first_manifest)
    policies.write(store, "digits", "stable", ChannelPolicy(proven=("sm_90",), canary_on=("cpu",)))
    output = settle_newest(store, "digits", "stable", lambda _: None)
    assert output.startswith("PASS, and digits:stable was not moved: ") and "sm_90" in output
    policies.write(store, "digits", "stable", ChannelPolicy(canary_on=("cpu",)))
    assert settle_newest(store, "digits", "stable", lambda _: None) == "promoted: digits:stable -> 2"


def test_a_verdict_against_a_replaced_version_does_not_count(store: Store, pair, settled: Settle) -> None:
    first_manifest, second_manifest = pair
    channels.promote(store, published(store, "three", "cpu", "sm_89"), "stable")
    assert "no canary ran there against 3" in settled("cpu", second_manifest, first_manifest) and serving(store) == "3"


def test_a_stored_verdict_is_checked(store: Store, pair, settled: Settle) -> None:
    first_manifest, second_manifest = pair
    settled("cpu", second_manifest, first_manifest)
    (result,) = canaries(store, second_manifest)
    with pytest.raises(InputError, match="which digits@1 does not have"):
        attach_canary(store, first_manifest, result)
    key = canary_key("digits", "2", "cpu", result.report)
    store.replace(canary_key("digits", "2", "sm_89", result.report), store.read(key) or b"", None)
    with pytest.raises(IntegrityError, match="edited by hand or moved"):
        canaries(store, second_manifest)
    assert any(problem.kind == "edited" for problem in verify(store).problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "sm_90"}, "does not run on sm_90"),
        ({"target": "x86-64-v3"}, "does not run on x86-64-v3"),
        ({"target": "a/b"}, "target"),
        ({"against": ""}, "against"),
        ({"baseline": ""}, "baseline"),
    ],
)
def test_a_verdict_with_a_wrong_field_is_not_stored(store, pair, settled, change, message):
    first_manifest, second_manifest = pair
    settled("sm_89", second_manifest, first_manifest)
    (result,) = canaries(store, second_manifest)
    with pytest.raises(InputError, match=message):
        attach_canary(store, second_manifest, replace(result, **change))
    assert canaries(store, second_manifest) == [result]


def test_a_damaged_model_does_not_block_others(store, pair, settled, monkeypatch):
    flows = pytest.importorskip("pipeline.orchestration.flows.settle_canary")
    first_manifest, second_manifest = pair
    settled("cpu", second_manifest, first_manifest)
    store.create(canary_key("digits", "2", "cpu", "0" * 64), b"{}")
    monkeypatch.setattr(flows.lookup, "models", lambda _: ["digits", "other", "another"])
    monkeypatch.setattr(flows, "get_run_logger", lambda: logging.getLogger("flow"))
    monkeypatch.setattr(flows.PrefectRunner, "call", lambda _, step, *arguments: step(*arguments))
    state = flows.settle_canary.fn(registry=store.uri)
    assert state.is_failed() and "3 of 3 models" in state.message
    digits, *other_data = state.data
    assert "run the canary again" in digits and all("no model" in output for output in other_data)
    monkeypatch.setattr(flows.lookup, "models", lambda _: [])
    assert flows.settle_canary.fn(registry=store.uri).message == "checked 0 models"
    monkeypatch.setattr(flows, "settle_newest", lambda *_: "nothing to settle")
    assert flows.settle_canary.fn(registry=store.uri, model="digits").message == "checked 1 model"


def test_a_report_about_another_model_moves_nothing(store: Store, pair, settled: Settle) -> None:
    first_manifest, second_manifest = pair
    settled("cpu", second_manifest, first_manifest, slower=0.05)
    (result,) = canaries(store, second_manifest)
    with pytest.raises(InputError, match="is about digits, not about other"):
        settle(store, "other", "stable", result.report, lambda _: None)


def test_a_fail_during_a_promotion_rolls_it_back(store, pair, settled, monkeypatch):
    """Two runs at once: one has seen no FAIL yet, the other finds the candidate not served yet."""
    first_manifest, second_manifest = pair
    settled("cpu", second_manifest, first_manifest)
    promote, message = channels.promote, []

    def slow_promote(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(channels, "promote", promote)
        message.append(settled("sm_89", second_manifest, first_manifest, slower=0.05, seed=1))
        return promote(*arguments, **options)

    monkeypatch.setattr(channels, "promote", slow_promote)
    assert settled("sm_89", second_manifest, first_manifest) == "rolled back: digits:stable -> 1"
    assert message[0].startswith("FAIL: digits:stable was not moved") and serving(store) == "1"


def test_targets_that_the_channel_lacks_are_reported_as_incomparable(store: Store, pair) -> None:
    third_manifest = published(store, "three", "cpu", "sm_89", "sm_90")
    run("registry", "policy", "set", "digits:stable", "--canary-on", "sm_90")
    (result,) = target_verdicts(store, third_manifest, channel_state.read_channel(store, "digits", "stable"))
    assert "digits:stable serves digits@1, which has no engine for it, so there is nothing to compare with" in str(
        result
    )


def test_several_runs_give_one_verdict() -> None:
    assert covers("x86-64-v4-vnni", "cpu") and covers("cpu", "cpu") and covers("sm_89", "sm_89")
    assert not covers("sm_89", "cpu") and not covers("cpu", "x86-64-v3") and not covers("sm_80", "sm_89")
    assert targets_named(["l4", "l40s", "cpu", "avx2"]) == ("cpu", "sm_89", "x86-64-v3")
    assert verdict_on("cpu", "0" * 64, []) is None


def test_missing_served_and_published_versions_are_reported(store: Store, pair) -> None:
    assert "serves nothing" in settle_newest(store, "digits", "beta", lambda _: None)
    with pytest.raises(Exception, match="no model 'other'"):
        settle_newest(store, "other", "stable", lambda _: None)
    assert lookup.models(store) == ["digits"]


def test_a_lost_fail_with_an_early_clock_is_rolled_back(store: Store, pair, keep: Settle) -> None:
    first_manifest, second_manifest = pair
    channels.promote(store, second_manifest, "stable")
    keep("cpu", second_manifest, first_manifest, slower=0.05)
    (key,) = store.list(evidence_prefix("canaries", "digits", second_manifest.version))
    data = store.read(key) or b""
    document = {**json.loads(data), "created_at": "2020-01-01T00:00:00+00:00"}
    assert store.replace(key, canonical_json(document), data)
    assert hourly(store) == "rolled back: digits:stable -> 1" and serving(store) == "1"
