"""Where the level of a series of latencies changed, by ruptures (docs/decisions/0018-change-points.md).

The series is segmented by the least sum of squares around the segments' means, with a penalty for each change (Killick,
Fearnhead & Eckley, "Optimal detection of changepoints with a linear computational cost", JASA 107, 2012; ruptures'
KernelCPD with a linear kernel, in C). It is run on logarithms in units of their own noise, so that the penalty is the
square of the least z that a change must have: PENALTY is chosen for a series that is looked at after every point, all
year (`python -m benchmarks.bench_trend`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array

# Points of a level at least, so that single slow days are none; and of a series before it says anything.
LEAST_LEVEL, LEAST_POINTS = 4, 12
PENALTY = 27.0
# Of few points the noise is known badly: the penalty is higher by the square of this number over theirs.
_FEW = 20.0
# How far a point counts from the middle of its neighbours, in units of the noise, and how many those are.
_CLIP, _NEIGHBOURS = 3.0, 9
# The smallest noise that is believed, as a share: clocks and rounding are not better.
_LEAST_NOISE = 1e-3
# The greatest difference of neighbours that counts for the noise, in units of it: a step of the level is larger.
_FAR = 5.0
# The standard deviation of normal noise over the median of its absolute differences from one point to the next.
_MAD = 1 / (0.6744897501960817 * math.sqrt(2))


@dataclass(frozen=True)
class LevelChange:
    """A change of the level. index: of the first point after it.  ratio: of the levels, after over before.

    z: how many standard errors that is.  before, after: the levels, in the units of the series.
    """

    index: int
    ratio: float
    z: float
    before: float
    after: float


def find_changes(values: Sequence[float], penalty: float = PENALTY) -> list[LevelChange]:
    """The changes of level of a series of positive numbers, oldest first; none of fewer than LEAST_POINTS.

    Raises ModuleNotFoundError without ruptures (extra `trend`).
    """
    from ruptures import KernelCPD

    if len(values) < LEAST_POINTS:
        return []
    logs = np.log(np.asarray(values, dtype=float))
    noise = noise_of(logs)
    clipped = clip(logs, noise) / noise
    detector = KernelCPD(kernel="linear", min_size=LEAST_LEVEL)
    ends = detector.fit(clipped.reshape(-1, 1)).predict(pen=penalty * (1 + (_FEW / len(values)) ** 2))
    edges = [0, *ends]
    return [
        _change(logs, noise, edges[index - 1], edges[index], edges[index + 1]) for index in range(1, len(edges) - 1)
    ]


def noise_of(logs: Array) -> float:
    """The standard deviation of a point ([n], logarithms), from differences of neighbours, which a change of level
    touches once; those beyond _FAR times their usual size count as that."""
    steps = np.abs(np.diff(logs))
    usual = max(float(np.median(steps)) * _MAD, _LEAST_NOISE)
    return max(float(np.sqrt(np.mean(np.minimum(steps, _FAR * usual) ** 2) / 2)), usual)


def clip(logs: Array, noise: float) -> Array:
    """The series with each point at most _CLIP times the noise from the median of the _NEIGHBOURS points around it; at
    both ends from that of the last so many, so that a slow last day is not its own neighbour."""
    half = _NEIGHBOURS // 2
    middles = np.sort(np.lib.stride_tricks.sliding_window_view(logs, _NEIGHBOURS), axis=1)[:, half]
    middles = np.concatenate([middles[:1].repeat(half), middles, middles[-1:].repeat(half)])
    clipped: Array = np.clip(logs, middles - _CLIP * noise, middles + _CLIP * noise)
    return clipped


def _change(logs: Array, noise: float, start: int, index: int, end: int) -> LevelChange:
    before, after = float(np.median(logs[start:index])), float(np.median(logs[index:end]))
    error = noise * math.sqrt(1 / (index - start) + 1 / (end - index))
    return LevelChange(
        int(index), math.exp(after - before), (after - before) / error, math.exp(before), math.exp(after)
    )
