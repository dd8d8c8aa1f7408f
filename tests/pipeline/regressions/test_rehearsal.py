import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from builders.execution.jobs import WorkerContext, decode_request, encode_request
from builders.execution.local import LocalExecutor
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import InputError, StepError
from enginesmith.registry.store.base import open_store
from pipeline.compile.run_context import RunContext
from pipeline.regressions import rehearsal, rehearsal_verdicts
from pipeline.regressions.findings import BucketTimes
from pipeline.regressions.rehearsal import Rehearser, Upgrade
from pipeline.regressions.rehearsal_verdicts import Trial, UnitRehearsal, judge_trials, plan_version
from tests.pipeline.projects import raising
from validation.latency.machine import machine

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
def test_a_unit_moves_only_if_proven_and_not_worse(new, times, remarks, verdict, why):
    actual = judge_trials("cpu fp32 onnxruntime", OLD, new, times, remarks)
    assert actual[0] == verdict and why in actual[1]


@pytest.mark.parametrize(
    ("verdicts", "channels", "plan"),
    [
        (["moves", "moves"], {"candidate": False, "stable": False}, "moves"),
        (["moves", "unknown"], {"candidate": False}, "unknown"),
        (["unknown", "stays"], {"candidate": False}, "stays"),
        (["moves", "unproven"], {"stable": True}, "moves"),  # proven engines alone are served
        (["moves", "unproven"], {"stable": True, "candidate": False}, "unknown"),
        (["moves", "unproven"], {}, "unknown"),
    ],
)
def test_a_version_moves_with_all_served_units_or_has_no_commands(verdicts, channels, plan, tmp_path):
    old_fields = {"unproven": replace(OLD, status="unproven")}
    new_results = replace(OLD, toolchain={"onnxruntime": "2"})
    units = [UnitRehearsal("m@1", "cpu", old_fields.get(verdict, OLD), new_results, verdict) for verdict in verdicts]
    units = [replace(unit, verdict="unknown") if unit.verdict == "unproven" else unit for unit in units]
    stubs: Any = [SimpleNamespace(name=name, proven_only=only, active_rollout=None) for name, only in channels.items()]
    manifest: Any = SimpleNamespace(model="m", reference="m@1", graphs=())
    words, store = "--toolchain=onnxruntime==2", open_store(tmp_path, create=True)
    result = plan_version(manifest, tuple(stubs), units, words, store)
    moves = plan == "moves"
    assert (result.verdict, result.commands) == (plan, (f"enginesmith rehearse m@1 {words} --apply",) if moves else ())
    same_plan = plan_version(manifest, tuple(stubs), [replace(unit, new=unit.old) for unit in units], words, store)
    assert (same_plan.verdict, same_plan.commands, same_plan.busy_channels) == (plan, (), ()), "nothing to publish"


def test_a_worker_rehearses_a_unit_without_a_local_machine(built, monkeypatch):
    _, manifest = built.published()
    entry, slow = manifest.engines[0], replace(EQUAL, ratio=1.2, low=1.1, high=1.3)
    trial = replace(OLD, digest=entry.digest, report=entry.report, toolchain=entry.toolchain)
    there = replace(machine(), cpu="another")
    rehearsal_result = UnitRehearsal(manifest.reference, entry.unit, trial, trial, "stays", "slow", slow, there)

    def work(job: Any, *_: object) -> Any:
        request = decode_request(json.loads(json.dumps(encode_request(job.request))))
        with monkeypatch.context() as patched_context:
            patched_context.setattr(rehearsal._Unit, "rehearse", lambda _: results.pop(0))
            value: Any = encode(request.run(WorkerContext(built.folder, job.store)))
        return decode(json.loads(json.dumps(value)), UnitRehearsal)

    def rehearse(run: Any = None, pin: str = "2", slower: float = 0.03) -> UnitRehearsal:
        context, stub = RunContext(built.store, LocalExecutor(), LocalExecutor()), run and SimpleNamespace(run=run)
        return Rehearser(Upgrade({"onnxruntime": pin}, slower=slower), context, stub).rehearse(manifest, entry)

    monkeypatch.setattr(rehearsal.discovery, "configure", lambda *_: SimpleNamespace(runs=lambda _: "no GPU here"))
    with monkeypatch.context() as patched_context:  # as a release that builds nothing without a GPU
        patched_context.setattr(rehearsal._Unit, "_read_toolchain", lambda _: ())
        patched_context.setattr(rehearsal._Unit, "_run", raising(StepError("it needs a GPU", "no-node")))
        assert (rehearse().verdict, rehearse().why) == ("unknown", "not built here: it needs a GPU")
    monkeypatch.setattr(rehearsal.discovery, "capabilities_of", lambda _: SimpleNamespace(tunes_on_target=True))
    assert rehearse().why == "neither built nor run here: no GPU here"
    nobody, lost = (raising(StepError("tiny@1: no node with sm_90; start one", kind)) for kind in ("no-node", "crash"))
    assert rehearse(nobody).why.startswith("no node with sm_90; start one; neither built")
    with pytest.raises(StepError, match="no node with"):
        rehearse(lost)
    untimed_unit = replace(rehearsal_result, verdict="unknown", why="it could not be timed", times=None)
    results = [untimed_unit, rehearsal_result]
    assert (rehearse(work), rehearse().machine) == (untimed_unit, None), "it is timed again the next time"
    assert rehearse(work) == rehearsal_result
    assert [(result.verdict, result.machine) for result in (rehearse(), rehearse(nobody))] == [("stays", there)] * 2
    assert (rehearse(slower=0.5).verdict, rehearse(pin="3").verdict) == ("moves", "unknown")
    for other in (None, SimpleNamespace(digest="b" * 64)):
        monkeypatch.setattr(rehearsal_verdicts, "recall_engine", lambda *_, other=other: other)
        assert rehearse().machine is None, "the engine that was measured is gone: it is measured again"


def test_each_side_runs_with_its_versions_in_place_or_in_an_environment(built, monkeypatch, tmp_path):
    monkeypatch.setattr(rehearsal, "make_environment", lambda pins, *_: tmp_path / "-".join(pins.values()))
    (tmp_path / "1.30.0").touch()
    rehearser = Rehearser(Upgrade({"onnxruntime": "2"}), RunContext(built.store, LocalExecutor(), LocalExecutor()))
    entry = built.published()[1].engines[0]
    sides = [rehearser.open(side, rehearser.upgrade.old_pins(entry)) for side in ("old", "new")]
    assert [python for python, _ in sides] == [sys.executable] * 2
    assert sides[0][1] is not sides[1][1], "both are timed at once, each alone in its executor"
    old_entry = replace(entry, toolchain={**entry.toolchain, "onnxruntime": "1.30.0"})
    assert rehearser.open("old", rehearser.upgrade.old_pins(old_entry))[0] == str(tmp_path / "1.30.0")
    assert rehearsal.rehearse([], rehearser).python == sys.executable
    monkeypatch.setattr(rehearsal, "make_environment", raising(InputError("pip failed")))
    other_rehearser = Rehearser(Upgrade({"onnxruntime": "3"}), rehearser.context)
    assert rehearsal.rehearse([], other_rehearser).python == "", "no environment is made for its name"


def test_measurements_of_another_machine_count_for_the_local_engine(built, monkeypatch):
    """As of an ensemble, of which a graph may have been built again since."""
    rehearsal_result = UnitRehearsal("tiny@1", "cpu fp32 ensemble", OLD, OLD, "moves")
    monkeypatch.setattr(Rehearser, "recall", lambda *_: rehearsal_result)
    rehearser = Rehearser(Upgrade({}), RunContext(built.store, LocalExecutor(), LocalExecutor()))
    manifest = built.published()[1]
    for digest, verdict in ((None, "moves"), (OLD.digest, "moves"), ("b" * 64, "unknown")):
        result = rehearser.without_run(manifest, manifest.engines[0], replace(OLD, digest=digest), "no GPU")
        assert result.verdict == verdict
