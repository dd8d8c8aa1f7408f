from dataclasses import replace

import numpy as np
import pytest

from enginesmith.recording.traffic import EQUAL_DB, UNLIKE_DB, difference, digest_of_outputs
from tests.validation.canary.simulated import Engine, Ticking, traffic
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import ObservationTable, add_to
from validation.canary.replay import ReplayPace, replay


def replayed(count, fault="", gap=0.05, pace=None, seconds=0.01, seed=0):
    ticking_clock = Ticking()
    our_engine = Engine(ticking_clock, np.random.default_rng(seed), fault, seconds)
    engine = Engine(ticking_clock, np.random.default_rng(seed + 1000), "", seconds)
    return list(replay(our_engine, engine, traffic(count, gap), pace, ticking_clock.clock())), our_engine, engine


def observed(pairs, tmp_path):
    sides = ObservationTable(tmp_path / "candidate.jsonl"), ObservationTable(tmp_path / "baseline.jsonl")
    for pair in pairs:
        for side, line in zip(sides, pair.lines(), strict=True):
            add_to(side, line)
    for side in sides:
        side.accounted = len(side)
    return sides


def verdict(pairs, tmp_path, thresholds=None):
    limits = thresholds or Thresholds()
    evidence, _ = evidence_of(*observed(pairs, tmp_path), limits.quality.sqnr_db)
    return judge(evidence, limits, replicates=200)


def test_requests_are_sent_at_their_arrivals_to_both_engines():
    pairs, our_replay, their_replay = replayed(200, pace=ReplayPace(warmup=0))
    assert [pair.at for pair in pairs] == pytest.approx([index * 0.05 for index in range(200)])
    firsts = [min(a, b) for a, b in zip(our_replay.seen, their_replay.seen, strict=True)]
    assert firsts == pytest.approx([pair.at for pair in pairs])
    assert 70 < sum(pair.first == "candidate" for pair in pairs) < 130
    second_replay, *_ = replayed(200, pace=ReplayPace(warmup=0))
    assert [pair.first for pair in second_replay] == [pair.first for pair in pairs]
    other_replay, *_ = replayed(200, pace=ReplayPace(warmup=0, seed=1))
    assert [pair.first for pair in other_replay] != [pair.first for pair in pairs]


def test_warm_up_is_not_observed():
    pairs, our_replay, _ = replayed(30, pace=ReplayPace(warmup=7))
    assert len(pairs) == 30 and len(our_replay.seen) == 37 and pairs[0].request == 0 and pairs[0].at == 0


def test_latency_counts_from_the_scheduled_arrival():
    """An engine that takes 3 gaps per request falls behind: a client that waits would have seen 30 ms throughout."""
    pairs, *_ = replayed(100, gap=0.01, seconds=0.03, pace=ReplayPace(warmup=0))
    latencies = [pair.candidate.latency for pair in pairs]
    assert latencies[-1] == pytest.approx(100 * 0.03 - 99 * 0.01, rel=0.1)
    assert latencies[-1] > 20 * pairs[-1].candidate.service


def test_waiting_for_the_other_engine_does_not_count():
    pairs, *_ = replayed(300, gap=0.015, seconds=0.01, pace=ReplayPace(warmup=0))  # together they need 20 ms of each 15
    assert np.median([pair.candidate.latency for pair in pairs]) < 0.02


def test_traffic_without_times_is_sent_one_by_one_without_a_queue():
    ticking_clock = Ticking()
    engines = [Engine(ticking_clock, np.random.default_rng(seed), seconds=0.03) for seed in (0, 1)]
    untimed_traffic = replace(traffic(50, 0.0), timed=False)
    pairs = list(replay(*engines, untimed_traffic, ReplayPace(warmup=0), ticking_clock.clock()))
    assert all(pair.candidate.latency == pytest.approx(pair.candidate.service) for pair in pairs)
    assert len(pairs) == 50 and 1.4 < pairs[-1].at < 4.0, "each arrives when the one before is done"


def test_scale_and_duration_change_the_traffic():
    seen_traffic = traffic(10, 1.0)
    assert [time_s for time_s, _ in seen_traffic.arrivals(2.0)] == pytest.approx([index / 2 for index in range(10)])
    repeated_times = [time_s for time_s, _ in seen_traffic.arrivals(1.0, 25.0)]
    assert repeated_times == pytest.approx(list(range(25))) and seen_traffic.count(2.0, 25.0) == 50
    assert seen_traffic.count(1.0, 3.5) == 4


@pytest.mark.parametrize(
    ("fault", "deciding"),
    [
        ("slow", "latency p50"),
        ("nan", "answers that differ"),
        pytest.param("errors", "errors", marks=pytest.mark.slow),
        pytest.param("swapped", "answers that differ", marks=pytest.mark.slow),
    ],
)
def test_each_fault_of_an_engine_fails(fault, deciding, tmp_path):
    pairs, *_ = replayed(9000 if fault == "errors" else 3000, fault)
    actual = verdict(pairs, tmp_path)
    assert actual.verdict == "FAIL" and actual.reason.startswith(deciding)


def test_an_equal_engine_passes(tmp_path):
    pairs, *_ = replayed(5000)
    assert verdict(pairs, tmp_path).verdict == "PASS"
    assert {line["size"] for line in pairs[0].lines()} == {4}, "elements of its input"


def test_an_exception_counts_as_a_failed_request():
    pairs, *_ = replayed(2000, "errors")
    failed_pairs = [pair for pair in pairs if pair.candidate.error]
    assert failed_pairs and all(pair.candidate.error == "ModelError: out of memory" for pair in failed_pairs)
    assert all(pair.difference is None and pair.candidate.output is None for pair in failed_pairs)
    assert not any(pair.baseline.error for pair in pairs)


def test_differences_of_answers_are_computed():
    ones = {"y": np.ones((1, 4), np.float32)}
    assert difference(ones, ones) == difference({"y": ones["y"].copy()}, ones)
    assert difference(ones, ones).sqnr_db == EQUAL_DB
    assert difference({"y": ones["y"] * 1.1}, ones).sqnr_db == pytest.approx(20, abs=0.01)
    nan = {"y": np.full((1, 4), np.nan, np.float32)}
    for our_nan, their_fields in ((nan, ones), (nan, nan), ({"z": ones["y"]}, ones), ({"y": ones["y"][:, :3]}, ones)):
        assert difference(our_nan, their_fields).sqnr_db == UNLIKE_DB and difference(our_nan, their_fields).flipped
    assert difference({"y": np.array([1, 2])}, {"y": np.array([1, 3])}).sqnr_db == UNLIKE_DB
    assert difference({"y": np.array([[0.0, 1.0]])}, {"y": np.array([[1.0, 0.9]])}).flipped
    assert difference({"y": np.array([np.inf])}, {"y": np.array([np.inf])}).sqnr_db == EQUAL_DB
    masked_array = np.array([[-np.inf, 1.0, 3.0]], np.float32)
    near = difference({"y": masked_array * np.float32(1.01)}, {"y": masked_array})
    assert near.sqnr_db == pytest.approx(40, abs=0.01) and not near.flipped  # a mask that both have is no difference
    for other_array in (np.where(np.isinf(masked_array), 0, masked_array), -masked_array):
        assert difference({"y": other_array}, {"y": masked_array}).sqnr_db == UNLIKE_DB
    assert digest_of_outputs(ones) != digest_of_outputs({"y": ones["y"].astype(np.float64)})
    assert digest_of_outputs(ones) != digest_of_outputs({"z": ones["y"]})
