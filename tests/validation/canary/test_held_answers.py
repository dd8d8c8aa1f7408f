import threading
import weakref

import numpy as np
import pytest

from enginesmith.recording.traffic import EQUAL_DB
from tests.validation.canary.virtual import Threads, Working, poisson_traffic
from validation.canary import replay
from validation.canary.replay import ReplayPace, replay_concurrently, segments

IN_FLIGHT, ANSWER, REQUESTS = 8, 1 << 16, 300
BOUND = 4 * ANSWER


class Held:
    """Bytes of arrays that anything still refers to. most: the peak."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def count(self, array: np.ndarray) -> np.ndarray:
        """The same array; its bytes count until it is freed."""
        self._add(array.nbytes)
        weakref.finalize(array, self._add, -array.nbytes)
        return array

    def _add(self, size: int) -> None:
        with self._lock:
            self.now += size
            self.most = max(self.most, self.now)


class Large(Working):
    """Answers of ANSWER bytes, times `grows` from request to request."""

    held: Held
    grows = 1

    def run(self, inputs):
        super().run(inputs)
        size = ANSWER * (1 + len(self.seen) % self.grows)
        return {"y": self.held.count(np.full(size, 7, np.uint8))}


def replayed(candidate_grows=1):
    held_answers, engines = Held(), [Large(np.random.default_rng(seed)) for seed in range(2)]
    for engine in engines:
        engine.held = held_answers
    engines[0].grows = candidate_grows
    sides = [Threads(engine, IN_FLIGHT) for engine in engines]
    traffic = poisson_traffic(REQUESTS, 0.003)
    stops = {100, 200, REQUESTS}
    pairs = list(replay_concurrently(*sides, traffic, ReplayPace(in_flight=IN_FLIGHT), IN_FLIGHT, stops))
    return held_answers, pairs, sides


@pytest.fixture(autouse=True)
def bound(monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", BOUND, raising=False)


def test_held_answers_are_bounded_and_every_request_is_compared_once():
    answers, pairs, sides = replayed()
    assert answers.most <= 2 * (BOUND + IN_FLIGHT * ANSWER), f"{answers.most / ANSWER:.0f} answers were held at once"
    assert answers.now <= 2 * ANSWER, "and next to none when it is over"
    assert [pair.request for pair in pairs] == list(range(REQUESTS))
    assert all(pair.difference.sqnr_db == EQUAL_DB and pair.candidate.output for pair in pairs)
    planned_segments = list(segments(REQUESTS, IN_FLIGHT, {100, 200, REQUESTS}))
    assert len(sides[0].sent) > len(planned_segments), "a segment that would hold more ends early"


def test_small_answers_cause_no_cut(monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", 100 * BOUND)
    _, _, sides = replayed()
    assert len(sides[0].sent) == len(list(segments(REQUESTS, IN_FLIGHT, {100, 200, REQUESTS})))


def test_sides_with_answers_of_different_sizes_are_each_bounded():
    held_answers, pairs, _ = replayed(candidate_grows=4)
    assert held_answers.most <= 2 * BOUND + IN_FLIGHT * ANSWER * 5
    assert [pair.request for pair in pairs] == list(range(REQUESTS))
