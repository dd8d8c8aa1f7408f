"""The result of a paired benchmark: two engines run alternately. Plain values; standard library only."""

from dataclasses import dataclass
from typing import Literal

from enginery.core.reports.latency import SystemLoad

Verdict = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True)
class Ratio:
    """The p-quantile of the first engine over that of the second, with its 95 % interval; None with too few runs.

    detectable: the smallest difference, as a share, that this much data would have shown with a probability of 0.8.
    """

    p: float
    ratio: float | None
    low: float | None
    high: float | None
    detectable: float | None
    note: str = ""


@dataclass(frozen=True)
class PairedTimes:
    """The times of two engines that were run alternately. verdict: on the first engine, by the median.  medians_s: of
    both, in seconds.  runs: of each.  openings: sessions opened of each."""

    verdict: Verdict
    ratios: tuple[Ratio, ...]
    medians_s: tuple[float, float]
    runs: int
    openings: int


@dataclass(frozen=True, kw_only=True)
class PairedBenchmark(PairedTimes):
    """The paired times of two engines at one bucket. items: per run.  seed: of the random order."""

    bucket: str
    items: int
    seed: int
    surroundings: SystemLoad
