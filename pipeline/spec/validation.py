"""The section `validation` of a spec: limits, contract, canary."""

from typing import TYPE_CHECKING, Annotated, Literal, Self, get_type_hints

from pydantic import BeforeValidator, Field, create_model, model_validator

from enginesmith.core.types import Precision
from pipeline.spec.source import SpecPart, as_value_error, off
from validation.canary.judging.thresholds import Thresholds
from validation.contracts.terms import Contract
from validation.limits.terms import Budget


class CanaryQuality(SpecPart):
    """Limits of the difference between the candidate's and the baseline's answers; null lifts a limit."""

    sqnr_db: float = Field(15.0, description="an answer nearer than that to the baseline's counts as the same")
    disagreement: Annotated[float, Field(gt=0, lt=1)] | Literal["noise"] | None = Field(
        "noise",
        description="share of requests with another answer; noise: as many as the distance of most answers explains, "
        "0.2 % at least and 1 % at most",
    )
    flips: float | None = Field(None, gt=0, lt=1, description="share of requests whose argmax differs")
    score: float | None = Field(0.01, gt=0, description="drop of the mean score, where scores are observed")


class Canary(SpecPart):
    """By how much a candidate may be worse at most (docs/guides/canary.md). Null lifts a threshold."""

    latency: dict[str, float | None] = Field(
        {}, description="relative slowdown by quantile, e.g. {p50: 0.02, p99: 0.05}"
    )
    error_rate: float | None = Field(0.001, gt=0, lt=1, description="difference of the shares of failed requests")
    error_budget: float | None = Field(
        0.002,
        gt=0,
        lt=1,
        description="share of failed requests up to which a candidate passes, whatever the difference",
    )
    quality: CanaryQuality | None = CanaryQuality()
    alpha: float = Field(0.05, gt=0, lt=0.5, description="error of a wrong verdict, each way")

    @model_validator(mode="after")
    def _known(self) -> Self:
        as_value_error(Thresholds.from_json, self.model_dump(mode="json", exclude_unset=True))
        return self


class _LimitValues(SpecPart):
    """Limits of one stage. A missing limit has its documented default (docs/concepts/validation.md); null lifts a
    limit.
    """


if TYPE_CHECKING:
    LimitValues = _LimitValues
else:
    # The metrics of drift, each with the limit that `Budget` declares for it.
    LimitValues = create_model(
        "LimitValues",
        __base__=_LimitValues,
        __doc__=_LimitValues.__doc__,
        **{name: (kind, None) for name, kind in get_type_hints(Budget, include_extras=True).items()},
    )


class EnsembleLimits(SpecPart):
    """Limits of one precision at the two stages of an ensemble."""

    quantization: LimitValues = LimitValues()
    engine: LimitValues = LimitValues()


class StageLimits(EnsembleLimits):
    """Limits of one precision at the three stages."""

    export: LimitValues = LimitValues()


class Latency(SpecPart):
    """How long the engines that run here are timed after they are proven (docs/concepts/latency.md)."""

    seconds: float = Field(0.1, gt=0, le=600, description="for each bucket")
    buckets: Literal["few", "all"] = Field(
        "few", description="few: every dim at its least, at opt and at its most; all: both ends of every bucket"
    )


class Calls(SpecPart):
    """Trials of an engine besides its golden set: other sizes and repeated calls (docs/concepts/validation.md)."""

    seconds: float | None = Field(None, gt=0, le=86400, description="for each engine; null: by number and CPU time")


def _unless_off(value: object) -> object:
    return None if off(value) == "off" else value


class Validation(SpecPart):
    """The limits within which an engine counts as the same function, and the limits of a canary."""

    limits: dict[Precision, StageLimits] = Field({})
    attribution: Annotated[Literal["automatic", "off"], BeforeValidator(off)] = Field(
        "automatic", description="whether a build that fails a check says which node drifted, which takes its time"
    )
    contract: Contract = Contract()
    canary: Canary = Canary()
    calls: Annotated[Calls | None, BeforeValidator(_unless_off)] = Field(
        Calls(), description="null or off: nothing is tried beside the golden set"
    )
    latency: Annotated[Latency | None, BeforeValidator(_unless_off)] = Field(
        Latency(), description="null or off: engines are not timed"
    )

    def limits_for(self, precision: Precision, stage: Literal["export", "quantization", "engine"]) -> dict[str, float]:
        """The limits that a spec sets for a precision at a stage, by metric; they replace the default ones."""
        limits: LimitValues = getattr(self.limits.get(precision, StageLimits()), stage)
        return limits.model_dump(exclude_unset=True)
