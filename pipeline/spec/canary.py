"""The section `validation.canary` of a spec: what a candidate may be worse by than what is served."""

from typing import Self

from pydantic import Field, model_validator

from pipeline.spec.fields import SpecPart, as_value_error
from validation.canary.judging.thresholds import MOST_BURST, Thresholds


class CanaryQuality(SpecPart):
    """Answers of the candidate against those of the baseline; null lifts a limit."""

    sqnr_db: float = Field(15.0, description="an answer nearer than that to the baseline's counts as the same")
    disagreement: float | None = Field(0.01, gt=0, lt=1, description="share of requests with another answer")
    flips: float | None = Field(None, gt=0, lt=1, description="share of requests whose argmax differs")
    score: float | None = Field(0.01, gt=0, description="drop of the mean score, where scores are observed")
    burst: int = Field(
        1,
        ge=1,
        le=MOST_BURST,
        description="requests with another answer that come together, assumed where none was seen",
    )


class Canary(SpecPart):
    """What a candidate may be worse by, at most (docs/guides/canary.md). Null lifts a threshold."""

    latency: dict[str, float | None] = Field(
        {}, description="relative slowdown by quantile, e.g. {p50: 0.02, p99: 0.05}"
    )
    error_rate: float | None = Field(0.001, gt=0, lt=1, description="difference of the shares of failed requests")
    error_burst: int | None = Field(
        None,
        ge=1,
        le=MOST_BURST,
        description="requests that one outage fails, assumed where no error was seen; 1: one by one; "
        "null: 1 in a replay, 100 in production's logs",
    )
    quality: CanaryQuality | None = CanaryQuality()
    alpha: float = Field(0.05, gt=0, lt=0.5, description="error of a wrong verdict, each way")

    @model_validator(mode="after")
    def _known(self) -> Self:
        as_value_error(Thresholds.from_json, self.model_dump(mode="json", exclude_unset=True))
        return self
