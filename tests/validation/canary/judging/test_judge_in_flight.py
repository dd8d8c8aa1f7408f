import re
from dataclasses import replace
from functools import cache

import numpy as np

from tests.validation.canary.judging.test_judge import at_most, canaries
from tests.validation.canary.simulated import pair_evidence
from tests.validation.canary.simulated_in_flight import MACHINES, in_flight_evidence
from tests.validation.canary.test_concurrent import observed, poisson_traffic, replayed, working
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Thresholds
from validation.statistics.rates import CanaryEvidence

LATENCY = Thresholds(error_rate=None, quality=None)
MEDIAN = Thresholds({"p50": 0.02}, error_rate=None, quality=None)


@cache
def equal(seed: int, place: int) -> CanaryEvidence:
    machine = list(MACHINES)[place]
    return in_flight_evidence(np.random.default_rng((seed, place)), 4000, 32, machine, 0.7)


def verdicts(slower, limits, count):
    items = []
    for place in range(len(MACHINES)):
        for seed in range(count // len(MACHINES)):
            evidence = equal(seed, place)
            candidate = replace(evidence.candidate, latency=evidence.candidate.latency * (1 + slower))
            items.append(judge(replace(evidence, candidate=candidate), limits, replicates=200).verdict)
    return items


@canaries(8, 24)
def test_ten_percent_slower_is_caught_with_32_in_flight(count):
    assert verdicts(0.1, LATENCY, count).count("FAIL") >= 17 * count / 24


@canaries(8, 24)
def test_in_flight_wrong_verdicts_at_the_margin_are_within_the_promise(count):
    assert at_most(verdicts(0.02, MEDIAN, count).count("PASS"), count)
    assert at_most(verdicts(0.0, LATENCY, count).count("FAIL"), count)


def test_observations_name_their_segment_and_two_form_a_block(tmp_path):
    pairs, our_replay, _ = replayed(poisson_traffic(600, 0.01), working(0), in_flight=8)
    count = len(our_replay.sent)
    evidence, _ = evidence_of(*observed(pairs, tmp_path), 15.0)
    assert sorted({pair.segment for pair in pairs}) == list(range(count))
    assert evidence.design_block == -(-2 * 600 // count) == 34
    assert pair_evidence(np.random.default_rng(0), 100).design_block == 1


def test_an_insufficient_verdict_gives_the_sufficient_number_of_requests():
    few_judgement = judge(in_flight_evidence(np.random.default_rng(1), 2000, 8, load=0.7), LATENCY, replicates=200)
    search_result = re.search(r"some (\d+) requests \((\d+) s of such traffic\)", few_judgement.reason)
    assert few_judgement.verdict == "INSUFFICIENT" and search_result, few_judgement.reason
    count, seconds = map(int, search_result.groups())
    assert count / 4 < seconds < count / 2.5 and 4000 < count < 100_000, "3.1 requests come in a second"
