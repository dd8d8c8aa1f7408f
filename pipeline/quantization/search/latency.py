"""Leaves in float what int8 does not make faster, by racing engines of the whole model.

Each group that int8 has is tried: the engine with it in int8 against the one with it in float, one run each in a round,
the order changing from round to round. Whole models and not single nodes, because what a group costs depends on its
neighbours: a convolution between two integer ones needs no conversions, alone it needs two. A slow moment of the
machine hits both sides of a round, so what counts is the difference within rounds, by its median.

A group pays when it saves at least `MARGIN` of the model's time. Rounds go on until the median is `CERTAINTY` standard
errors away from that, or until `ROUNDS`. A loss counts only after `PATIENCE` rounds, and when the fastest run of either
side says so too: on a busy machine one side can be unlucky for many rounds, but hardly in its best one. What is not
clear by then stays in int8: noise drops nothing.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from onnx import ModelProto

MARGIN = 0.002
CERTAINTY = 3.0
FEWEST, PATIENCE, ROUNDS = 5, 20, 60
# Standard error of a median over the median absolute deviation, for n normal values: 1.2533 * 1.4826 / sqrt(n).
_ERROR_OF_MEDIAN = 1.2533 * 1.4826


class PairedRounds(Protocol):
    """Runs two models as engines, round by round. Yields milliseconds of (first, second) without end."""

    def __call__(self, first: ModelProto, second: ModelProto) -> Iterator[tuple[float, float]]:
        """Raises EngineryError when an engine cannot be built or run."""
        ...


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the whole model with one group in int8 and in float. saving_ms: median of the differences.

    error_ms: its standard error.  best_saving_ms: the difference of the fastest runs.
    """

    int8_ms: float
    float_ms: float
    saving_ms: float
    error_ms: float
    best_saving_ms: float
    rounds: int

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, float]]) -> "Timing":
        """From (int8, float) of each round."""
        savings = [slow - fast for fast, slow in rounds]
        saving = statistics.median(savings)
        spread = statistics.median(abs(item - saving) for item in savings)
        error = _ERROR_OF_MEDIAN * spread / math.sqrt(len(savings))
        int8, plain = (statistics.median(side) for side in zip(*rounds, strict=True))
        best = [min(side) for side in zip(*rounds, strict=True)]
        return cls(int8, plain, saving, error, best[1] - best[0], len(rounds))

    @property
    def wanted_ms(self) -> float:
        """What int8 must save."""
        return MARGIN * self.float_ms

    @property
    def lost(self) -> bool:
        """Whether int8 surely does not save what it must."""
        certain = self.wanted_ms - self.saving_ms > CERTAINTY * self.error_ms
        return certain and self.rounds >= PATIENCE and self.best_saving_ms < self.wanted_ms

    @property
    def won(self) -> bool:
        """Whether int8 surely saves what it must."""
        return self.saving_ms - self.wanted_ms > CERTAINTY * self.error_ms

    @property
    def pays(self) -> bool:
        """Whether the group stays in int8."""
        return not self.lost

    @property
    def reason(self) -> str:
        """Why the group is left in float."""
        return f"int8 is not faster here: the model takes {self.int8_ms:.3g} ms with it, {self.float_ms:.3g} ms without"


def benchmark_until_decided(rounds: Iterable[tuple[float, float]]) -> Timing:
    """Times of two engines in ms; rounds are taken until the verdict is certain, `ROUNDS` at most."""
    seen: list[tuple[float, float]] = []
    for pair in itertools.islice(rounds, ROUNDS):
        seen.append(pair)
        found = Timing.of(seen)
        if found.lost or (found.won and len(seen) >= FEWEST):
            break
    return Timing.of(seen)


def without_unpaid(
    names: Iterable[str], left: tuple[str, ...], written: Callable[[tuple[str, ...]], ModelProto], race: PairedRounds
) -> tuple[tuple[str, ...], dict[str, Timing]]:
    """Try to leave each of these groups in float too: what is left in float then, and the timing of every group.

    left: groups in float to begin with.  written: the graph with given groups in float. A group that does not pay is
    in float while the next are tried.
    """
    timings = {}
    current = written(left)
    for name in names:
        other = written((*left, name))
        timings[name] = benchmark_until_decided(race(current, other))
        if not timings[name].pays:
            left, current = (*left, name), other
    return left, timings
