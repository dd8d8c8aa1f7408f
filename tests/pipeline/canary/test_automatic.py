from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.core.hardware import cpu_kinds
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.text import now
from enginesmith.recording.recorder import ObservationLog
from enginesmith.registry.evidence.canaries import CanaryVerdict, attach_canary, canaries
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import channel_key
from enginesmith.registry.versions import channels, lookup
from pipeline.canary import engines, run
from pipeline.canary.automatic import CanaryRequest, canary, missed_version
from pipeline.canary.settle import settle
from pipeline.orchestration.flows import canary as flows
from tests.enginesmith.registries import engine, overwrite, publish_engines
from tests.pipeline.operations.test_pending import fake_flow
from tests.pipeline.projects import raising
from validation.canary.report import read_report


@pytest.fixture
def pair(store: Store) -> tuple[Manifest, Manifest]:
    """Two versions with an engine each; stable serves the first."""
    first_manifest, second_manifest = (
        publish_engines(store, [engine(store, data=content.encode())], content, channel=None).manifest
        for content in ("one", "two")
    )
    channels.promote(store, first_manifest, "stable")
    return first_manifest, second_manifest


def reason(store: Store, **options: object) -> str:
    result = canary(store, CanaryRequest("digits", "2", **options), lambda _: None)
    assert result.blob is None and result.report is None
    return result.reason


def test_missing_requirements_are_reasons(store: Store, pair: tuple[Manifest, Manifest], tmp_path: Path) -> None:
    assert "serves nothing yet" in reason(store, channel="canary") and "--traffic" in reason(store)
    channels.promote(store, pair[1], "stable")
    assert "serves 2 already" in reason(store)
    channels.promote(store, pair[0], "stable")
    assert "nothing to run on sm_89: digits@2 has no engine for sm_89" in reason(
        store, traffic=str(tmp_path), target="sm_89"
    )
    assert "has no traffic of digits" in reason(store, traffic=str(tmp_path), target="cpu")


def test_a_flow_run_requests_no_worker_without_an_engine_for_its_gpu(store, pair, tmp_path, monkeypatch):
    fake_flow(monkeypatch, flows)
    monkeypatch.setattr("builders.execution.ray.task.connect", raising(UnavailableError("it looks for Ray")))
    (tmp_path / "digits.jsonl").touch()

    words = {"traffic": str(tmp_path), "target": "l4", "executor": "ray"}
    skipped_error = flows.canary.fn("digits", "2", store.uri, ray_address="ray://nowhere:1", **words)
    output = "there is nothing to run on l4: digits@2 has no engine for sm_89 (l4): it has engines for cpu"
    assert (skipped_error.name, skipped_error.message) == ("Skipped", output)
    for content in ("three", "four"):
        publish_engines(store, [engine(store, "sm_89", data=content.encode())], content, channel=None)
    channels.promote(store, lookup.load(store, "digits", "3"), "stable", accepted_losses=None)
    with pytest.raises(UnavailableError, match="it looks for Ray"):
        flows.canary.fn("digits", "4", store.uri, **words)


def test_the_sweep_finds_a_version_without_a_verdict_once_it_is_old_enough(store, pair):
    cpu = target_named("cpu")

    old_time = timedelta(hours=-1)

    def due(grace: timedelta = old_time) -> str | None:
        return missed_version(store, "digits", "stable", cpu, grace)

    assert due() == "2" and due(timedelta(hours=1)) is None, "its own canary may be running"
    assert missed_version(store, "digits", "canary", cpu, old_time) is None, "nothing to compare with"
    attach_canary(store, pair[1], verdict(store, pair[1], baseline=pair[0]))
    assert due() is None, "it has a verdict"
    assert missed_version(store, "digits", "stable", target_named("sm_89"), old_time) == "2", "of another target"
    channels.promote(store, pair[1], "stable")
    assert due() is None, "it is served"
    channels.rollback(store, "digits", "stable", by="me", why="")
    assert missed_version(store, "digits", "stable", target_named("sm_89"), old_time) is None, "it was served before"


def verdict(store: Store, manifest: Manifest, baseline: Manifest) -> CanaryVerdict:
    """An INSUFFICIENT of a version's engine on this machine's kind of CPU."""
    engine_digest = str(manifest.engines[0].digest)
    names = (this_kind().name, "INSUFFICIENT", "few requests", engine_digest, "cpu fp32 onnxruntime", baseline.digest)
    return CanaryVerdict(*names, baseline.version, store.put_bytes(b"a report"), now())


def test_a_sweep_runs_lost_canaries_despite_a_damaged_model(built, tmp_path, monkeypatch):
    store = built.store
    channels.promote(store, lookup.load(store, "tiny", "1"), "stable", proven_only=True)
    built.change_spec(precisions=["fp32"], targets=["cpu"], calibration=None)
    assert built.build().json["version"] == "2"
    channels.promote(store, publish_engines(store, [engine(store)], "b", model="broken").manifest, "stable")
    overwrite(store, channel_key("broken", "stable"), b"{")
    np.savez(tmp_path / "tiny.npz", at=np.arange(60) / 2000, x=np.ones((60, 1, 8), np.float32))
    fake_flow(monkeypatch, flows, GRACE_S=-60.0)

    def sweep() -> Any:
        return flows.canary.fn(registry=store.uri, traffic=str(tmp_path), target="cpu")

    state = sweep()
    broken_text, actual_text = state.data
    assert state.is_failed() and broken_text.startswith("broken: ") and actual_text.startswith("tiny@2: ")
    (verdicts,) = canaries(store, lookup.load(store, "tiny", "2"))
    assert actual_text == f"tiny@2: {verdicts.verdict}"
    assert len(sweep().data) == 1 and len(canaries(store, lookup.load(store, "tiny", "2"))) == 1, "not run again"


def test_recorded_traffic_gives_a_verdict_for_each_kind_of_machine_that_the_registry_keeps(
    built, tmp_path, monkeypatch
):
    store = built.store
    assert built.run("promote", "tiny@1", "tiny:stable", "--proven-only").code == 0
    built.change_spec(precisions=["fp32"], targets=["cpu"], calibration=None)
    assert built.build().json["version"] == "2"
    x = np.random.default_rng(5).normal(size=(60, 1, 8)).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", at=np.arange(60) / 2000, x=x)
    result = canary(store, CanaryRequest("tiny", "2", traffic=str(tmp_path), target="cpu"), lambda _: None)
    report = result.report
    assert report and report.verdict in ("INSUFFICIENT", "FAIL") and result.blob and store.has(result.blob)
    assert report.candidate.version == "2" and read_report(store.read_blob(result.blob)) == report
    (verdicts,) = canaries(store, lookup.load(store, "tiny", "2"))
    assert (verdicts.target, verdicts.verdict, verdicts.report) == (this_kind().name, report.verdict, result.blob)
    assert report.target == verdicts.target and verdicts.against == "1"
    assert "tiny:stable was not moved to 2" in settle(store, "tiny", "stable", result.blob, lambda _: None)
    with ObservationLog(tmp_path / "tiny.observed.jsonl") as log:
        for index in range(9):
            log.append(0.0025, time_s=index / 1000)
    other_kind = cpu_kinds.CpuKind("arm64-i8mm", "aarch64")
    for module in (engines, run):
        monkeypatch.setattr(module, "this_kind", lambda: other_kind)
    second_canary = canary(store, CanaryRequest("tiny", "2", traffic=str(tmp_path), target="cpu"), lambda _: None)
    assert second_canary.report and second_canary.report.traffic.in_flight == 3, "as the log of production shows"
    kinds = [result.target for result in canaries(store, lookup.load(store, "tiny", "2"))]
    assert kinds == sorted([verdicts.target, "arm64-i8mm"]), "a verdict for each kind of machine"
    page = tmp_path / "page.html"
    assert built.run("report", "tiny@2", "--out", page).code == 0
    assert "arm64-i8mm" in page.read_text() and "One verdict for each target" in page.read_text()
    shown_result = built.run("show", "tiny@2")
    assert verdicts.target in shown_result.out and report.verdict in shown_result.out
