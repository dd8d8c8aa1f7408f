"""Simulated canaries: latencies of several kinds, planted faults, and engines with a clock of their own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enginesmith.core.errors import ModelError
from enginesmith.core.types import TensorSpec
from enginesmith.recording.traffic import RecordedRequest, RecordedTraffic
from tests.validation.canary.latencies import KINDS, Rng
from tests.validation.canary.sides import side
from validation.canary.replay import ReplayClock
from validation.statistics.rates import CanaryEvidence


def pair_evidence(
    rng: Rng,
    count: int,
    kind: str = "lognormal",
    *,
    slower: float = 0.0,
    failing: float = 0.0,
    both_failing: float = 0.001,
    differing: float = 0.0,
) -> CanaryEvidence:
    """Interleaved requests; some fail on both sides, which says nothing about either."""
    our_series, their_series = KINDS[kind](rng, count)
    is_broken = rng.random(count) < both_failing
    is_alone = rng.random(count) < failing
    candidate = side(our_series * (1 + slower), ~(is_broken | is_alone))
    baseline = side(their_series, ~is_broken)
    both_mask = candidate.ok & baseline.ok
    return CanaryEvidence(candidate, baseline, True, rng.random(int(both_mask.sum())) < differing)


@dataclass
class Ticking:
    """A clock that only sleeping and working move."""

    seconds: float = 0.0

    def clock(self) -> ReplayClock:
        def sleep(duration: float) -> None:
            self.seconds += duration

        return ReplayClock(lambda: self.seconds, sleep)


@dataclass
class Engine:
    """A session that takes the time it is told to. fault: 'slow' (3 %), 'errors' (0.5 %), 'swapped' answers, 'nan'."""

    ticking: Ticking
    rng: Rng
    fault: str = ""
    seconds: float = 0.01
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "float32", ("batch", 4)),)
    outputs: tuple[TensorSpec, ...] = (
        TensorSpec("a", "float32", ("batch", 4)),
        TensorSpec("b", "float32", ("batch", 4)),
    )
    seen: list[float] = field(default_factory=list)

    def run(self, inputs: Any) -> dict[str, np.ndarray]:
        self.seen.append(self.ticking.seconds)
        slow_value = 1.03 if self.fault == "slow" else 1.0
        self.ticking.seconds += self.seconds * slow_value * float(np.exp(self.rng.normal() * 0.1))
        if self.fault == "errors" and self.rng.random() < 0.005:
            raise ModelError("out of memory")
        answer = {"a": inputs["x"] * 2 + 1, "b": 1 - inputs["x"]}
        if self.fault == "swapped":
            answer = {"a": answer["b"], "b": answer["a"]}
        if self.fault == "nan":
            answer["a"] = answer["a"] * np.nan
        return answer


def traffic(count: int, gap: float = 0.05, seed: int = 0) -> RecordedTraffic:
    rng = np.random.default_rng(seed)
    inputs = [{"x": rng.normal(size=(1, 4)).astype(np.float32)} for _ in range(min(count, 50))]
    return RecordedTraffic(
        tuple(RecordedRequest(index * gap, inputs[index % len(inputs)]) for index in range(count)), "0" * 64
    )


def seeds(count: int) -> Iterator[Rng]:
    return (np.random.default_rng(seed) for seed in range(count))
