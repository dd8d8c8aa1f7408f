import json
import os

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.recording import ObservationLog
from tests.validation.canary.simulated_logs import (
    LIMITS,
    SIMULATIONS,
    dying,
    dying_after_a_slow_answer,
    mirrored,
    write_log,
)
from validation.canary import observations
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import MOST_IN_FLIGHT, evidence_of
from validation.canary.observations import read_both, read_observations

ENDS = [name for name in SIMULATIONS if "dies" in name or "stops first" in name or "in flight" in name]


def judged(logs, **how):
    evidence, notes = evidence_of(logs.candidate, logs.baseline, 15.0, **how)
    return judge(evidence, LIMITS, replicates=200), " ".join(notes)


@pytest.mark.parametrize("name", ENDS)
def test_the_verdict_on_a_log_that_ends_early_is_right(name):
    logs = SIMULATIONS[name](np.random.default_rng(0), 5000)
    result, _ = judged(logs)
    assert result.verdict in logs.right, result.reason


def test_unanswered_requests_of_a_dead_candidate_count_against_it():
    result, notes = judged(dying(np.random.default_rng(0), 10_000))
    errors = next(item for item in result.criteria if item.name == "errors")
    assert result.verdict != "PASS" and errors.estimate == pytest.approx(0.6, abs=0.01) and errors.verdict != "PASS"
    assert "6000 requests were observed on one side only, and count as failed" in notes
    assert any(
        item.note.startswith("candidate.jsonl (candidate) stops 6000 requests before baseline.jsonl, and not both")
        for item in result.criteria
    )


def test_ignoring_missing_requests_hides_no_death():
    """A side that saw a share of the requests lacks some at the end by chance; thousands in a row are none."""
    rng = np.random.default_rng
    result, _ = judged(dying(rng(0), 10_000), ignore_missing=True)
    assert result.verdict == "INSUFFICIENT" and "candidate.jsonl (candidate) stops" in result.reason
    closed_verdict, notes = judged(dying(rng(0), 10_000, closed=(True, True)), ignore_missing=True)
    assert closed_verdict.verdict == "PASS" and "candidate.jsonl (candidate) stops 6000 requests before" in notes
    logs = mirrored(rng(0), 10_000)
    kept_indices = np.flatnonzero((rng(1).random(10_000) < 0.4) & (np.arange(10_000) < 9_990))
    for column in ("time", "latency", "ok", "score", "sqnr_db", "flipped", "output", "request", "error"):
        setattr(logs.candidate, column, [getattr(logs.candidate, column)[index] for index in kept_indices])
    sampled_verdict, notes = judged(logs, ignore_missing=True)
    assert sampled_verdict.verdict == "PASS" and "left out, as was asked for" in notes


@pytest.mark.parametrize(("count", "may_be_dead"), [(1, False), (MOST_IN_FLIGHT + 1, True)])
def test_more_than_a_few_in_flight_may_mean_a_death(count, may_be_dead):
    logs = mirrored(np.random.default_rng(0), 8000, in_flight=count)
    logs.candidate.latency[::40] = [60.0] * 200  # time-outs: every request of the last minute is younger
    result, notes = judged(logs)
    assert ("logs to the end" in {item.name for item in result.criteria}) == may_be_dead
    assert ("in flight to the candidate" in notes) != may_be_dead
    late_estimate = next(item for item in result.criteria if item.name == "errors").estimate
    assert late_estimate == pytest.approx(1 / 40, abs=0.001), "an answer after a minute counts as failed"


@pytest.mark.parametrize("count", [2, 60, 5000])
def test_one_slow_answer_does_not_extend_the_flight(count):
    logs = dying_after_a_slow_answer(np.random.default_rng(0), count + 5)
    result, notes = judged(logs)
    assert result.verdict in logs.right and "in flight" not in notes
    assert "candidate.jsonl (candidate) stops 5 requests before" in result.reason or result.verdict == "FAIL"


@pytest.mark.parametrize("side", ["candidate", "baseline"])
def test_one_log_may_close_just_before_the_other(side):
    """What the candidate lacks has failed; what the baseline lacks says nothing about either."""
    logs = dying(np.random.default_rng(0), 2000, side=side, after=1 - 8 / 2000, closed=(True, True))
    evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
    assert int((~evidence.candidate.ok).sum()) == (8 if side == "candidate" else 0) and evidence.baseline.ok.all()
    assert not evidence.stopped and len(evidence.candidate) == (2000 if side == "candidate" else 1992)


def test_a_log_states_its_orderly_end(tmp_path):
    log = ObservationLog(tmp_path / "a.jsonl")
    for index in range(3):
        log.append(0.01, request=index, size=index + 1)
    assert not read_observations(tmp_path / "a.jsonl").ended
    assert read_observations(tmp_path / "a.jsonl").size == [1, 2, 3]
    log.close()
    log.close()
    actual = read_observations(tmp_path / "a.jsonl")
    assert actual.ended and len(actual) == 3 and log.kept == 3
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1]) == {"kind": "enginesmith-end", "requests": 3}
    with ObservationLog(tmp_path / "a.jsonl") as second_log:
        second_log.append(0.01, request=3)
        assert not read_observations(tmp_path / "a.jsonl").ended, "served again"
    assert read_observations(tmp_path / "a.jsonl").ended


def test_a_log_with_a_failed_writer_has_no_orderly_end(tmp_path):
    with pytest.raises(ZeroDivisionError), ObservationLog(tmp_path / "a.jsonl") as log:
        log.append(0.01)
        raise ZeroDivisionError
    assert not read_observations(tmp_path / "a.jsonl").ended
    with pytest.raises(KeyboardInterrupt), ObservationLog(tmp_path / "b.jsonl") as log:
        log.append(0.01)
        raise KeyboardInterrupt
    assert read_observations(tmp_path / "b.jsonl").ended, "Ctrl-C is how a server is stopped"
    with ObservationLog(tmp_path / "c.jsonl") as log:
        log.append(0.01)
        log.append(float("nan"))
    assert not read_observations(tmp_path / "c.jsonl").ended, "a line was lost"


def test_one_killed_writer_of_several_leaves_the_file_open(tmp_path):
    shared_log = ObservationLog(tmp_path / "a.jsonl")
    shared_log.append(0.01)
    for closes in (True, False):
        if (pid := os.fork()) == 0:
            shared_log.append(0.01)
            if closes:
                shared_log.close()
            os._exit(0)
        os.waitpid(pid, 0)
        actual = read_observations(tmp_path / "a.jsonl")
        assert (len(actual), actual.accounted) == ((2, 1) if closes else (3, 1))
    shared_log.close()
    assert read_observations(tmp_path / "a.jsonl").accounted == 2 < 3


def test_a_bad_end_is_refused(tmp_path):
    for requests in (-1, "3", None, True):
        (tmp_path / "a.jsonl").write_text(json.dumps({"kind": "enginesmith-end", "requests": requests}) + "\n")
        with pytest.raises(DataError, match=r"a.jsonl:1: requests is .*; the number of observations"):
            read_observations(tmp_path / "a.jsonl")


def test_growing_logs_are_read_up_to_one_moment(tmp_path, monkeypatch):
    paths = [tmp_path / f"{side}.jsonl" for side in ("candidate", "baseline")]
    logs = [ObservationLog(path) for path in paths]
    for index in range(4):
        for log in logs:
            log.append(0.01, request=index)
    loaded_observations = observations.read_observations

    def slowly(path, size):
        for log in logs:
            log.append(0.01, request=f"meanwhile {path.name}")
        return loaded_observations(path, size)

    monkeypatch.setattr(observations, "read_observations", slowly)
    assert [table.request for table in read_both(*paths)] == [[0, 1, 2, 3]] * 2


def test_a_killed_run_gives_no_pass():
    logs = mirrored(np.random.default_rng(0), 8000)
    logs.candidate.planned = logs.baseline.planned = 8000
    result, _ = judged(logs)
    assert result.verdict == "INSUFFICIENT" and "the run was killed after 8000 of 8000 requests" in result.reason
    logs.candidate.accounted = logs.baseline.accounted = 8000
    assert judged(logs)[0].verdict == "PASS"
    logs.baseline.died = "signal 9 (SIGKILL) at its request 5"
    result, _ = judged(logs)
    assert result.verdict == "INSUFFICIENT" and "the baseline's engine ended its process: signal 9" in result.reason


def test_files_give_the_simulations_verdicts(tmp_path):
    logs = dying(np.random.default_rng(0), 300, closed=(True, False))
    actual = read_both(write_log(tmp_path, logs.candidate), write_log(tmp_path, logs.baseline))
    assert [row.ended for row in actual] == [True, False]
    assert actual[0].request == logs.candidate.request and actual[1].time == logs.baseline.time
