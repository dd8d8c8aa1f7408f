"""Which engine is recommended: each rule of docs/reference/backends.md by a case."""

from dataclasses import replace

import pytest

from pipeline.operations import compare as report
from pipeline.operations.compare import compare_alone, recommend

FLEET = ("cpu", "sm_80", "sm_89")


def engine(unit: str, median_s: float = 1e-3, **changes) -> report.EngineFacts:
    backend, precision = unit.split()[-1], "fp32"
    usual_fields = {"low_s": 0.95 * median_s, "high_s": 1.05 * median_s, "sqnr_db": 100.0, "covers": ("cpu",)}
    return report.EngineFacts(unit, backend, precision, "proven", median_s=median_s, **{**usual_fields, **changes})


def pair(first: str, second: str, verdict: str, ratio: float = 0.9) -> report.PairedComparison:
    return report.PairedComparison(first, second, verdict, ratio, 0.97 * ratio, 1.03 * ratio, 0.04)


SAME = "no difference shown"


def test_the_measurably_fastest_is_recommended():
    recommendation = recommend([engine("a", 2e-3), engine("b", 1e-3)], [pair("b", "a", "faster", 0.5)])
    assert recommendation.unit == "b" and recommendation.ties == ()
    assert recommendation.reason == "the fastest, 1 ms per run; the next, a, takes 2 times as long (95 %: 1.94 to 2.06)"


def test_a_lead_without_a_paired_run_has_no_interval():
    advice = recommend([engine("a", 9e-3), engine("b", 1e-3)], [report.PairedComparison("b", "a", "faster", 1 / 9)])
    expected = "the fastest, 1 ms per run; the next, a, takes 9 times as long (by the times of each engine alone)"
    assert advice.reason == expected


@pytest.mark.parametrize(("median_s", "verdict"), [(1.2e-3, "faster"), (1.05e-3, SAME), (0.5e-3, SAME)])
def test_among_separate_runs_disjoint_intervals_decide(median_s, verdict):
    result = compare_alone(engine("a"), engine("b", median_s))
    assert result == report.PairedComparison("a", "b", verdict, 1e-3 / median_s)
    unknown_comparison = compare_alone(engine("a"), engine("b", median_s, low_s=None))
    assert unknown_comparison.verdict == SAME


def test_noisy_results_are_not_equally_fast_and_are_reported():
    """An engine that may take 26 times as long is not taken because it serves more of the fleet."""
    noisy = report.PairedComparison("a", "b", SAME, 0.26, 0.039, 1.737, 12.0)
    advice = recommend([engine("a"), engine("b", 37e-3, covers=FLEET)], [noisy])
    assert advice.unit == "a" and advice.ties == ()
    assert advice.reason == "the least median, 1 ms per run; the runs were too noisy to tell whether b may be as fast"
    assert report.describe_pair(noisy).startswith("too noisy to tell: a against b: 0.260 times the time")
    assert report.describe_pair(noisy).endswith("a difference of 1,200 % would have been shown")


def test_failed_and_unproven_engines_are_never_recommended():
    bad_engine = replace(engine("b", 1e-6, covers=FLEET), status="failed", reason="SQNR")
    unproven_engine = replace(engine("c", 1e-6), status="unproven", reason="no sm_89 GPU")
    recommendation = recommend([engine("a"), bad_engine, unproven_engine], [])
    assert recommendation.unit == "a" and recommendation.reason.startswith("the only engine that is proven here")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([], "no installed backend builds for this target"),
        ([report.EngineFacts("u", "b", "fp32", "failed", "SQNR is 3 dB")], "no engine passed: u: SQNR is 3 dB"),
        ([report.EngineFacts("u", "b", "fp32", "refused", "no FP8")], "no engine passed: u: no FP8"),
        (
            [report.EngineFacts("u", "b", "fp32", "unproven", "no sm_89 GPU")],
            "nothing runs here: u: no sm_89 GPU; compare on a node",
        ),
    ],
)
def test_without_a_candidate_the_reason_is_given(facts, words):
    recommendation = recommend(facts, [])
    assert recommendation.unit is None and words in recommendation.reason


@pytest.mark.parametrize(
    ("better", "words"),
    [
        ({"covers": FLEET, "sqnr_db": 30.0}, "it builds for 3 of the fleet's targets, SQNR 30 dB"),
        ({"sqnr_db": 120.0}, "it builds for 1 of the fleet's targets, SQNR 120 dB"),
        ({"sqnr_db": 100.0}, None),
    ],
)
def test_equally_fast_engines_are_ordered_by_targets_and_then_sqnr(better, words):
    slower_engine = engine("b", 1.02e-3, **better)
    advice = recommend([engine("a"), slower_engine], [pair("a", "b", SAME)])
    assert (advice.unit, advice.ties) == (("b", ("a",)) if words else ("a", ("b",)))
    assert words is None or (words in advice.reason and "no difference in speed shown to a" in advice.reason)


def test_a_missing_sqnr_is_no_disadvantage():
    for engines in ([engine("a", sqnr_db=None), engine("b")], [engine("a"), engine("b", sqnr_db=None)]):
        assert recommend(engines, [pair("a", "b", SAME)]).unit == "a"


def test_an_engine_faster_in_pairs_beats_the_lowest_median():
    engines = [engine("a", 0.9e-3), engine("b", 1e-3), engine("c", 1e-3, covers=FLEET)]
    advice = recommend(engines, [pair("a", "b", "slower", 1.1), pair("a", "c", SAME)])
    assert advice.unit == "b" and advice.ties == ()
    assert advice.reason == "1 ms per run; a, with the least median alone, takes 1.1 times as long (95 %: 1.07 to 1.13)"
    assert recommend(engines[:2], [pair("a", "b", "faster")]).unit == "a"
