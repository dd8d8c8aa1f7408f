"""Simulated canaries: latencies of several kinds, planted faults, and engines with a clock of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from builders.errors import ModelError
from builders.types import TensorSpec
from validation.canary.evidence import Evidence, side
from validation.canary.replay import Clock
from validation.canary.traffic import Request, Traffic

Rng = np.random.Generator
Pair = tuple[np.ndarray, np.ndarray]


def autoregressive(rng: Rng, count: int, memory: float, spread: float) -> np.ndarray:
    """AR(1), stationary."""
    steps = rng.normal(size=count) * spread * np.sqrt(1 - memory**2)
    values = np.empty(count)
    values[0] = rng.normal() * spread
    for index in range(1, count):
        values[index] = memory * values[index - 1] + steps[index]
    return values


def lognormal(rng: Rng, count: int) -> Pair:
    return np.exp(rng.normal(size=count) * 0.2), np.exp(rng.normal(size=count) * 0.2)


def heavy(rng: Rng, count: int) -> Pair:
    """Pareto tails of index 2.5: the variance is finite, the third moment is not."""
    return 1 + rng.pareto(2.5, size=count), 1 + rng.pareto(2.5, size=count)


def remembering(rng: Rng, count: int) -> Pair:
    """Correlation 0.9 from one request to the next, on each side by itself."""
    return np.exp(autoregressive(rng, count, 0.9, 0.2)), np.exp(autoregressive(rng, count, 0.9, 0.2))


def shared(rng: Rng, count: int) -> Pair:
    """What the machine does happens to both."""
    both = autoregressive(rng, count, 0.9, 0.3)
    return np.exp(both + rng.normal(size=count) * 0.05), np.exp(both + rng.normal(size=count) * 0.05)


def two_humps(rng: Rng, count: int) -> Pair:
    """3 % of the requests take three times as long."""
    humps = [np.where(rng.random(count) < 0.03, 3.0, 1.0) * np.exp(rng.normal(size=count) * 0.1) for _ in "ab"]
    return humps[0], humps[1]


KINDS: dict[str, Callable[[Rng, int], Pair]] = {
    "lognormal": lognormal,
    "heavy": heavy,
    "remembering": remembering,
    "shared": shared,
    "two humps": two_humps,
}


def pair_evidence(
    rng: Rng,
    count: int,
    kind: str = "lognormal",
    *,
    slower: float = 0.0,
    failing: float = 0.0,
    both_failing: float = 0.001,
    differing: float = 0.0,
) -> Evidence:
    """Interleaved requests; some fail on both sides, which says nothing about either."""
    ours, theirs = KINDS[kind](rng, count)
    broken = rng.random(count) < both_failing
    alone = rng.random(count) < failing
    candidate = side(ours * (1 + slower), ~(broken | alone))
    baseline = side(theirs, ~broken)
    both = candidate.ok & baseline.ok
    return Evidence(candidate, baseline, True, rng.random(int(both.sum())) < differing)


@dataclass
class Ticking:
    """A clock that only sleeping and working move."""

    seconds: float = 0.0

    def clock(self) -> Clock:
        def sleep(duration: float) -> None:
            self.seconds += duration

        return Clock(lambda: self.seconds, sleep)


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
        slow = 1.03 if self.fault == "slow" else 1.0
        self.ticking.seconds += self.seconds * slow * float(np.exp(self.rng.normal() * 0.1))
        if self.fault == "errors" and self.rng.random() < 0.005:
            raise ModelError("out of memory")
        answer = {"a": inputs["x"] * 2 + 1, "b": 1 - inputs["x"]}
        if self.fault == "swapped":
            answer = {"a": answer["b"], "b": answer["a"]}
        if self.fault == "nan":
            answer["a"] = answer["a"] * np.nan
        return answer


def traffic(count: int, gap: float = 0.05, seed: int = 0) -> Traffic:
    rng = np.random.default_rng(seed)
    inputs = [{"x": rng.normal(size=(1, 4)).astype(np.float32)} for _ in range(min(count, 50))]
    return Traffic(tuple(Request(index * gap, inputs[index % len(inputs)]) for index in range(count)), "0" * 64)


def seeds(count: int) -> Iterator[Rng]:
    return (np.random.default_rng(seed) for seed in range(count))
