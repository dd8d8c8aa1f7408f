"""What a candidate must not be worse by. docs/canary.md has the reason of each default."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from enginery.core.errors import InputError

MOST_BURST = 1_000_000
# Requests that an outage in production fails, where none was seen.
OUTAGE = 100
DEFAULT_LATENCY = {"p50": 0.02, "p99": 0.05}
_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)")


@dataclass(frozen=True)
class Quality:
    """sqnr_db: an output nearer to the baseline's than this counts as the same answer.  disagreement: the share of
    requests that may be answered differently.  flips: the share whose argmax may differ.  score: how much the mean
    score may drop.  None lifts a limit.  burst: how many requests that are answered differently come together, assumed
    where none was seen.
    """

    sqnr_db: float = 15.0
    disagreement: float | None = 0.01
    flips: float | None = None
    score: float | None = 0.01
    burst: int = 1


@dataclass(frozen=True)
class Thresholds:
    """latency: greatest relative slowdown by quantile.  error_rate: greatest difference of the shares of failed
    requests.  error_burst: requests that one outage fails, assumed where no error was seen; None: `burst_of` says.
    quality: None asks for no proof that the answers are still the same.  alpha: the error of a wrong
    verdict, each way.
    """

    latency: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_LATENCY))
    error_rate: float | None = 0.001
    quality: Quality | None = Quality()
    alpha: float = 0.05
    error_burst: int | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {**asdict(self), "latency": dict(self.latency)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Thresholds":
        """Read `validation.canary` of a spec: what is not given keeps its default, null lifts it. Raises InputError."""
        _known(data, ("latency", "error_rate", "error_burst", "quality", "alpha"), "")
        latency = {**DEFAULT_LATENCY, **_mapping(data.get("latency", {}), "latency")}
        quality = data.get("quality", {})
        alpha = _number(data.get("alpha", 0.05), "alpha", 0.5)
        return cls(
            {name: _number(value, f"latency.{name}") for name, value in latency.items() if _quantile(name, value)},
            _share(data.get("error_rate", 0.001), "error_rate"),
            None if quality is None else _quality(_mapping(quality, "quality")),
            alpha,
            None if data.get("error_burst") is None else _requests(data["error_burst"], "error_burst"),
        )


def burst_of(asked: int | None, replayed: bool) -> int:
    """How many errors are assumed to come together, where none was seen. asked: by a spec.

    In production an outage fails `OUTAGE` requests; in a replay there is nothing but the engine and the request.
    """
    return asked or (1 if replayed else OUTAGE)


def probability(name: str) -> float:
    """0.99 of 'p99'. Raises InputError for what is no quantile."""
    found = _QUANTILE.fullmatch(name)
    value = float(found[1]) / 100.0 if found else 0.0
    if not 0.0 < value < 1.0:
        raise InputError(f"validation.canary.latency.{name[:40]}: is no quantile; use p50, p90, p99, p99.9")
    return value


def _quantile(name: str, value: object) -> bool:
    probability(name)
    return value is not None


def _quality(data: Mapping[str, Any]) -> Quality:
    _known(data, ("sqnr_db", "disagreement", "flips", "score", "burst"), "quality.")
    sqnr = data.get("sqnr_db", 15.0)
    if type(sqnr) not in (int, float) or not math.isfinite(sqnr):
        raise InputError(f"validation.canary.quality.sqnr_db is {str(sqnr)[:40]!r}; give decibels")
    return Quality(
        float(sqnr),
        _share(data.get("disagreement", 0.01), "quality.disagreement"),
        _share(data.get("flips"), "quality.flips"),
        None if data.get("score", 0.01) is None else _number(data.get("score", 0.01), "quality.score", math.inf),
        _requests(data.get("burst", 1), "quality.burst"),
    )


def _share(value: Any, where: str) -> float | None:
    return None if value is None else _number(value, where)


def _requests(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_BURST:
        raise InputError(
            f"validation.canary.{where} is {str(value)[:40]!r}; give a number of requests from 1 to {MOST_BURST}"
        )
    return value


def _number(value: Any, where: str, most: float = 1.0) -> float:
    if type(value) not in (int, float) or not 0.0 < value < most or not math.isfinite(value):
        raise InputError(
            f"validation.canary.{where} is {str(value)[:40]!r}; give a number above 0"
            + (f" and below {most:g}" if math.isfinite(most) else "")
        )
    return float(value)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"validation.canary.{where} is {str(value)[:40]!r}; give a mapping")
    return value


def _known(data: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    if unknown := sorted(set(data) - set(names)):
        raise InputError(f"validation.canary.{where}{unknown[0][:40]} is not known; known: {', '.join(names)}")
