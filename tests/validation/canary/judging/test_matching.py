"""Requests that do not pair are compared within windows of time; what was observed at other hours, or under another
load, is not compared at all."""

import numpy as np
import pytest

from tests.validation.canary.simulated_logs import (
    HOUR,
    LIMITS,
    SIMULATIONS,
    Logs,
    apart,
    arrivals,
    halves,
    load,
    log,
    mirrored,
    ramp,
)
from validation.canary.judging.judge import Looks, judge
from validation.canary.judging.matching import match, match_in_time, spans_of
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Thresholds
from validation.canary.report import Circumstances, TrafficReplayed, make_report
from validation.statistics.evidence import CanaryEvidence

MEDIAN = Thresholds({"p50": 0.02}, error_rate=None, quality=None)


def judged(logs: Logs, limits: Thresholds = LIMITS):
    evidence, notes = evidence_of(logs.candidate, logs.baseline, 15.0)
    return judge(evidence, limits, replicates=200), " ".join(notes)


DAYS = [name for name in SIMULATIONS if SIMULATIONS[name](np.random.default_rng(0), 200).candidate.request[0] is None]


@pytest.mark.parametrize("name", DAYS)
def test_the_verdict_on_logs_of_a_day_is_right(name):
    for seed in range(3):
        logs = SIMULATIONS[name](np.random.default_rng(seed), 4000)
        found, _ = judged(logs)
        assert found.verdict in logs.right, found.reason


@pytest.mark.parametrize("slower", [0.0, 0.1])
def test_logs_of_other_hours_are_refused_with_their_hours(slower):
    found, _ = judged(apart(np.random.default_rng(0), 6000, slower=slower))
    assert [item.name for item in found.criteria] == ["sides that compare"] and found.verdict == "INSUFFICIENT"
    for word in (
        "candidate: 2025-11-20 00:0",
        "baseline: 2025-11-20 09:0",
        "different times",
        "to both sides at the same",
    ):
        assert word in found.reason


def test_an_unlike_load_is_refused_with_its_counts():
    found, _ = judged(ramp(np.random.default_rng(0), 6000))
    assert (
        found.verdict == "INSUFFICIENT"
        and "unlike load" in found.reason
        and "requests of the candidate" in found.reason
    )
    rng = np.random.default_rng(0)
    times = [arrivals(rng, count, 0, 24) for count in (1000, 9000)]
    logs = [log(name, one, np.full(len(one), 0.01)) for name, one in zip(("candidate", "baseline"), times, strict=True)]
    found, _ = judged(Logs(logs[0], logs[1], ()))
    assert "1000 requests of the candidate and 8991 of the baseline" in found.reason


def test_concurrent_halves_are_told_apart():
    found, notes = judged(halves(np.random.default_rng(0), 8000), MEDIAN)
    assert (
        found.verdict == "PASS"
        and "compared within windows of time" in notes
        and "have no match at the same time" in notes
    )
    found, _ = judged(halves(np.random.default_rng(0), 8000, slower=0.1), MEDIAN)
    assert found.verdict == "FAIL" and found.reason.startswith("latency p50: +")


def test_a_share_that_follows_the_hour_does_not_hide_a_difference():
    """The candidate has 54 % of the requests of the quiet hours: the medians of all of it differ by less than 3 %."""
    logs = halves(np.random.default_rng(0), 20_000, slower=0.03, drift=0.05)
    medians = [float(np.median(one.latency)) for one in (logs.candidate, logs.baseline)]
    assert medians[0] / medians[1] < 1.02, "unmatched, it is within the margin"
    evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
    matched = [float(np.median(one.latency)) for one in (evidence.candidate, evidence.baseline)]
    assert matched[0] / matched[1] == pytest.approx(1.03, abs=0.01)


def test_matched_requests_are_not_the_same_ones():
    logs = halves(np.random.default_rng(0), 2000)
    evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
    facts = Circumstances("", {}, {}, "", TrafficReplayed(), ())
    report = make_report(judge(evidence), Thresholds(), Looks(), logs.candidate, logs.baseline, evidence, facts)
    assert evidence.paired and evidence.matched and report.paired is False


def test_the_judge_compares_no_hours_whoever_made_the_evidence():
    logs = apart(np.random.default_rng(0), 6000, slower=0.1)
    sides = [one.side(np.arange(len(one))) for one in (logs.candidate, logs.baseline)]
    assert "different times" in judge(CanaryEvidence(sides[0], sides[1], paired=False)).reason
    logs = halves(np.random.default_rng(0), 4000)
    sides = [one.side(np.arange(len(one))) for one in (logs.candidate, logs.baseline)]
    backwards = [side.take(np.arange(len(side))[::-1]) for side in sides]
    assert judge(CanaryEvidence(backwards[0], sides[1], paired=False), seed=1, replicates=200) == judge(
        match_in_time(CanaryEvidence(sides[0], sides[1], paired=False)), seed=1, replicates=200
    )


def test_both_sides_have_as_many_requests_in_every_window():
    rng = np.random.default_rng(0)
    times = arrivals(rng, 3000, 0, 24), arrivals(rng, 2700, 2, 26)
    spans = spans_of(*times)
    kept = [one[index] for one, index in zip(times, match(spans), strict=True)]
    assert len(kept[0]) == len(kept[1]) > 1800 and (np.diff(kept[0]) >= 0).all()
    assert np.abs(kept[0] - kept[1]).max() < 24 * HOUR / 40
    assert load(kept[0]).mean() == pytest.approx(load(kept[1]).mean(), rel=0.01)


def test_the_same_requests_hours_apart_are_refused():
    logs = mirrored(np.random.default_rng(0), 6000)
    assert judged(logs)[0].verdict == "PASS"
    logs.candidate.time = [time + 9 * HOUR for time in logs.candidate.time]
    found, _ = judged(logs)
    assert found.verdict == "INSUFFICIENT" and "arrived 540 minutes apart" in found.reason
    logs.candidate.time = [time - 9 * HOUR - 30 for time in logs.candidate.time]
    assert judged(logs)[0].verdict == "PASS", "clocks may differ"
