"""The margins by which a candidate may be worse; docs/guides/canary.md has the reason of each default."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from enginesmith.core.errors import InputError

# Greatest number that is taken; JSON may hold integers above every float.
MOST_NUMBER = 1e300

# Margins of slowdown, as shares: of the median, and of a tail that varies more.
DEFAULT_LATENCY = {"p50": 0.02, "p99": 0.05}

_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)")


@dataclass(frozen=True)
class QualityThresholds:
    """Margins of the answers' quality; None lifts one.

    sqnr_db: an answer with this SQNR or more against the baseline's counts as equal.  disagreement: the share of
    answers that may differ; 'noise': as many as the distance of most answers explains, within NOISE.
    flips: the share whose argmax may differ.  score: how much the mean score may drop.
    """

    sqnr_db: float = 15.0
    disagreement: float | Literal["noise"] | None = "noise"
    flips: float | None = None
    score: float | None = 0.01


@dataclass(frozen=True)
class Thresholds:
    """All margins of a canary, as `validation.canary` of a spec has them.

    latency: greatest relative slowdown by quantile.  error_rate: greatest difference of the shares of failed requests.
    error_budget: share of failed requests up to which a candidate passes, whatever the difference is.
    quality: None compares no answers.  alpha: the probability of a wrong PASS, and of a wrong FAIL.
    """

    latency: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_LATENCY))
    error_rate: float | None = 0.001
    quality: QualityThresholds | None = QualityThresholds()
    alpha: float = 0.05
    error_budget: float | None = 0.002

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "Thresholds":
        """Read `validation.canary` of a spec. What is not given keeps its default; null lifts it. Raises InputError."""
        _check_names(data, ("latency", "error_rate", "error_budget", "quality", "alpha"), "")
        latency = {**DEFAULT_LATENCY, **_read_mapping(data.get("latency", {}), "latency")}
        quality = data.get("quality", {})
        alpha = _number(data.get("alpha", 0.05), "alpha", 0.5)
        return cls(
            {
                name: _number(value, f"latency.{name}")
                for name, value in latency.items()
                if probability(name) and value is not None
            },
            _optional(data.get("error_rate", 0.001), "error_rate"),
            None if quality is None else _quality(_read_mapping(quality, "quality")),
            alpha,
            _optional(data.get("error_budget", 0.002), "error_budget"),
        )


def probability(name: str) -> float:
    """0.99 from 'p99'. Raises InputError for other names."""
    match = _QUANTILE.fullmatch(name)
    value = float(match[1]) / 100.0 if match else 0.0
    if not 0.0 < value < 1.0:
        raise InputError(f"validation.canary.latency.{name[:40]}: is no quantile; use p50, p90, p99, p99.9")
    return value


def _quality(data: Mapping[str, object]) -> QualityThresholds:
    _check_names(data, ("sqnr_db", "disagreement", "flips", "score"), "quality.")
    sqnr = data.get("sqnr_db", 15.0)
    if isinstance(sqnr, bool) or not isinstance(sqnr, int | float) or not abs(sqnr) < MOST_NUMBER:
        raise InputError(f"validation.canary.quality.sqnr_db is {str(sqnr)[:40]!r}; give decibels")
    return QualityThresholds(
        float(sqnr),
        "noise"
        if (share := data.get("disagreement", "noise")) == "noise"
        else _optional(share, "quality.disagreement"),
        _optional(data.get("flips"), "quality.flips"),
        _optional(data.get("score", 0.01), "quality.score", math.inf),
    )


def _optional(value: object, key: str, limit: float = 1.0) -> float | None:
    return None if value is None else _number(value, key, limit)


def _number(value: object, key: str, limit: float = 1.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < min(limit, MOST_NUMBER):
        raise InputError(
            f"validation.canary.{key} is {str(value)[:40]!r}; give a number above 0"
            + (f" and below {limit:g}" if math.isfinite(limit) else "")
        )
    return float(value)


def _read_mapping(value: object, prefix: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"validation.canary.{prefix} is {str(value)[:40]!r}; give a mapping")
    return value


def _check_names(data: Mapping[str, object], names: tuple[str, ...], prefix: str) -> None:
    if unknown := sorted(set(data) - set(names)):
        raise InputError(f"validation.canary.{prefix}{unknown[0][:40]} is not known; known: {', '.join(names)}")
