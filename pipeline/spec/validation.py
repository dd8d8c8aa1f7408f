"""The section `validation` of a spec: limits, contract, canary."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from enginesmith.core.types import Precision
from pipeline.spec.source import GraphName, SpecPart, as_value_error, off
from validation.canary.judging.criteria import Thresholds
from validation.comparison.tasks import ALPHA, BRIER, DRAWS, ECE, FLIPS, JS, KL, TOP_K


class CanaryQuality(SpecPart):
    """Answers of the candidate against those of the baseline; null lifts a limit."""

    sqnr_db: float = Field(15.0, description="an answer nearer than that to the baseline's counts as the same")
    disagreement: Annotated[float, Field(gt=0, lt=1)] | Literal["noise"] | None = Field(
        "noise",
        description="share of requests with another answer; noise: as many as the distance of most answers explains, "
        "0.2 % at least and 1 % at most",
    )
    flips: float | None = Field(None, gt=0, lt=1, description="share of requests whose argmax differs")
    score: float | None = Field(0.01, gt=0, description="drop of the mean score, where scores are observed")


class Canary(SpecPart):
    """What a candidate may be worse by, at most (docs/guides/canary.md). Null lifts a threshold."""

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


DTypeName = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"
]


class Bitwise(SpecPart):
    """The same inputs give the same bits. A sample's place in a batch is held to the limits, unless named here."""

    runs: int = Field(3, ge=2, le=1000, description="how often each case runs")
    position: bool = Field(False, description="the same bits wherever a sample lies in a batch")
    size: bool = Field(False, description="the same bits whatever the size of the batch")


class Boxes(SpecPart):
    """Boxes (.., n, 4) are the graph's: matched within a class by intersection over union, in any order."""

    form: Literal["xyxy", "xywh", "cxcywh"] = "xyxy"
    classes: GraphName | None = Field(None, description="the output (.., n) with each box's class; default: one class")
    scores: GraphName | None = Field(None, description="the output (.., n) with each box's score")
    iou: float = Field(0.9, gt=0, le=1, description="least overlap of two boxes that match")
    matched: float = Field(0.99, gt=0, le=1, description="least share of the boxes of both sides that match")
    score: float | None = Field(None, ge=0, description="greatest difference of the scores of two that match")
    least_score: float = Field(0, description="boxes below it do not count; needs scores")

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if self.scores is None and (self.score is not None or self.least_score):
            raise ValueError("score and least_score need to know the scores; name their output in scores")
        return self


class Sequence(SpecPart):
    """Sequences are the graph's: their first tokens, or all but a share of edits."""

    until: int | None = Field(None, description="token id: what follows its first place is free")
    first: int | None = Field(None, ge=1, description="so many tokens are equal, or all up to `until`")
    edits: float | None = Field(
        None, ge=0, lt=1, description="insertions, deletions, replacements: share of the length"
    )

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if self.first is None and self.edits is None:
            raise ValueError("asks for nothing; give first: COUNT or edits: SHARE (or equal_until: TOKEN instead)")
        return self


class End(SpecPart):
    """Sequences end where the graph's do."""

    token: int = Field(description="token id of the end")
    apart: int | None = Field(0, ge=0, description="places by which the ends may differ; null: any")
    pad: int | None = Field(None, description="token id that fills the rest")


class Structure(SpecPart):
    """What one output must be, in every case of the golden set. What is not given is not asked for."""

    finite: Literal[True] | None = Field(None, description="no NaN and no infinity")
    range: tuple[float | None, float | None] | None = Field(None, description="[least, greatest]; null is no end")
    sums_to_one: float | None = Field(None, ge=0, description="how far sums over the last axis may be from 1")
    unit_norm: float | None = Field(None, ge=0, description="how far norms over the last axis may be from 1")
    sorted: Literal["ascending", "descending", "strictly ascending", "strictly descending"] | None = None
    shape: tuple[int | str, ...] | None = Field(None, description="sizes, and names of dims")
    dtype: DTypeName | None = None
    equal_until: int | None = Field(None, description="token id: sequences equal the graph's up to its first one")
    sequence: Sequence | None = None
    eos: End | None = None
    boxes: Boxes | None = None

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError("asks for nothing; name a predicate, such as finite: true")
        if self.range is not None and None not in self.range and self.range[0] > self.range[1]:  # type: ignore[operator]
            raise ValueError("range: the least value comes first")
        if self.shape is not None and any(isinstance(size, int) and size < 0 for size in self.shape):
            raise ValueError("shape: sizes are 0 or more; name a dim where any size is right")
        if self.boxes is not None and self.shape is not None and self.shape[-1:] != (4,):
            raise ValueError(f"boxes: lie along a last axis of 4, and shape ends in {self.shape[-1:]}")
        return self


class Rows(SpecPart):
    """The last axis holds a distribution that is the original model's. Null lifts a limit
    (docs/concepts/validation.md).
    """

    values: Literal["logits", "probabilities"] = "logits"
    kl: float | None = Field(KL, ge=0, description="mean Kullback-Leibler divergence, nats")
    js: float | None = Field(JS, ge=0, le=0.7, description="Jensen-Shannon divergence of the worst row, nats")
    flips: float | None = Field(FLIPS, ge=0, le=1, description="share of rows with another decision")
    top_k: float | None = Field(TOP_K, ge=0, le=1, description="share of the five likeliest that are others")
    ece: float | None = Field(ECE, ge=0, le=1, description="difference of the expected calibration error")
    brier: float | None = Field(BRIER, ge=0, le=2, description="difference of the Brier score")

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if all(value is None for value in self.model_dump(exclude={"values"}).values()):
            raise ValueError("asks for nothing; leave one limit that is not null")
        return self


class Seeds(SpecPart):
    """Draws of a stochastic model come from the graph's distribution: a two-sample test per output."""

    outputs: tuple[GraphName, ...] = Field(min_length=1)
    vary: GraphName | None = Field(
        None, description="the input that is a seed or noise; null: runs differ by themselves"
    )
    draws: int = Field(DRAWS, ge=20, le=2000, description="of each side")
    alpha: float = Field(ALPHA, ge=1e-5, lt=0.5, description="rate of false alarms, over all outputs together")


class Distributional(SpecPart):
    """Outputs as distributions: along the last axis, and over seeds."""

    rows: dict[GraphName, Rows] = Field({}, description="by output")
    seeds: Seeds | None = None

    @model_validator(mode="before")
    @classmethod
    def _asks(cls, data: object) -> object:
        if isinstance(data, dict) and not data:
            raise ValueError("asks for nothing; name outputs under rows, or seeds")
        return data


class Contract(SpecPart):
    """Checked on every engine that runs; one that breaks it has failed (docs/concepts/validation.md)."""

    bitwise: Bitwise | None = None
    structured: dict[GraphName, Structure] = Field({}, description="by output")
    distributional: Distributional | None = None

    def outputs(self) -> list[tuple[tuple[str, ...], str]]:
        """(path of the key below the contract, output) for each output that is named."""
        found: list[tuple[tuple[str, ...], str]] = [(("structured", output), output) for output in self.structured]
        for at, item in self.structured.items():
            named = [(key, getattr(item.boxes, key)) for key in ("classes", "scores")] if item.boxes else []
            found += [(("structured", at, "boxes", key), name) for key, name in named if name is not None]
        if self.distributional is not None:
            found += [(("distributional", "rows", output), output) for output in self.distributional.rows]
            seeds = self.distributional.seeds
            found += [(("distributional", "seeds", "outputs"), output) for output in (seeds.outputs if seeds else ())]
        return found


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
