"""What two engines took that were run in turns. Plain values, as `report` has them; standard library only."""

from dataclasses import dataclass
from typing import Literal

from enginery.core.reports.latency import SystemLoad

Verdict = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True)
class Ratio:
    """A quantile of the first over that of the second, with its 95 % interval; None where there are too few runs.

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
    """verdict: on the first engine, by the median.  medians_s: of both.  runs: of each."""

    verdict: Verdict
    ratios: tuple[Ratio, ...]
    medians_s: tuple[float, float]
    runs: int
    openings: int


@dataclass(frozen=True, kw_only=True)
class PairedBenchmark(PairedTimes):
    """What two engines took in turns at one bucket of so many items. seed: of the order."""

    bucket: str
    items: int
    seed: int
    surroundings: SystemLoad
