"""The margins by which a candidate may be worse; docs/guides/canary.md has the reason of each default."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt, Interval

from enginesmith.core.codec import decode
from enginesmith.core.errors import InputError
from enginesmith.core.parsing import Malformed

# Margins of slowdown, as shares: for the median, and for the tail, which varies more.
DEFAULT_LATENCY = {"p50": 0.02, "p99": 0.05}

_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)")
# JSON may have integers that are greater than every float.
_MOST_NUMBER = 1e300
_Margin = Annotated[float, Interval(gt=0, lt=1)]


@dataclass(frozen=True)
class QualityThresholds:
    """Margins of the answers' quality; None lifts a margin.

    sqnr_db: an answer with at least this SQNR against the baseline's counts as equal.  disagreement: the share of
    answers that may differ; 'noise': the share that follows from the distance of most answers, within NOISE.
    flips: the share whose argmax may differ.  score: the greatest drop of the mean score.
    """

    sqnr_db: Annotated[float, Interval(gt=-_MOST_NUMBER, lt=_MOST_NUMBER)] = 15.0
    disagreement: _Margin | Literal["noise"] | None = "noise"
    flips: _Margin | None = None
    score: Annotated[float, Interval(gt=0, lt=_MOST_NUMBER)] | None = 0.01


@dataclass(frozen=True)
class Thresholds:
    """All margins of a canary: `validation.canary` of a spec.

    latency: greatest relative slowdown by quantile; below 1 in a spec, but callers in Python may allow more.
    error_rate: greatest difference of the shares of failed requests.
    error_budget: share of failed requests up to which a candidate passes, whatever the difference is.
    quality: None compares no answers.  alpha: the probability of a wrong PASS, and of a wrong FAIL.
    """

    latency: Mapping[str, Annotated[float, Gt(0)]] = field(default_factory=lambda: dict(DEFAULT_LATENCY))
    error_rate: _Margin | None = 0.001
    quality: QualityThresholds | None = QualityThresholds()
    alpha: Annotated[float, Interval(gt=0, lt=0.5)] = 0.05
    error_budget: _Margin | None = 0.002

    def check_fields(self) -> None:
        """Raise InputError for a latency that is no quantile."""
        for name in self.latency:
            probability(name)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "Thresholds":
        """Read `validation.canary` of a spec. A missing margin keeps its default; null lifts it. Raises InputError."""
        latency = data.get("latency", {})
        if isinstance(latency, Mapping):
            margins = {**DEFAULT_LATENCY, **latency}
            latency = {name: margin for name, margin in margins.items() if margin is not None}
        try:
            thresholds = decode({**data, "latency": latency}, cls, "validation.canary")
        except Malformed as error:
            raise InputError(str(error)) from error
        for name, margin in thresholds.latency.items():
            if margin >= 1:
                raise InputError(f"validation.canary.latency.{name} is {margin:g}; it must be a number below 1")
        return thresholds


def probability(name: str) -> float:
    """The probability of a quantile's name: 0.99 from 'p99'. Raises InputError for other names."""
    match = _QUANTILE.fullmatch(name)
    value = float(match[1]) / 100.0 if match else 0.0
    if not 0.0 < value < 1.0:
        raise InputError(f"latency.{name[:40]} is not a quantile; use p50, p90, p99, p99.9")
    return value
