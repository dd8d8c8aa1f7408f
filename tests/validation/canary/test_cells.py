"""Cells of simulated canaries whose verdicts were wrong in more than 5 %, and those that must keep their power.

Of each cell these are canaries (seeds) that an interval of short blocks, or without ranks, judged wrongly; any method
is wrong on some. The rates themselves are counted by `benchmarks.bench_canary`.
"""

import numpy as np
import pytest

from tests.validation.canary.cells import CELLS, bursts, errors_of
from tests.validation.canary.latencies import KINDS
from tests.validation.canary.sides import side
from validation.canary.judging.criteria import QualityThresholds, Thresholds, describe
from validation.canary.judging.judge import judge
from validation.statistics.rates import CanaryEvidence, burst_size

MEDIAN = Thresholds({"p50": 0.02}, None, None)
ERRORS = Thresholds({}, 0.001, None)
COUNT = 2000


def latencies(kind, seed, slower):
    ours, theirs = KINDS[kind](np.random.default_rng(seed), COUNT)
    return CanaryEvidence(side(ours * (1 + slower)), side(theirs), True)


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
def test_these_latencies_are_judged_wrongly_no_more(kind, slower, wrong, seeds):
    found = [judge(latencies(kind, seed, slower), MEDIAN, replicates=200).verdict for seed in seeds]
    assert found.count(wrong) <= 3


def test_scores_with_a_long_memory_do_not_fail_an_equal_candidate():
    assert errors_of("scores AR .99", COUNT, 60)["wrong FAIL, equal"] <= 1 / 60


def test_a_latency_that_keeps_its_level_is_insufficient_and_says_how_long():
    [item] = judge(latencies("AR .999", 0, 0.0), MEDIAN, replicates=200).criteria
    assert item.verdict == "INSUFFICIENT" and "moves slowly over all of the 2000 requests" in item.note


def test_what_moves_over_the_whole_run_is_said_without_a_number_that_nobody_measured():
    rising = np.linspace(1.0, 1.5, 2000)
    for paired, remedy in ((True, False), (False, True)):
        evidence = CanaryEvidence(side(rising), side(np.ones(2000)), paired)
        [item] = judge(evidence, MEDIAN, replicates=200).criteria
        assert item.verdict == "INSUFFICIENT" and "moves slowly over all of the" in item.note
        assert ("the same requests sent to both sides" in item.note) == remedy
        assert not any(number in item.note for number in ("32000", "2000 of 2000"))


def test_between_two_modes_the_interval_reaches_over_the_gap():
    rng = np.random.default_rng(0)
    ours, theirs = (rng.permutation(np.repeat([1.0, 2.0], 1000)) * np.exp(rng.normal(size=2000) * 0.05) for _ in "ab")
    [item] = judge(CanaryEvidence(side(ours), side(theirs), True), MEDIAN, replicates=200).criteria
    assert item.high > 0.5


def test_a_clock_of_coarse_steps_does_not_show_a_slowdown_within_a_step():
    rng = np.random.default_rng(0)
    theirs = np.round(rng.normal(10.0, 0.1, 5000))
    ours = np.round(rng.normal(10.3, 0.1, 5000))  # 3 % slower
    assert judge(CanaryEvidence(side(ours), side(theirs), True), MEDIAN, replicates=200).verdict == "INSUFFICIENT"


def test_no_error_at_all_proves_nothing_about_outages():
    for count, burst, verdict in ((8000, 100, "INSUFFICIENT"), (368_800, 100, "PASS"), (3688, 1, "PASS")):
        one = side(np.ones(count))
        limits = Thresholds({}, 0.001, None, error_burst=burst)
        [item] = judge(CanaryEvidence(one, one, True), limits, replicates=1).criteria
        assert item.verdict == verdict and "none was seen" in item.assumed
        assert item.needed == 3688 * burst
    few = judge(CanaryEvidence(side(np.ones(8000)), side(np.ones(8000)), True), ERRORS, replicates=1).criteria[0]
    assert "in bursts of 100 requests is assumed (error_burst)" in describe(few)


def test_errors_that_were_seen_say_how_they_come():
    alone, outage = np.zeros(8000, bool), np.zeros(8000, bool)
    alone[[700, 2900, 3100, 5550, 7800]], outage[3000:3100] = True, True
    assert burst_size([alone], 100, "error_burst") == (1.0, "")
    assert burst_size([outage, alone], 100, "error_burst")[0] > 40
    for both, verdict in ((alone, "PASS"), (outage, "INSUFFICIENT")):
        one = side(np.ones(8000), ~both)
        assert judge(CanaryEvidence(one, one, True), ERRORS, replicates=1).verdict == verdict


@pytest.mark.parametrize("cell", [name for name in CELLS if "bursts" in name or "outages" in name])
def test_bursts_do_not_pass_beyond_their_margin(cell):
    for name, rate in errors_of(cell, 8000, 20).items():
        assert not name.startswith("wrong") or rate <= 0.05


def test_one_burst_of_other_answers_is_one_event():
    differs = np.zeros(8000, bool)
    differs[3000:3060] = True
    limits = Thresholds({}, None, QualityThresholds(score=None))
    one = side(np.ones(8000))
    assert judge(CanaryEvidence(one, one, True, differs), limits, replicates=1).verdict == "INSUFFICIENT"


def test_bursts_are_as_frequent_as_asked():
    rng = np.random.default_rng(0)
    assert np.mean([bursts(rng, 20_000, 0.01).mean() for _ in range(50)]) == pytest.approx(0.01, rel=0.2)


def test_equal_candidates_still_pass():
    assert errors_of("lognormal", 5000, 10)["PASS, equal"] >= 0.4
    assert errors_of("shared .999", 5000, 5)["PASS, equal"] >= 0.6
