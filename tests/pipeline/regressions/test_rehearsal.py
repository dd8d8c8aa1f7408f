"""Verdicts of a rehearsal: what moves, what stays and why, and what a build alone leaves unknown."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.core.errors import InputError, StepError
from pipeline.regressions import rehearsal
from pipeline.regressions.findings import BucketTimes
from pipeline.regressions.rehearsal_verdicts import Trial, UnitRehearsal, judge_trials, plan_version
from tests.pipeline.projects import raising

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


@pytest.mark.parametrize(
    ("verdicts", "plan"),
    [(["moves", "moves"], "moves"), (["moves", "unknown"], "unknown"), (["unknown", "stays"], "stays")],
)
def test_a_version_moves_with_all_its_units_or_has_no_commands(verdicts, plan):
    units = [UnitRehearsal("m@1", "cpu", OLD, OLD, verdict) for verdict in verdicts]
    manifest: Any = SimpleNamespace(model="m", reference="m@1")
    channels: Any = [SimpleNamespace(name=name, proven_only=False) for name in ("candidate", "stable")]
    found = plan_version(manifest, tuple(channels), units, "--toolchain=onnxruntime==2")
    assert found.verdict == plan and bool(found.commands) == (plan == "moves")
    if found.commands:
        assert found.commands == ("enginesmith rehearse m@1 --toolchain=onnxruntime==2 --apply",)
        assert found.back == ("enginesmith rollback m:candidate", "enginesmith rollback m:stable")


def test_what_no_channel_serves_holds_no_version_up():
    manifest: Any = SimpleNamespace(model="m", reference="m@1")
    idle = UnitRehearsal("m@1", "gpu", replace(OLD, status="unproven"), OLD, "unknown")
    units = [UnitRehearsal("m@1", "cpu", OLD, OLD, "moves"), idle]
    proven: Any = SimpleNamespace(name="stable", proven_only=True)
    every: Any = SimpleNamespace(name="candidate", proven_only=False)
    assert plan_version(manifest, (proven,), units, "").verdict == "moves"
    assert plan_version(manifest, (proven, every), units, "").verdict == "unknown"
    assert plan_version(manifest, (), units, "").verdict == "unknown"


def test_what_no_ray_worker_takes_is_unknown_and_other_failures_are_told(monkeypatch):
    entry: Any = SimpleNamespace(
        unit="sm_90 fp32 tensorrt", backend="tensorrt", options={}, hardware=None, toolchain={}, status="unproven",
        reason="", digest="a" * 64,
    )  # fmt: skip
    monkeypatch.setattr(rehearsal.discovery, "configure", lambda *_: SimpleNamespace(runs=lambda _: "no GPU here"))
    monkeypatch.setattr(rehearsal, "ReadToolchain", lambda *_: None)
    monkeypatch.setattr(rehearsal, "request_of", lambda _: None)
    environments: Any = SimpleNamespace(on_ray=True, python="the Ray worker", new=None)
    manifest: Any = SimpleNamespace(model="m", reference="m@1")
    unit = rehearsal._Unit(environments, manifest, None, entry, {})

    def run(kind: str):
        monkeypatch.setattr(
            rehearsal._Unit, "_run", raising(StepError("versions for m@1: no node with sm_90; start one", kind))
        )
        return unit.rehearse()

    found = run("no-node")
    assert (found.verdict, found.why) == ("unknown", "not built: no node with sm_90; start one")
    with pytest.raises(InputError, match="the Ray worker runs no jobs"):
        run("crash")
