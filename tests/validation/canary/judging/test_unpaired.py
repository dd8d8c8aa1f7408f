import re

import numpy as np
import pytest

from tests.validation.canary.simulated_logs import (
    HOUR,
    LIMITS,
    MIDNIGHT,
    SIMULATIONS,
    Logs,
    apart,
    log,
    mirrored,
    ramp,
    split,
)
from validation.canary.judging import pairing
from validation.canary.judging.judge import Looks, judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Thresholds
from validation.canary.report import Circumstances, TrafficReplayed, make_report

MEDIAN = Thresholds({"p50": 0.02}, error_rate=None, quality=None)


def judged(logs: Logs, limits: Thresholds = LIMITS):
    evidence, notes = evidence_of(logs.candidate, logs.baseline, 15.0)
    return judge(evidence, limits, replicates=200), " ".join(notes)


DAYS = [name for name in SIMULATIONS if SIMULATIONS[name](np.random.default_rng(0), 200).candidate.request[0] is None]


@pytest.mark.parametrize("name", DAYS)
def test_the_verdict_on_a_days_logs_is_right(name):
    for seed in range(3):
        logs = SIMULATIONS[name](np.random.default_rng(seed), 4000)
        result, _ = judged(logs)
        assert result.verdict in logs.right, result.reason


@pytest.mark.parametrize("slower", [0.0, 0.1])
def test_logs_of_other_hours_are_refused_with_the_hours(slower):
    result, _ = judged(apart(np.random.default_rng(0), 6000, slower=slower))
    assert [item.name for item in result.criteria] == ["sides that compare"] and result.verdict == "INSUFFICIENT"
    times = r"different times \(candidate: 2025-11-20 00:0.*, baseline: 2025-11-20 09:0.* to both sides at the same"
    assert re.search(times, result.reason)


def test_a_different_load_is_refused_with_its_counts():
    result, _ = judged(ramp(np.random.default_rng(0), 6000))
    assert result.verdict == "INSUFFICIENT"
    assert "different load" in result.reason and "requests of the candidate" in result.reason


def test_halves_of_an_even_load_are_compared_unpaired():
    logs = split(np.random.default_rng(0), 4000)
    result, notes = judged(logs, MEDIAN)
    assert result.verdict == "PASS" and "in the time that both logs cover" in notes
    result, _ = judged(split(np.random.default_rng(0), 4000, slower=0.1), MEDIAN)
    assert result.verdict == "FAIL" and result.reason.startswith("latency p50: +")
    evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
    facts = Circumstances("", {}, {}, "", TrafficReplayed(), ())
    report = make_report(judge(evidence), Thresholds(), Looks(), logs.candidate, logs.baseline, evidence, facts)
    assert evidence.paired is report.paired is False


def test_only_the_common_time_of_both_logs_counts():
    rng = np.random.default_rng(0)
    times = [MIDNIGHT + np.linspace(first_value, last, 1000) * HOUR for first_value, last in ((0, 2), (0.5, 2.5))]
    sides = [
        log(name, time, np.full(1000, 0.01) * np.exp(rng.normal(size=1000) * 0.1), ended=True)
        for name, time in zip(("candidate", "baseline"), times, strict=True)
    ]
    evidence, notes = evidence_of(sides[0], sides[1], 15.0)
    assert (len(evidence.candidate), len(evidence.baseline)) == (750, 750) and not evidence.unlike
    assert "250 of 1000 requests of the candidate are not of that time" in " ".join(notes)
    assert (np.diff(evidence.candidate.time) >= 0).all()


def test_the_same_requests_hours_apart_are_refused():
    logs = mirrored(np.random.default_rng(0), 6000)
    assert judged(logs)[0].verdict == "PASS"
    logs.candidate.time = [time + 9 * HOUR for time in logs.candidate.time]
    result, _ = judged(logs)
    assert result.verdict == "INSUFFICIENT" and "arrived 540 minutes apart" in result.reason
    logs.candidate.time = [time - 9 * HOUR - 30 for time in logs.candidate.time]
    assert judged(logs)[0].verdict == "PASS", "clocks may differ"


def test_logs_that_share_exactly_half_of_their_time_are_compared():
    times = [np.arange(8.0), np.arange(8.0)]
    assert not pairing._other_hours(times, [np.arange(4.0)] * 2) and pairing._other_hours(times, [np.arange(3.0)] * 2)


def test_a_different_total_load_is_found_without_a_long_window():
    our_array, their_array = np.linspace(0.0, 100.0, 1240), np.linspace(0.0, 100.0, 760)
    assert "1240 requests of the candidate and 760" in pairing._other_load([our_array, their_array], 0.0, 100.0)
    assert not pairing._other_load([our_array, np.linspace(0.0, 100.0, 1000)], 0.0, 100.0)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_tenth_of_the_traffic_excuses_no_failure(share):
    rng = np.random.default_rng(0)
    times = MIDNIGHT + np.arange(6000) / 100.0
    is_mine = rng.random(6000) < share
    for is_failed in (times >= times[-1] - 30.0, rng.random(6000) < 0.4, times < 0.0):
        our_log = log("candidate", times[is_mine], np.full(is_mine.sum(), 0.01), ok=~is_failed[is_mine])
        result, _ = judged(Logs(our_log, log("baseline", times[~is_mine], np.full((~is_mine).sum(), 0.01)), ()))
        assert result.verdict == ("FAIL" if is_failed.any() and share < 0.5 else "INSUFFICIENT"), result.reason
