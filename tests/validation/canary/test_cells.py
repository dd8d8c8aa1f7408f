"""Cells of simulated canaries whose verdicts were wrong in more than 5 %, and those that must keep their power.

Of each kind these are canaries (seeds) that an interval of short blocks, or without ranks, judged wrongly; any method
is wrong on some. The rates themselves are counted by `benchmarks.bench_canary`.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.validation.canary.cells import (
    CELLS,
    QUARTER_HOUR,
    after,
    bursts,
    count_verdicts,
    failing,
    share,
    sized,
    slow_stretch,
)
from tests.validation.canary.latencies import KINDS
from tests.validation.canary.sides import side
from tests.validation.canary.simulated_logs import mirrored
from validation.canary.judging.judge import Looks, facts_of, judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import QualityThresholds, Thresholds
from validation.statistics.rates import CanaryEvidence

MEDIAN = Thresholds({"p50": 0.02}, None, None)
ERRORS = Thresholds({}, 0.001, None)
COUNT = 2000


def latencies(kind, seed, slower):
    our_series, their_series = KINDS[kind](np.random.default_rng(seed), COUNT)
    return CanaryEvidence(side(our_series * (1 + slower)), side(their_series), True)


@pytest.mark.parametrize(
    ("kind", "slower", "wrong", "seeds"),
    [
        ("two modes", 0.03, "PASS", (4, 18, 27, 28, 38, 41, 55, 56, 57, 58, 66, 74)),
        ("load steps", 0.03, "PASS", (11, 16, 27, 29, 32, 35, 37, 45, 49, 62, 64, 66)),
        ("load steps", 0.0, "FAIL", (9, 13, 15, 18, 20, 21, 28, 34, 39, 44, 48, 50)),
        ("AR .99", 0.03, "PASS", (2, 7, 13, 14, 20, 42, 45, 52, 69, 72, 84, 93)),
        ("AR .99", 0.0, "FAIL", (3, 15, 24, 35, 39, 53, 65, 91, 94, 98, 104, 114)),
        ("slow component", 0.03, "PASS", (0, 1, 2, 4, 7, 8, 12, 14, 17, 18, 26, 33)),
        ("slow component", 0.03, "PASS", (12, 26, 36, 66, 69, 81, 95, 279, 283, 294)),
        ("regimes", 0.0, "FAIL", (14, 26, 27, 31, 38, 48, 51, 61, 64, 83, 87, 94)),
    ],
)
def test_these_latencies_are_judged_correctly(kind, slower, wrong, seeds):
    verdicts = [judge(latencies(kind, seed, slower), MEDIAN, replicates=200).verdict for seed in seeds]
    assert verdicts.count(wrong) <= 3


def test_a_wandering_latency_is_insufficient_with_the_needed_time():
    [item] = judge(latencies("AR .999", 0, 0.0), MEDIAN, replicates=200).criteria
    assert item.verdict == "INSUFFICIENT" and "moves slowly over all of the 2000 requests" in item.note


def test_a_drift_over_the_whole_run_is_reported_without_a_number():
    rising_array = np.linspace(1.0, 1.5, 2000)
    for is_paired, remedy in ((True, False), (False, True)):
        evidence = CanaryEvidence(side(rising_array), side(np.ones(2000)), is_paired)
        [item] = judge(evidence, MEDIAN, replicates=200).criteria
        assert item.verdict == "INSUFFICIENT" and "moves slowly over all of the" in item.note
        assert ("the same requests sent to both sides" in item.note) == remedy
        assert not any(number in item.note for number in ("32000", "2000 of 2000"))


def test_between_two_modes_the_interval_covers_the_gap():
    rng = np.random.default_rng(0)
    order, theirs = (rng.permutation(np.repeat([1.0, 2.0], 1000)) * np.exp(rng.normal(size=2000) * 0.05) for _ in "ab")
    [item] = judge(CanaryEvidence(side(order), side(theirs), True), MEDIAN, replicates=200).criteria
    assert item.high > 0.5


def test_a_coarse_clock_hides_a_slowdown_within_a_step():
    rng = np.random.default_rng(0)
    their_array = np.round(rng.normal(10.0, 0.1, 5000))
    ours = np.round(rng.normal(10.3, 0.1, 5000))  # 3 % slower
    assert judge(CanaryEvidence(side(ours), side(their_array), True), MEDIAN, replicates=200).verdict == "INSUFFICIENT"


def test_logs_without_any_error_pass_by_the_budget():
    for count, budget, verdict in ((1496, 0.002, "INSUFFICIENT"), (1497, 0.002, "PASS"), (1497, None, "INSUFFICIENT")):
        one_side = side(np.ones(count))
        limits = Thresholds({}, 0.001, None, error_budget=budget)
        [item] = judge(CanaryEvidence(one_side, one_side, True), limits, replicates=1).criteria
        assert item.verdict == verdict and item.needed == (3688 if budget is None else 1497)


def test_common_errors_in_one_outage_pass_no_candidate():
    single_array, outage_array = np.zeros(8000, bool), np.zeros(8000, bool)
    single_array[[700, 2900, 3100, 5550, 7800]], outage_array[3000:3100] = True, True
    for their_array, verdict in ((single_array, "PASS"), (outage_array, "INSUFFICIENT")):
        sides = side(np.ones(8000), ~their_array), side(np.ones(8000), ~single_array)
        assert judge(CanaryEvidence(*sides, False), ERRORS, replicates=1).verdict == verdict


def test_a_baseline_without_failures_gets_the_candidates_burst_length():
    """Three outages of a candidate are three events, of which an equal baseline has none in one of eight runs."""
    is_failed = np.arange(9000) % 3000 < 300
    evidence = CanaryEvidence(side(np.ones(9000), ~is_failed), side(np.ones(9000)), paired=True)
    [errors] = [item for item in judge(evidence, ERRORS, replicates=20).criteria if item.name == "errors"]
    assert errors.verdict == "INSUFFICIENT"


def test_one_burst_of_other_answers_is_one_event():
    different_array = np.zeros(8000, bool)
    different_array[3000:3060] = True
    limits = Thresholds({}, None, QualityThresholds(score=None))
    one = side(np.ones(8000))
    assert judge(CanaryEvidence(one, one, True, different_array), limits, replicates=1).verdict == "INSUFFICIENT"


def test_bursts_have_the_requested_frequency():
    rng = np.random.default_rng(0)
    assert np.mean([bursts(rng, 20_000, 0.01).mean() for _ in range(50)]) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("name", [name for name, cell in CELLS.items() if cell.truth == "broken"])
def test_a_broken_candidate_always_fails_with_a_fact(name):
    cell = CELLS[name]
    for seed in range(3):
        verdict = judge(cell.draw(np.random.default_rng(seed), 2000), replicates=20)
        assert verdict.verdict == "FAIL" and [item for item in verdict.criteria if item.kind == "fact"], verdict.reason


@pytest.mark.parametrize("name", [name for name, cell in CELLS.items() if cell.truth == "worse"])
def test_a_worse_candidate_does_not_pass(name):
    assert count_verdicts(name, 3, 7, replicates=100)["PASS"] <= 1


def test_equal_candidates_pass_in_a_quarter_of_an_hour():
    for name in (name for name, cell in CELLS.items() if cell.passes):
        assert CELLS[name].count == QUARTER_HOUR and count_verdicts(name, 3, 7, replicates=100)["PASS"] >= 2


def test_bursts_of_an_equal_candidate_are_no_fact():
    """Where 0.1 % fail on either side, a hundred in a row, the outage of one is no worse than that of the other, and
    one at the end may end as those of the baseline did."""
    flags = np.zeros(5000, bool)
    flags[2000:2100] = True
    for end, other_start, facts in ((5000, 5000, 0), (2100, 5000, 1), (2100, 1000, 0), (2150, 1000, 1)):
        flags[2100:2150] = end == 2150  # longer than the baseline's
        is_answered = (np.arange(end) - other_start) // 100 != 0
        sides = side(np.ones(end), ~flags[:end]), side(np.ones(end), is_answered)
        verdict = judge(CanaryEvidence(*sides, True), ERRORS, replicates=20)
        assert sum(item.kind == "fact" for item in verdict.criteria) == facts and verdict.verdict != "PASS"


def test_an_ongoing_outage_does_not_pass():
    for count, begin, end, verdict in ((60_000, 30_000, 30_060, "INSUFFICIENT"), (5000, 4850, 4930, "FAIL")):
        index = np.arange(count)
        is_failed = index >= (begin if verdict == "FAIL" else count - 55)
        sides = side(np.ones(count), ~is_failed), side(np.ones(count), (index < begin) | (index >= end))
        for is_paired in (True, False):
            report = judge(CanaryEvidence(*sides, is_paired), Thresholds({}, 0.01, None), replicates=20)
            assert report.verdict == verdict and report.reason.startswith("failures in a stretch"), report.reason


def test_after_a_common_outage_less_traffic_is_no_fact():
    generator = np.random.default_rng(45)
    for end in range(14_065, 14_125, 5):
        times = [np.sort(generator.uniform(0, end, int(end * rate))) for rate in (0.2, 2.0)]
        sides = [side(np.ones(len(time)), (time < 14_000) | (time >= 14_060), time=time) for time in times]
        assert not facts_of(CanaryEvidence(*sides, False), ERRORS), end


def test_a_baseline_with_frequent_failures_needs_a_longer_run():
    draw = failing(share(0.3), share(0.3))
    for seed in range(10):
        verdict = judge(draw(np.random.default_rng(seed), 2000), ERRORS, replicates=1)
        assert not [item for item in verdict.criteria if item.kind == "fact"]
    dead = failing(after(0.8), share(0.3))
    assert judge(dead(np.random.default_rng(0), 2000), ERRORS).reason.startswith("failures in a stretch")


def test_one_long_outage_in_a_short_log_is_a_fact():
    """An equal candidate may have it where the baseline's log is too short to show how often outages occur."""
    is_failed = np.arange(2000) // 300 == 2
    for end in (2000, 900):
        sides = side(np.ones(end), ~is_failed[:end]), side(np.ones(end))
        verdict = judge(CanaryEvidence(*sides, True), ERRORS, replicates=1)
        assert verdict.verdict == "FAIL" and "chance" not in verdict.reason
        assert verdict.reason.endswith("; expected from the baseline and the margin: 0.1 % of the run")


def test_a_growing_log_needs_more_for_a_fail():
    evidence = failing(share(0.003), share(0.0001))(np.random.default_rng(1), 9000)
    verdicts = [judge(replace(evidence, growing=is_growing), ERRORS, replicates=1) for is_growing in (False, True)]
    assert [verdict.verdict for verdict in verdicts] == ["FAIL", "INSUFFICIENT"]
    assert verdicts[1].criteria[0].low < verdicts[0].criteria[0].low
    planned_judgement = judge(replace(evidence, growing=True), ERRORS, Looks(9000), replicates=1)
    assert planned_judgement.verdict == "FAIL", "who planned the number of looks has the level for it"
    far_sides = failing(share(0.02), share(0.0001))(np.random.default_rng(1), 9000)
    assert judge(replace(far_sides, growing=True), ERRORS, replicates=1).verdict == "FAIL"


@pytest.mark.parametrize(("slow", "is_late"), [(5.0, False), (5.01, True)])
def test_answers_beyond_five_times_the_p99_count_as_failed(slow, is_late):
    limits, our_array = Thresholds({"p50": 0.02}, quality=None), np.ones(5000)
    our_array[::100] = slow
    verdict = judge(CanaryEvidence(side(our_array), side(np.ones(5000)), True), limits, replicates=20)
    assert (verdict.verdict == "FAIL") is is_late and verdict.reason.startswith("errors: +1 %") is is_late


@pytest.mark.parametrize("paired", [True, False])
def test_late_answers_that_double_the_mean_pass_no_candidate(paired):
    """Nine answers of 9,000 are within the budget of errors, and move no quantile up to p99."""
    slow_array = np.where(np.arange(9000) % 1000 == 500, 1.0, 0.0)
    for factor, limits, verdict in ((1000.0, MEDIAN, ["INSUFFICIENT"]), (20.0, MEDIAN, []), (1000.0, ERRORS, [])):
        evidence = CanaryEvidence(side(1.0 + factor * slow_array), side(np.ones(9000)), paired)
        criteria = judge(evidence, limits, replicates=20).criteria
        assert [item.verdict for item in criteria if item.name == "late answers"] == verdict
    both_late = CanaryEvidence(side(1.0 + 1000.0 * slow_array), side(1.0 + 1000.0 * slow_array), True)
    assert not [item for item in judge(both_late, MEDIAN, replicates=20).criteria if item.name == "late answers"]


def test_a_pause_of_less_than_a_second_is_no_slow_stretch():
    evidence = slow_stretch(0.1)(np.random.default_rng(0), 9000)
    for seconds, facts in ((5.0, 0), (50.0, 1)):
        sides = [replace(entry, time=entry.time * seconds / 900) for entry in (evidence.candidate, evidence.baseline)]
        criteria = judge(CanaryEvidence(sides[0], sides[1], True), replicates=20).criteria
        assert sum(item.kind == "fact" for item in criteria) == facts


def test_large_requests_are_compared_with_large_ones():
    for slower_value, verdict in ((0.0, "PASS"), (0.2, "FAIL")):
        evidence = sized(slower_value)(np.random.default_rng(0), 9000)
        report = judge(evidence, Thresholds({"p50": 0.02}), replicates=100)
        assert report.verdict == verdict
        assert {item.name for item in report.criteria} >= {"latency p50 of size 1 to 1", "latency p50 of size 16 to 16"}
    bare_candidates = [replace(candidate, size=None) for candidate in (evidence.candidate, evidence.baseline)]
    unsized_evidence = replace(evidence, candidate=bare_candidates[0], baseline=bare_candidates[1])
    assert judge(unsized_evidence, Thresholds({"p50": 0.02}), replicates=100).verdict == "PASS", "nothing else tells"


def test_the_noise_of_a_pair_limits_the_differing_answers():
    for level, allowed_value in ((100.0, 0.002), (20.0, 0.00621), (10.0, 0.01)):
        logs = mirrored(np.random.default_rng(0), 2000)
        logs.candidate.sqnr_db[:] = level + 2.0 * np.random.default_rng(1).normal(size=2000)
        evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
        answers = next(item for item in judge(evidence, replicates=20).criteria if item.name == "answers that differ")
        assert answers.margin == pytest.approx(allowed_value, rel=0.4)
