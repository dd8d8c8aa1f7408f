"""The judge's error rates, and its faults caught. Whatever is claimed here is counted on simulated canaries."""

from dataclasses import replace

import numpy as np
import pytest

from tests.validation.canary.latencies import KINDS
from tests.validation.canary.sides import side
from tests.validation.canary.simulated import pair_evidence, seeds
from validation.canary.judging.criteria import describe
from validation.canary.judging.judge import Looks, judge
from validation.canary.judging.thresholds import QualityThresholds, Thresholds
from validation.statistics.rates import CanaryEvidence, lower

QUICK = 200
MEDIAN = Thresholds({"p50": 0.02}, None, None)


def only(latency=None, error_rate=None, disagreement=None):
    quality = None if disagreement is None else QualityThresholds(disagreement=disagreement)
    return Thresholds(latency or {}, error_rate, quality)


def verdicts(evidences, thresholds=None, looks=None):
    return [judge(evidence, thresholds, looks, replicates=QUICK).verdict for evidence in evidences]


def at_most(count: int, of: int, promised: float = 0.05) -> bool:
    """Whether a count does not contradict a promised rate: its lower bound, at 1 %, is no higher."""
    return lower(count, of, 0.01) <= promised


def canaries(few: int, many: int) -> pytest.MarkDecorator:
    """Counts on a few canaries, in which a judge that is wrong half of the time is found; `make test-all` on many."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


@canaries(16, 100)
@pytest.mark.parametrize("kind", ["lognormal", "heavy", "remembering", "shared"])
def test_at_the_margin_it_passes_or_fails_wrongly_in_at_most_5_percent(kind, count):
    actual = verdicts((pair_evidence(rng, 800, kind, slower=0.02) for rng in seeds(count)), MEDIAN)
    assert at_most(actual.count("PASS"), count) and at_most(actual.count("FAIL"), count)


@canaries(16, 100)
def test_the_level_holds_at_the_margin_of_the_tail_too(count):
    limits = only({"p99": 0.05})
    actual = verdicts((pair_evidence(rng, 1500, "two humps", slower=0.05) for rng in seeds(count)), limits)
    assert at_most(actual.count("PASS"), count) and at_most(actual.count("FAIL"), count)


@canaries(40, 400)
@pytest.mark.parametrize("paired", [True, False])
def test_the_level_holds_at_the_margin_of_error_rates(paired, count):
    limits = only(error_rate=0.005)
    items = []
    for rng in seeds(count):
        is_ours, is_theirs = rng.random(2000) < 0.007, rng.random(2000) < 0.002
        ones = np.ones(2000)
        items.append(
            judge(CanaryEvidence(side(ones, ~is_ours), side(ones, ~is_theirs), paired), limits, replicates=1).verdict
        )
    assert at_most(items.count("PASS"), count) and at_most(items.count("FAIL"), count)


@canaries(40, 300)
def test_the_level_holds_at_the_margin_of_different_answers(count):
    limits = only(disagreement=0.01)
    actual = verdicts((pair_evidence(rng, 1500, differing=0.01) for rng in seeds(count)), limits)
    assert at_most(actual.count("PASS"), count) and at_most(actual.count("FAIL"), count)


@canaries(len(KINDS), 50)
def test_a_clean_pair_never_fails(count):
    kinds = sorted(KINDS)
    evidences = (pair_evidence(rng, 800, kinds[seed % len(kinds)]) for seed, rng in enumerate(seeds(count)))
    assert "FAIL" not in verdicts(evidences)


def test_an_equal_candidate_passes_with_enough_data():
    actual = verdicts(pair_evidence(rng, 20_000, "shared") for rng in seeds(4))
    assert actual.count("PASS") >= 3 and "FAIL" not in actual


@pytest.mark.parametrize("fault", [{"slower": 0.03}, {"failing": 0.005}])
def test_too_little_data_is_insufficient_with_the_detectable_difference(fault):
    for rng in seeds(10):
        actual = judge(pair_evidence(rng, 300, **fault), replicates=QUICK)
        assert actual.verdict != "PASS"
        if actual.verdict == "FAIL":
            continue  # by luck, and rightly
        median, _, errors, _ = actual.criteria
        assert median.note or (median.detectable > 0.03 and median.needed > 300)
        assert median.verdict == "PASS" or median.note or f"{median.requests} requests would" in describe(median)
        assert errors.detectable is None or errors.detectable > 0.005


@canaries(24, 60)
def test_the_detectable_difference_is_detected_in_8_of_10(count):
    effect = judge(pair_evidence(next(seeds(1)), 1500), MEDIAN).criteria[0].detectable
    actual = verdicts((pair_evidence(rng, 1500, slower=effect) for rng in seeds(count)), MEDIAN)
    assert 0.62 <= actual.count("FAIL") / count <= 0.95


def test_an_unobserved_tail_is_not_judged():
    tail = judge(pair_evidence(next(seeds(1)), 500), replicates=QUICK).criteria[1]
    assert tail.verdict == "INSUFFICIENT" and "it takes 1000" in tail.note
    bursts = np.ones(2000)
    bursts[500:540] = 50
    actual = judge(CanaryEvidence(side(bursts), side(np.ones(2000)), True), only({"p99": 0.05}), replicates=QUICK)
    assert actual.verdict == "INSUFFICIENT", "one burst of 40 slow requests is one event"


def test_an_early_look_needs_more_evidence_than_the_last_one():
    evidence = pair_evidence(np.random.default_rng(3), 1500, slower=0.035)
    single_judgement = judge(evidence, MEDIAN, replicates=QUICK)
    early_judgement = judge(evidence, MEDIAN, Looks(15_000), replicates=QUICK)
    assert (single_judgement.verdict, early_judgement.verdict) == ("FAIL", "INSUFFICIENT")
    assert early_judgement.criteria[0].low < single_judgement.criteria[0].low


def test_missing_answers_give_no_pass():
    other_values = np.exp(np.random.default_rng(0).normal(size=6000) * 0.01)
    is_failed = np.arange(6000) % 1000 == 7  # on both sides, one by one
    evidence = CanaryEvidence(side(other_values, ~is_failed), side(other_values, ~is_failed), True)
    assert judge(evidence).verdict == "INSUFFICIENT" and "nothing was observed of the answers" in judge(evidence).reason
    assert judge(evidence, Thresholds(quality=None)).verdict == "PASS"
    assert judge(evidence, only()).verdict == "INSUFFICIENT", "no threshold at all proves nothing"


@pytest.mark.parametrize(("flips", "verdict"), [(0, "PASS"), (20, "INSUFFICIENT"), (60, "FAIL")])
def test_argmax_flips_with_a_margin_are_judged(flips, verdict):
    other_side = side(np.ones(2000))
    evidence = CanaryEvidence(
        other_side, other_side, True, flipped=np.isin(np.arange(2000), np.linspace(0, 1999, flips).astype(int))
    )
    quality = QualityThresholds(disagreement=None, flips=0.01, score=None)
    (criterion,) = judge(evidence, Thresholds({}, None, quality), replicates=1).criteria
    assert (criterion.name, criterion.verdict) == ("argmax flips", verdict)
    assert not judge(evidence, Thresholds({}, None, replace(quality, flips=None)), replicates=1).criteria


def test_lower_scores_fail():
    limits = Thresholds({}, None, QualityThresholds(disagreement=None))
    for is_paired in (True, False):
        rng = np.random.default_rng(1)
        is_theirs = (rng.random(20_000) < 0.9).astype(float)
        is_same, worse_array = is_theirs.copy(), np.where(rng.random(20_000) < 0.03, 0.0, is_theirs)
        ones = np.ones(20_000)

        def verdict(ours):
            return judge(CanaryEvidence(side(ones, score=ours), side(ones, score=is_theirs), is_paired), limits).verdict  # noqa: B023

        assert (verdict(is_same), verdict(worse_array)) == ("PASS", "FAIL")
    few = side(np.ones(60), score=np.ones(60))
    assert judge(CanaryEvidence(few, few, True), limits).verdict == "INSUFFICIENT", "60 equal scores prove no 1 %"


def test_passing_uses_the_whole_level_and_failing_shares_it():
    levels = judge(pair_evidence(np.random.default_rng(0), 100), replicates=QUICK).levels
    assert (levels.passing, levels.failing) == pytest.approx((0.05, 0.05 / 5)), "p50, p99, errors, answers, score"


def test_the_verdict_is_deterministic():
    evidence = pair_evidence(np.random.default_rng(5), 1000)
    assert judge(evidence) == judge(evidence)
    assert judge(evidence, seed=1) != judge(evidence)


def test_a_failure_by_answers_is_reported_despite_slowness():
    """On a busy machine latency fails for other reasons than the candidate's, answers do not."""
    [evidence] = [pair_evidence(rng, 1500, slower=3.0, differing=0.5) for rng in seeds(1)]
    actual = judge(evidence, replicates=QUICK)
    assert {item.kind for item in actual.criteria if item.verdict == "FAIL"} >= {"latency", "share"}
    assert actual.verdict == "FAIL" and actual.reason.startswith("answers that differ")
