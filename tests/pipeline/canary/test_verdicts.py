import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from enginesmith.cli import enginesmith
from enginesmith.core.errors import digest_of
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions import channel_state, channels
from pipeline.canary import verdicts
from pipeline.rollout import operations
from tests.enginesmith.registries import engine, publish_engines
from tests.pipeline.canary.files import report_about, write_observations
from tests.pipeline.projects import Project, write_project
from tests.pipeline.rollout.fleet import plan


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ENGINESMITH_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("USER", "ada")
    monkeypatch.chdir(tmp_path)
    return open_store(tmp_path / "registry", create=True)


@pytest.fixture
def versions(store: Store) -> list[Manifest]:
    """Three versions with an engine each; stable serves the first."""
    items = [
        publish_engines(store, [engine(store, data=content.encode())], content, channel=None).manifest
        for content in ("one", "two", "three")
    ]
    channels.promote(store, items[0], "stable")
    return items


def run(*words: object) -> Result:
    return CliRunner().invoke(enginesmith, [str(word) for word in words])


def judged(folder: Path, candidate: Manifest, baseline: Manifest, *words: object, **fault: object) -> Result:
    paths = write_observations(folder, candidate, baseline, **fault)
    return run("canary", "judge", "--candidate", paths[0], "--baseline", paths[1], *words)


def refused(result: Result) -> str:
    assert result.exit_code != 0
    return str(result.exception)


def test_a_pass_promotes_only_its_candidate(store, versions, tmp_path):
    first_version, second_version, _ = versions
    result = judged(tmp_path / "c", second_version, first_version)
    assert result.exit_code == 0 and result.output.startswith("PASS: 4 criteria passed")
    assert (tmp_path / "c" / "report.html").read_text().startswith("<!doctype html>")
    report = tmp_path / "c" / "report.json"
    assert "the canary is about digits@2" in refused(run("promote", "digits@3", "digits:stable", "--canary", report))
    assert channel_state.read_channel(store, "digits", "stable").version == "1"
    assert run("promote", "digits@2", "digits:stable", "--why", "faster", "--canary", report).exit_code == 0
    move = channel_state.read_channel(store, "digits", "stable").move
    digest = json.loads(report.read_text())["digest"]
    assert (move.version, move.why) == ("2", f"faster canary PASS {digest[:12]}")


def test_nothing_but_a_pass_promotes(store, versions, tmp_path):
    first_version, second_version, _ = versions
    result = judged(tmp_path / "slow", second_version, first_version, slower=0.05)
    assert result.exit_code == 1 and result.output.startswith("FAIL: latency p50")
    assert "verdict is FAIL" in refused(
        run("promote", "digits@2", "digits:stable", "--canary", tmp_path / "slow/report.json")
    )
    few_verdict = judged(tmp_path / "few", second_version, first_version, count=50)
    assert few_verdict.exit_code == 1 and few_verdict.output.startswith("INSUFFICIENT")
    output = refused(run("promote", "digits@2", "digits:stable", "--canary", tmp_path / "few/report.json"))
    assert "verdict is INSUFFICIENT" in output
    assert "no such file" in refused(run("promote", "digits@2", "--canary", tmp_path / "gone.json"))
    assert channel_state.read_channel(store, "digits", "stable").version == "1"


def test_a_candidate_that_dies_is_not_promoted(store, versions, tmp_path):
    """10,000 requests to both; the candidate's log ends early."""
    first_version, second_version, _ = versions
    paths = write_observations(tmp_path / "c", second_version, first_version, count=10_000)
    paths[0].write_text("".join(paths[0].read_text().splitlines(keepends=True)[:4001]))
    result = run("canary", "judge", "--candidate", paths[0], "--baseline", paths[1], "--missing", "ignored")
    assert result.exit_code == 1 and not result.output.startswith("PASS")
    assert "candidate.jsonl (candidate) stops" in result.output
    output = refused(run("promote", "digits@2", "digits:stable", "--canary", tmp_path / "c/report.json"))
    assert "verdict is" in output and channel_state.read_channel(store, "digits", "stable").version == "1"


def test_a_manipulated_report_does_not_count(store, versions, tmp_path):
    first_version, second_version, _ = versions
    path = tmp_path / "report.json"
    path.write_bytes(report_about(second_version, first_version).to_bytes())
    whole_document = json.loads(path.read_text())

    def forged(**changes):
        bare_values = {key: value for key, value in {**whole_document, **changes}.items() if key != "digest"}
        path.write_text(json.dumps({**bare_values, "digest": digest_of(bare_values)}))
        return refused(run("promote", "digits@2", "digits:stable", "--canary", path))

    assert "which digits@2 does not have" in forged(candidate={**whole_document["candidate"], "engine": "f" * 64})
    assert "not about digits@2" in forged(candidate={**whole_document["candidate"], "manifest": "f" * 64})
    assert "other thresholds" in forged(thresholds={**whole_document["thresholds"], "error_rate": 0.5})
    path.write_text(json.dumps({**whole_document, "reason": "believe me"}))
    assert "edited by hand" in refused(run("promote", "digits@2", "digits:stable", "--canary", path))
    assert channel_state.read_channel(store, "digits", "stable").version == "1"


def test_engines_without_a_canary_are_named(store, tmp_path):
    first_manifest = publish_engines(store, [engine(store)], "a", channel=None).manifest
    pair = [engine(store, data=b"x"), engine(store, precision="int8", data=b"y")]
    second_manifest = publish_engines(store, pair, "b", channel=None).manifest
    channels.promote(store, first_manifest, "stable")
    (tmp_path / "report.json").write_bytes(report_about(second_manifest, first_manifest).to_bytes())
    result = run("promote", "digits@2", "digits:stable", "--canary", tmp_path / "report.json")
    assert result.exit_code == 0 and "1 engine without a canary: cpu int8 onnxruntime" in result.stderr


def test_a_fail_rolls_back_only_a_served_candidate(store, versions, tmp_path):
    first_version, second_version, _ = versions
    channels.promote(store, second_version, "stable")
    watching_verdict = judged(tmp_path / "watched", second_version, first_version, failing=0.02)
    served_channel = channel_state.read_channel(store, "digits", "stable")
    assert watching_verdict.exit_code == 1 and served_channel.version == "2", "not without --auto"
    result = judged(tmp_path / "c", second_version, first_version, "--auto", failing=0.02)
    assert result.exit_code == 1 and "rolled back: digits:stable -> 1" in result.stderr
    move = channel_state.read_channel(store, "digits", "stable").move
    assert move.action == "rollback" and move.by == "ada" and move.why.startswith("canary FAIL ")
    second_verdict = judged(tmp_path / "d", second_version, first_version, "--auto", failing=0.02)
    assert "now serves version 1" in second_verdict.stderr
    assert channel_state.read_channel(store, "digits", "stable").version == "1"
    good_verdict = judged(tmp_path / "e", first_version, second_version, "--auto")
    assert good_verdict.exit_code == 0 and channel_state.read_channel(store, "digits", "stable").version == "1"


def test_a_rollback_that_loses_a_race_changes_nothing(store, versions, monkeypatch):
    first_version, two, third_version = versions
    channels.promote(store, two, "stable")
    rollback, eve = channels.rollback, operations.Operator("eve", store.now())
    moves = [partial(channels.promote, store, version, "stable", by="eve") for version in (two, third_version, two)]
    changes = iter([partial(operations.start, store, third_version, "stable", plan("100%"), eve), lambda: None, *moves])

    def change_first(*words, **terms):
        next(changes)()
        return rollback(*words, **terms)

    monkeypatch.setattr(channels, "rollback", change_first)
    failed_report = replace(report_about(two, first_version), verdict="FAIL")
    # A rollout that began meanwhile changes nothing of what is served.
    assert verdicts.roll_back(store, failed_report, "stable", "ada") == "rolled back: digits:stable -> 1"
    next(changes)()
    assert "now serves version 3; no channel was moved" in verdicts.roll_back(store, failed_report, "stable", "ada")
    assert "eve moved it to 2 meanwhile" in str(run("rollback", "digits").exception)


def test_looks_continue_from_report_to_report(store, versions, tmp_path):
    version, two, _ = versions
    early_verdict = judged(tmp_path / "c", two, version, "--planned", 6000, "--out", tmp_path / "first", count=1500)
    assert early_verdict.exit_code == 1 and early_verdict.output.startswith("INSUFFICIENT")
    result = judged(tmp_path / "c", two, version, "--previous", tmp_path / "first/report.json", "--json", count=6000)
    looks = json.loads(result.stdout)["looks"]
    assert looks["requests"] == [1500, 6000] and looks["fractions"] == [0.25, 1.0] and looks["level_pass"] < 0.05
    assert result.exit_code == 0
    output = refused(judged(tmp_path / "c", two, version, "--previous", tmp_path / "c/report.json"))
    assert "already decided: PASS" in output


def test_thresholds_come_from_the_given_spec(store, versions, tmp_path):
    write_project(tmp_path / "project")
    project = Project(tmp_path / "project")
    project.change_spec(validation={"canary": {"latency": {"p50": 0.2, "p99": None}, "error_rate": 0.01}})
    result = judged(tmp_path / "c", versions[1], versions[0], "--spec", project.spec, "--json", slower=0.05)
    document = json.loads(result.stdout)
    assert document["verdict"] == "PASS" and document["thresholds"]["latency"] == {"p50": 0.2}
    assert document["thresholds_from"] == "the spec tiny.yaml"
