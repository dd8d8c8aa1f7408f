"""The task metrics of a spec, one class for each name; what they measure is in `validation/metrics/tasks`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from enginesmith.core.text import suggest
from enginesmith.core.types import PRECISIONS, Precision
from pipeline.spec.source import GraphName, Mistakes, SpecPart
from validation.metrics.tasks import terms

_AGAINST = "what the answers are compared with; default: golden.labels where it is given, else the original's outputs"
_DECIDES = (
    "limits on numeric drift do not count beside it: true for all precisions but fp32, or a list of precisions "
    "(docs/guides/bring-a-model.md#say-what-the-model-is-for)"
)


def _name_precisions(value: object) -> object:
    return [name for name in PRECISIONS if value and name != "fp32"] if isinstance(value, bool) else value


Deciding: TypeAlias = Annotated[
    tuple[Precision, ...],
    BeforeValidator(_name_precisions),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": list(PRECISIONS), "type": "string"}}]}
    ),
]


class _NamedMetric(SpecPart):
    """What all task metrics have. Each class has a field for each setting of its terms, and for each further limit."""

    terms_class: ClassVar[type[terms.TaskTerms]]

    name: str
    output: GraphName = Field(description="the output that holds the answers")
    floor: float | None = Field(None, description="lowest value that passes")
    against: terms.Against | None = Field(None, description=_AGAINST)
    decides: Deciding = Field((), description=_DECIDES)

    @model_validator(mode="after")
    def _asks(self) -> Self:
        keys = self._limit_keys()
        if not self.model_fields_set & set(keys):
            told = ", ".join(f"{key}: VALUE" for key in keys)
            raise ValueError(f"asks for nothing; give {told}, or floor: null to have it measured and not judged")
        if self.decides and not self.limits():
            raise Mistakes([(("decides",), f"metric {self.name} decides nothing without a limit; give floor: VALUE")])
        return self

    def _limit_keys(self) -> dict[str, str]:
        """The names of values by the keys of their limits."""
        first, *others = terms.VALUES[self.name]
        return {"floor": first, **{name: name for name in others if name in type(self).model_fields}}

    def limits(self) -> dict[str, float]:
        """The limits that are given, by name of the value."""
        found = {value: getattr(self, key) for key, value in self._limit_keys().items()}
        return {value: float(limit) for value, limit in found.items() if limit is not None}

    def decides_for(self, precision: Precision | None) -> bool:
        """Whether it decides about graphs and engines of a precision; None: the export, whose limits always count."""
        return precision in self.decides

    def outputs(self) -> Mapping[str, str]:
        """The outputs that it names, by key."""
        found = {key: getattr(self, key, None) for key in ("output", "scores", "classes")}
        return {key: name for key, name in found.items() if isinstance(name, str)}

    def to_terms(self, precision: Precision | None, labelled: bool) -> terms.TaskMetric:
        """The metric as the steps take it. labelled: whether the golden set has labels."""
        made = self.terms_class(**{item.name: getattr(self, item.name) for item in fields(self.terms_class)})
        against = self.against or ("labels" if labelled and self.name not in UNLABELLED else "original")
        return terms.TaskMetric(made, self.limits(), against, self.decides_for(precision))


class AccuracyMetric(_NamedMetric):
    """The share of answers that equal their labels: argmax over the last axis of `output`, or its integers."""

    terms_class = terms.AccuracyTerms

    name: Literal["accuracy"] = "accuracy"
    output: GraphName = Field(description="the output whose argmax over the last axis is the predicted class")
    floor: float | None = Field(None, ge=0, le=1, description="lowest accuracy that passes, e.g. 0.95")
    against: Literal["labels"] | None = Field(None, description="labels, which golden.labels names")


class TopKMetric(_NamedMetric):
    """The share of rows whose label, or the original's likeliest class, is among the k likeliest."""

    terms_class = terms.TopKTerms

    name: Literal["top_k"]
    k: int = Field(5, ge=1, description="1: the share of equal decisions")
    floor: float | None = Field(None, ge=0, le=1, description="lowest share that passes, e.g. 0.99")


class DetectionMetric(_NamedMetric):
    """Boxes: COCO's mean average precision, and the share that is found again. Labels: [samples, boxes, 5], each a box
    in `form` and its class, negative where there is none.
    """

    terms_class = terms.DetectionTerms

    name: Literal["detection"]
    output: GraphName = Field(description="boxes [.., n, 4]; of a head [batch, 4 + classes, n]")
    form: terms.BoxForm = "xyxy"
    scores: GraphName | None = Field(None, description="the output [.., n], or [.., n, classes], with the scores")
    classes: GraphName | None = Field(None, description="the output [.., n] with the classes; default: one class")
    head: bool = Field(False, description="`output` is a head: rows of 4 coordinates and a score per class")
    least_score: float = Field(0.0, ge=0, description="boxes below it do not count, e.g. 0.25")
    nms: float | None = Field(None, gt=0, le=1, description="drop the lower of boxes that overlap by more, e.g. 0.45")
    iou: float = Field(0.5, gt=0, le=1, description="least overlap of boxes that match")
    floor: float | None = Field(None, ge=0, le=1, description="lowest mean average precision that passes")
    matched_boxes: float | None = Field(None, ge=0, le=1, description="lowest share of boxes found again that passes")

    @model_validator(mode="after")
    def _scored(self) -> Self:
        found = []
        if self.head:
            found = [((key,), f"a head has its own {key}; leave it out") for key in ("scores", "classes")
                     if getattr(self, key) is not None]  # fmt: skip
        elif self.scores is None:
            keys = [key for key in ("least_score", "nms") if getattr(self, key)]
            found = [((key,), f"{key} needs to know the scores; name their output in scores") for key in keys]
        if found:
            raise Mistakes(found)
        return self


class TextMetric(_NamedMetric):
    """Texts of a CTC recogniser, decoded greedily. Labels: class indices [samples, length], filled up with -1."""

    terms_class = terms.TextTerms

    name: Literal["ctc"]
    output: GraphName = Field(description="scores [batch, time, classes], or integer classes [batch, time]")
    blank: int = Field(0, ge=0, description="index of the class that stands for none")
    space: int | None = Field(None, ge=0, description="index of the class between words; word_error needs it")
    time_first: bool = Field(False, description="the output is [time, batch, ..]")
    floor: float | None = Field(None, ge=0, le=1, description="lowest share of equal texts that passes")
    character_error: float | None = Field(None, ge=0, description="highest character error rate that passes")
    word_error: float | None = Field(None, ge=0, description="highest word error rate that passes")

    @model_validator(mode="after")
    def _spaced(self) -> Self:
        if self.word_error is not None and self.space is None:
            raise Mistakes([(("word_error",), "word_error needs to know where words end; give space: INDEX")])
        return self


class EmbeddingsMetric(_NamedMetric):
    """Vectors of a search: rank correlation of all pairs' cosine similarities, and recall of the nearest neighbours."""

    terms_class = terms.EmbeddingTerms

    name: Literal["embeddings"]
    output: GraphName = Field(description="vectors [batch, size]; with pool [batch, places, size]")
    k: int = Field(5, ge=1, description="so many neighbours of each sample")
    pool: Literal["none", "first", "mean"] = Field("none", description="what of the places makes the vector")
    against: Literal["original"] | None = Field(None, description="the original's outputs; labels have no vectors")
    floor: float | None = Field(None, ge=-1, le=1, description="lowest rank correlation that passes, e.g. 0.99")
    neighbours: float | None = Field(None, ge=0, le=1, description="lowest recall of neighbours that passes")


class RegressionMetric(_NamedMetric):
    """Numbers: errors relative to what is wanted. Labels: as many numbers as the output has."""

    terms_class = terms.RegressionTerms

    name: Literal["regression"]
    floor: float | None = Field(None, le=1, description="lowest coefficient of determination (R2) that passes")
    relative_error: float | None = Field(None, ge=0, description="highest sum of errors over that of numbers")
    largest_error: float | None = Field(None, ge=0, description="highest error over the greatest number")


class SegmentationMetric(_NamedMetric):
    """Class maps: mean intersection over union. Labels: class indices [samples, ..]."""

    terms_class = terms.SegmentationTerms

    name: Literal["segmentation"]
    axis: int = Field(1, description="axis of the classes")
    threshold: float | None = Field(None, description="of one value per pixel: above it is class 1, else 0")
    ignore: int | None = Field(None, description="class of pixels that do not count, e.g. 255")
    floor: float | None = Field(None, ge=0, le=1, description="lowest mean intersection over union that passes")
    equal_pixels: float | None = Field(None, ge=0, le=1, description="lowest share of equal pixels that passes")


class SignalDistortion(_NamedMetric):
    """Audio: scale-invariant signal-to-distortion ratio in decibels. Labels: signals of the output's shape."""

    terms_class = terms.SignalTerms

    name: Literal["si_sdr"]
    output: GraphName = Field(description="signals whose last axis is time")
    floor: float | None = Field(None, description="lowest mean that passes, in decibels, e.g. 30")
    least_si_sdr_db: float | None = Field(None, description="lowest ratio of a single signal that passes")


class TokensMetric(_NamedMetric):
    """Tokens place by place, by argmax or as ids. Labels: token ids [samples, places]."""

    terms_class = terms.TokenTerms

    name: Literal["tokens"]
    output: GraphName = Field(description="scores [batch, places, vocabulary], or integer ids [batch, places]")
    until: int | None = Field(None, description="token id: what follows its first place does not count")
    pad: int | None = Field(None, description="token id: its places do not count")
    floor: float | None = Field(None, ge=0, le=1, description="lowest share of equal tokens that passes")
    equal_sequences: float | None = Field(None, ge=0, le=1, description="lowest share of equal sequences that passes")


class PerplexityMetric(_NamedMetric):
    """Language models: likelihood of the tokens that follow. Labels: token ids, negative where none counts."""

    terms_class = terms.PerplexityTerms

    name: Literal["perplexity"]
    output: GraphName = Field(description="logits [.., vocabulary]")
    floor: float | None = Field(None, gt=0, le=1, description="lowest likelihood beside the original's, e.g. 0.98")
    perplexity: float | None = Field(None, ge=1, description="highest perplexity of the labels that passes")


UNLABELLED = ("embeddings",)
_SEVERAL, _ONE = "[several]", "[one]"


def _name_of(value: object) -> str:
    """The tag of a metric: its name, `accuracy` where it gives none."""
    name = value.get("name", "accuracy") if isinstance(value, dict) else getattr(value, "name", "accuracy")
    return f"[{name}]"


def _check_name(value: object) -> object:
    name = value.get("name", "accuracy") if isinstance(value, dict) else "accuracy"
    if name not in terms.VALUES:
        raise Mistakes([(("name",), f"metric {name!r} is not known; {suggest(str(name), terms.VALUES)}")])
    return value


Metric: TypeAlias = Annotated[
    Annotated[AccuracyMetric, Tag("[accuracy]")]
    | Annotated[TopKMetric, Tag("[top_k]")]
    | Annotated[DetectionMetric, Tag("[detection]")]
    | Annotated[TextMetric, Tag("[ctc]")]
    | Annotated[EmbeddingsMetric, Tag("[embeddings]")]
    | Annotated[RegressionMetric, Tag("[regression]")]
    | Annotated[SegmentationMetric, Tag("[segmentation]")]
    | Annotated[SignalDistortion, Tag("[si_sdr]")]
    | Annotated[TokensMetric, Tag("[tokens]")]
    | Annotated[PerplexityMetric, Tag("[perplexity]")],
    Discriminator(_name_of),
    BeforeValidator(_check_name),
]
# One metric, or a list of them.
Metrics: TypeAlias = Annotated[
    Annotated[Metric, Tag(_ONE)] | Annotated[tuple[Metric, ...], Tag(_SEVERAL)],
    Discriminator(lambda value: _SEVERAL if isinstance(value, list | tuple) else _ONE),
]
