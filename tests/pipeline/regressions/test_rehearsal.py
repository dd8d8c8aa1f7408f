"""Verdicts of a rehearsal: what moves, what stays and why, what a build alone leaves unknown, and where units run."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from builders.execution.jobs import WorkerContext, decode_request, encode_request
from builders.execution.local import LocalExecutor
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import StepError
from enginesmith.registry.store.base import open_store
from pipeline.compile.run_context import RunContext
from pipeline.regressions import rehearsal
from pipeline.regressions.findings import BucketTimes
from pipeline.regressions.rehearsal import Rehearser, Upgrade
from pipeline.regressions.rehearsal_verdicts import Trial, UnitRehearsal, judge_trials, plan_version
from tests.pipeline.projects import Project, raising
from validation.latency.machine import machine

MODEL: Any = SimpleNamespace(model="m", reference="m@1", graphs=())
OLD = Trial({"onnxruntime": "1"}, "proven", "", "a" * 64, 40.0, {"accuracy": 0.99})
EQUAL = BucketTimes("batch=4", 1e-3, 1e-3, 1.0, 0.99, 1.01, 0.02, 400)


@pytest.mark.parametrize(
    ("new", "times", "remarks", "verdict", "why"),
    [
        (OLD, EQUAL, [], "moves", ""),
        (replace(OLD, metrics={"accuracy": 0.999}), EQUAL, [], "moves", ""),
        (replace(OLD, status="failed", reason="sqnr_db 9"), None, [], "stays", "the new engine fails: sqnr_db 9"),
        (replace(OLD, metrics={"accuracy": 0.9}), EQUAL, [], "stays", "accuracy 0.9000"),
        (replace(OLD, metrics={}), EQUAL, [], "stays", "accuracy cannot be measured"),
        (OLD, replace(EQUAL, ratio=1.2, low=1.1, high=1.3), [], "stays", "1.200 times the time"),
        (OLD, replace(EQUAL, low=0.9, high=1.2), [], "unknown", "neither shown nor ruled out"),
        (OLD, replace(EQUAL, ratio=None, low=None, high=None), [], "unknown", "too few runs"),
        (OLD, None, ["it could not be timed: gone"], "unknown", "could not be timed: gone"),
        (OLD, None, [], "unknown", "not timed"),
        (replace(OLD, sqnr_db=33.0), EQUAL, [], "unknown", "SQNR is worse by more than 6 dB"),
        (replace(OLD, sqnr_db=35.0), EQUAL, [], "moves", ""),
        (replace(OLD, status="unproven", reason="no GPU"), None, [], "unknown", "no GPU"),
    ],
)
def test_a_unit_moves_only_where_it_is_proven_and_shown_to_be_no_worse(new, times, remarks, verdict, why):
    found = judge_trials("cpu fp32 onnxruntime", OLD, new, times, remarks)
    assert found[0] == verdict and why in found[1]


def channel(name: str, proven_only: bool = False) -> Any:
    return SimpleNamespace(name=name, proven_only=proven_only, active_rollout=None)


@pytest.mark.parametrize(
    ("verdicts", "plan"),
    [(["moves", "moves"], "moves"), (["moves", "unknown"], "unknown"), (["unknown", "stays"], "stays")],
)
def test_a_version_moves_with_all_its_units_or_has_no_commands(verdicts, plan, tmp_path):
    units = [UnitRehearsal("m@1", "cpu", OLD, OLD, verdict) for verdict in verdicts]
    channels = channel("candidate"), channel("stable")
    found = plan_version(MODEL, channels, units, "--toolchain=onnxruntime==2", open_store(tmp_path, create=True))
    assert found.verdict == plan and bool(found.commands) == (plan == "moves")
    if found.commands:
        assert found.commands == ("enginesmith rehearse m@1 --toolchain=onnxruntime==2 --apply",)
        assert found.back == ("enginesmith rollback m:candidate", "enginesmith rollback m:stable")


def test_what_no_channel_serves_holds_no_version_up(tmp_path):
    idle = UnitRehearsal("m@1", "gpu", replace(OLD, status="unproven"), OLD, "unknown")
    units = [UnitRehearsal("m@1", "cpu", OLD, OLD, "moves"), idle]
    proven, every = channel("stable", proven_only=True), channel("candidate")
    for channels, verdict in [((proven,), "moves"), ((proven, every), "unknown"), ((), "unknown")]:
        assert plan_version(MODEL, channels, units, "", open_store(tmp_path, create=True)).verdict == verdict


@pytest.fixture
def rehearser(built: Project, monkeypatch: pytest.MonkeyPatch) -> Rehearser:
    """For version 1 of the built project, whose engines no machine at hand can build or run."""
    monkeypatch.setattr(rehearsal.discovery, "configure", lambda *_: SimpleNamespace(runs=lambda _: "no GPU here"))
    monkeypatch.setattr(rehearsal.discovery, "capabilities_of", lambda _: SimpleNamespace(tunes_on_target=True))
    return Rehearser(Upgrade({"onnxruntime": "2"}), RunContext(built.store, LocalExecutor(), LocalExecutor()))


def test_what_another_machine_measured_counts_where_none_is_at_hand(rehearser, built, monkeypatch):
    _, manifest = built.published()
    entry = manifest.engines[0]
    assert rehearser.rehearse(manifest, entry).why == "neither built nor run here: no GPU here"
    trial = replace(OLD, digest=entry.digest, report=entry.report)
    slow = replace(EQUAL, ratio=1.2, low=1.1, high=1.3)
    measured = UnitRehearsal(
        manifest.reference, entry.unit, trial, trial, "stays", "", slow, replace(machine(), cpu="x")
    )
    with monkeypatch.context() as patched:
        patched.setattr(rehearsal._Unit, "rehearse", lambda _: measured)
        replace(rehearser, results={}).rehearse(manifest, entry)
    for slower, verdict in [(0.03, "stays"), (0.5, "moves")]:
        found = replace(rehearser, results={}, upgrade=replace(rehearser.upgrade, slower=slower)).rehearse(
            manifest, entry
        )
        assert (found.verdict, found.machine) == (verdict, measured.machine)
    other = replace(rehearser, results={}, upgrade=Upgrade({"onnxruntime": "3"}))
    assert other.rehearse(manifest, entry).verdict == "unknown"


def test_each_unit_is_rehearsed_on_a_ray_worker_and_unknown_where_none_takes_it(rehearser, built, monkeypatch):
    _, manifest = built.published()
    entry = manifest.engines[0]
    for kind in ("no-node", "crash"):
        rehearser.remote = SimpleNamespace(run=raising(StepError("tiny@1: no node with sm_90; start one", kind)))
        if kind == "crash":
            with pytest.raises(StepError, match="no node with"):
                replace(rehearser, results={}).rehearse(manifest, entry)
        else:
            assert rehearser.rehearse(manifest, entry).why.startswith("no node with sm_90; start one; neither built")
    result = UnitRehearsal(manifest.reference, entry.unit, OLD, OLD, "moves", "", EQUAL, replace(machine(), cpu="x"))
    monkeypatch.setattr(rehearsal._Unit, "rehearse", lambda _: result)

    def run(job: Any, *_: object) -> Any:
        request = decode_request(json.loads(json.dumps(encode_request(job.request))))
        value: Any = encode(request.run(WorkerContext(built.folder, job.store)))
        return decode(json.loads(json.dumps(value)), UnitRehearsal)

    assert replace(rehearser, results={}, remote=SimpleNamespace(run=run)).rehearse(manifest, entry) == result
