"""Replay with several requests in flight, on virtual time: when requests go out, how many at once, what is found."""

from itertools import pairwise

import numpy as np
import pytest

from tests.validation.canary.simulated import Ticking
from tests.validation.canary.test_replay import observed
from tests.validation.canary.virtual import Threads, Working, poisson_traffic
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Thresholds
from validation.canary.replay import (
    LEAST_TURNOVERS,
    ReplayPace,
    TrafficSegment,
    peak,
    replay,
    replay_concurrently,
    segments,
)

LATENCY = Thresholds(error_rate=None, quality=None)


def working(seed, **kind):
    return Working(np.random.default_rng(seed), **kind)


def replayed(traffic, candidate, in_flight=4, pace=None, stops=()):
    sides = Threads(candidate, in_flight), Threads(working(1000), in_flight)
    return list(replay_concurrently(*sides, traffic, pace or ReplayPace(), in_flight, stops)), *sides


def judged(pairs, tmp_path):
    evidence, _ = evidence_of(*observed(pairs, tmp_path), 15.0)
    return judge(evidence, LATENCY, replicates=200)


def test_requests_are_sent_on_time_while_earlier_ones_are_pending():
    arrivals = [0.0, 0.001, 0.002, 0.003, 0.5, 0.501]
    engine = working(0, seconds=0.1)
    result = Threads(engine, 8).serve_segment(TrafficSegment(arrivals, [{"x": np.ones((1, 4), np.float32)}] * 6))
    assert [time_s for time_s, _ in engine.seen] == pytest.approx(arrivals)
    assert [running_count for _, running_count in engine.seen] == [1, 2, 3, 4, 1, 2]
    assert all(0.05 < item.latency < 0.2 and item.latency == pytest.approx(item.served.service) for item in result)


def test_at_most_the_recorded_number_is_in_flight_and_waiting_counts():
    engine = working(0, seconds=0.1)
    result = Threads(engine, 2).serve_segment(TrafficSegment([0.0, 0.001, 0.002, 0.003], [{"x": np.ones((1, 4))}] * 4))
    assert max(running_count for _, running_count in engine.seen) == 2
    assert result[2].latency > 1.5 * result[2].served.service and result[0].latency == pytest.approx(
        result[0].served.service
    )


def test_a_factor_makes_traffic_denser_for_both_sides():
    traffic = poisson_traffic(400, 0.01)
    pairs, our_replay, their_replay = replayed(traffic, working(0), pace=ReplayPace(scale=2.0))
    assert [pair.at for pair in pairs] == pytest.approx([request.at / 2 for request in traffic.requests])
    assert [pair.request for pair in pairs] == list(range(400)) and our_replay.sent == their_replay.sent
    gaps = np.diff([request.at for request in traffic.requests])
    assert np.diff(our_replay.sent[0]) == pytest.approx(gaps[: len(our_replay.sent[0]) - 1] / 2)


def test_sides_alternate_in_a_random_balanced_order():
    pairs, our_replay, _ = replayed(poisson_traffic(600, 0.01), working(0), in_flight=2)
    firsts = [next(pair.first for pair in pairs if pair.request >= start) for start, _ in bounds(pairs, 2)]
    assert len(firsts) == len(our_replay.sent) >= 40
    assert all(a != b for a, b in zip(firsts[::2], firsts[1::2], strict=False)), "each two have opposite orders"
    assert len(set(firsts[::2])) == 2, "which is drawn"


def bounds(pairs, in_flight, stops=()):
    return list(segments(len(pairs), in_flight, stops))


def test_segments_cover_the_traffic_and_keep_the_queue():
    actual = list(segments(1000, 4, {250, 500, 750, 1000}))
    assert actual[0][0] == 0 and actual[-1][1] == 1000 and all(a[1] == b[0] for a, b in pairwise(actual))
    assert {250, 500, 750} <= {stop for _, stop in actual} and min(
        stop - start for start, stop in actual
    ) >= 4 * LEAST_TURNOVERS
    assert all(len(actual) % 2 == 0 for actual in ([*segments(count, 3)] for count in range(12, 200))), "in twos"
    assert list(segments(15, 4)) == [(0, 15)] and list(segments(1, 4)) == [(0, 1)]
    pairs, our_replay, _ = replayed(poisson_traffic(300, 0.01), working(0))
    cut_bounds = bounds(pairs, 4)
    assert [len(part) for part in our_replay.sent] == [stop - start + min(start, 4) for start, stop in cut_bounds]


def test_the_maximum_in_flight_is_computed():
    assert peak([], []) == 0
    assert peak([0, 1, 2], [1, 1, 1]) == 1, "the end of one is not during the next"
    assert peak([0, 0.5, 0.6, 5], [1, 1, 1, 1]) == 3


def test_a_lock_is_detected_only_in_flight(tmp_path):
    """A candidate that takes as long for a request, but one at a time where the baseline takes several."""
    traffic = poisson_traffic(1200, 0.015)
    ticking_clock = Ticking()
    ticking_clock.sleep = ticking_clock.clock().sleep
    single_engine = [working(0, locked=True, time=ticking_clock), working(1000, time=ticking_clock)]
    one_by_one = judged(replay(*single_engine, traffic, ReplayPace(), ticking_clock.clock()), tmp_path)
    assert one_by_one.verdict != "FAIL" and abs(one_by_one.criteria[0].estimate) < 0.01
    pairs, _, their_replay = replayed(traffic, working(0, locked=True))
    assert max(running_count for _, running_count in their_replay.engine.seen) >= 3
    result = judged(pairs, tmp_path)
    assert result.verdict == "FAIL" and result.criteria[0].estimate > 0.1


@pytest.mark.slow
def test_equal_engines_in_flight_do_not_fail(tmp_path):
    pairs, *_ = replayed(poisson_traffic(1200, 0.015), working(0))
    result = judged(pairs, tmp_path)
    assert result.verdict != "FAIL" and abs(result.criteria[0].estimate or 0.0) < 0.04
