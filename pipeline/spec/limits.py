"""What counts as the same function: golden set, task metric, limits."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from enginery.core.types import Precision
from pipeline.spec.canary import Canary
from pipeline.spec.contract import Contract
from pipeline.spec.fields import File, Mistakes, SpecPart, off


class Metric(SpecPart):
    """A task metric over the golden set, with the lowest value that passes."""

    name: Literal["accuracy"] = "accuracy"
    output: str = Field(description="the output whose argmax over the last axis is the predicted class")
    floor: float = Field(ge=0, le=1, description="lowest value that passes, e.g. 0.95")


class Golden(SpecPart):
    """Real inputs with which every engine is proven. Expected outputs come from the source model itself."""

    data: File
    labels: str | None = Field(None, description="name of the array of class indices in the data file")
    metric: Metric | None = None
    frozen: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="digest of the golden set: a build that would make another one fails; `enginery golden accept`",
    )

    @model_validator(mode="after")
    def _labelled(self) -> Self:
        if self.metric and not self.labels:
            raise Mistakes([(("metric",), f"metric {self.metric.name} needs labels; name the array that holds them")])
        return self


class LimitValues(SpecPart):
    """Limits of one stage. What is not given keeps its documented default (docs/concepts/validation.md); null lifts a
    limit.
    """

    max_abs: float | None = Field(None, ge=0)
    max_rel: float | None = Field(None, ge=0)
    sqnr_db: float | None = None
    centered_sqnr_db: float | None = None
    slice_sqnr_db: float | None = None
    quartile_sqnr_db: float | None = None
    cosine: float | None = Field(None, ge=-1, le=1)
    argmax_agreement: float | None = Field(None, ge=0, le=1)


class StageLimits(SpecPart):
    """Limits of one precision at the three stages."""

    export: LimitValues = LimitValues()
    quantization: LimitValues = LimitValues()
    engine: LimitValues = LimitValues()


class Latency(SpecPart):
    """How long the engines that run here are timed after they are proven (docs/concepts/latency.md)."""

    seconds: float = Field(0.1, gt=0, le=600, description="for each bucket")
    buckets: Literal["few", "all"] = Field(
        "few", description="few: every dim at its least, at opt and at its most; all: both ends of every bucket"
    )


class Calls(SpecPart):
    """Sizes and repeated calls that an engine is tried with beside its golden set (docs/concepts/validation.md)."""

    seconds: float | None = Field(
        None, gt=0, le=86400, description="for each engine; null: a tenth of what the comparison with its graph took"
    )


def _unless_off(value: object) -> object:
    return None if off(value) == "off" else value


class Validation(SpecPart):
    """What counts as the same function, and what a canary tolerates."""

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
