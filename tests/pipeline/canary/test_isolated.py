"""Engines that end their process: evidence against them, and never the end of the canary."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import parse_reference
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from pipeline.canary import engines
from pipeline.canary.engines import ChosenEngine, isolate
from pipeline.canary.run import CanaryExecution, CanaryRun
from pipeline.canary.verdicts import JudgeOptions, WrittenReport, judge_files, promotion_refusal
from tests.enginesmith.registries import engine, publish_engines
from tests.pipeline.canary.dying import opened
from tests.validation.canary.simulated import traffic
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import read_both
from validation.canary.replay import ReplayClock, ReplayPace, TrafficSegment, serve
from validation.canary.report import read_report

LIMITS = Thresholds({"p50": 9.0}, error_rate=0.01)
X = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture
def manifests(store: Store) -> list[Manifest]:
    return [
        publish_engines(store, [engine(store, data=one)], one.decode(), channel=None).manifest for one in (b"a", b"b")
    ]


def replayed(
    folder: Path,
    manifests: list[Manifest],
    candidate: partial,
    baseline: partial,
    count: int = 800,
    pace: ReplayPace | None = None,
    thread_safe: bool = False,
    looks: int = 2,
) -> WrittenReport:
    """A canary of engines in processes of their own."""
    reference = parse_reference("digits@1")
    pace = pace or ReplayPace(warmup=2)
    expected = CanaryRun(reference, reference, target_named("cpu"), folder, folder / "out", pace=pace, looks=looks)
    sides = [ChosenEngine(manifest, manifest.engines[0]) for manifest in manifests]
    canary = CanaryExecution(expected, sides, LIMITS, "a test", traffic(count, 1e-5), lambda _: None)
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(isolate(role, opener, thread_safe))
            for role, opener in (("candidate", candidate), ("baseline", baseline))
        ]
        return canary.run(sessions[0], sessions[1], None)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("segfault", "signal 11 (SIGSEGV)"),
        ("exit", "exit status 3"),
        ("leave", "exit status 0"),
        ("killed", "signal 9 (SIGKILL)"),
    ],
)
@pytest.mark.slow
def test_a_candidate_that_ends_its_process_is_not_promoted(tmp_path, manifests, how, words):
    written_replay = replayed(tmp_path, manifests[::-1], partial(opened, how, 303), partial(opened))
    died_text = f"the process: the candidate's engine ended its process: {words}"
    assert written_replay.report.verdict == "FAIL" and written_replay.report.reason.startswith(died_text)
    logs = read_both(tmp_path / "out/candidate.jsonl", tmp_path / "out/baseline.jsonl")
    assert logs[0].ok == [True] * 300 + [False] * (len(logs[1]) - 300) and all(logs[1].ok) and len(logs[1]) == 301
    assert words in logs[0].error[300] and logs[0].died == f"{words}, at request 303 with the warm-up's"
    assert logs[0].ended and logs[1].ended and not logs[1].died
    report = read_report(written_replay.json.read_bytes())
    assert f"verdict is {written_replay.report.verdict}" in str(promotion_refusal(report, manifests[1], None))


def test_a_candidate_that_dies_with_its_last_request_is_not_promoted_either(tmp_path, manifests):
    written_replay = replayed(tmp_path, manifests, partial(opened, "exit", 802), partial(opened), looks=1)
    assert written_replay.report.verdict == "FAIL"
    assert "the process: the candidate's engine ended its process: exit status 3" in written_replay.report.reason
    report = judge_files(
        *(tmp_path / f"out/{side}.jsonl" for side in ("candidate", "baseline")), JudgeOptions(LIMITS, ""), tmp_path
    )
    assert report.report.verdict == "FAIL" and "ended its process" in report.report.reason, "the files remember it"


@pytest.mark.slow
def test_a_dead_baseline_gives_no_pass(tmp_path, manifests):
    written_replay = replayed(tmp_path, manifests, partial(opened), partial(opened, "segfault", 303))
    assert written_replay.report.verdict == "INSUFFICIENT"
    assert "the baseline's engine ended its process" in written_replay.report.reason


def test_an_engine_that_raises_continues_and_sys_exit_ends_it():
    with isolate("candidate", partial(opened, "raises", 1)) as session:
        failed_call, answered_call = (serve(session, X, ReplayClock()) for _ in "ab")
        assert failed_call.error == "ValueError: a request that fails" and failed_call.service > 0 and not session.died
        assert answered_call.outputs is not None and np.array_equal(answered_call.outputs["y"], X["x"] * 2)
        assert 1e-4 <= answered_call.service < 10 and [spec.name for spec in session.inputs] == ["x"]
    with isolate("candidate", partial(opened, "sys.exit", 1)) as session:
        assert "exit status 4, at request 1" in serve(session, X, ReplayClock()).error and session.died


@pytest.mark.timeout(60)
def test_a_panicking_thread_ends_its_process():
    with isolate("candidate", partial(opened, "panic", 1)) as session:
        session.prepare(2, ())
        answers = list(session.serve_segment(TrafficSegment([0.0] * 4, [X] * 4)))
        assert len(answers) == 4 and "exit status 1, among requests 1 to 4" in answers[0].served.error and session.died


@pytest.mark.timeout(60)
def test_a_hanging_engine_is_killed_and_counts_as_dead(monkeypatch):
    monkeypatch.setattr(engines, "HANG_S", 0.3)
    with isolate("candidate", partial(opened, "hang", 2)) as session:
        assert not serve(session, X, ReplayClock()).error
        assert "killed after 0.3 s without an answer, at request 2" in serve(session, X, ReplayClock()).error
        assert serve(session, X, ReplayClock()).error and session.died, "and nothing waits for it again"


def test_an_engine_that_cannot_be_opened_is_reported():
    died_text = "the candidate's engine ended its process while it was opened: signal 11"
    with pytest.raises(EnginesmithError, match=died_text), isolate("candidate", partial(opened, "segfault", 0)):
        pass
    for label, kind, words in (
        ("refused", DataError, "engine is none"),
        ("broken", EnginesmithError, "RuntimeError: no such"),
    ):
        with pytest.raises(kind, match=words), isolate("baseline", partial(opened, label)):
            pass
