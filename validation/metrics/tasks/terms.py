"""The task metrics of a spec, by name. Does not import numpy, which a driver lacks, or pydantic, which a GPU machine
lacks.

A new metric is a class here, listed in `TaskMetric`, and a score in `MEASURES` (`vectors_and_masks`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from annotated_types import Ge, Gt, Interval, Le

from enginesmith.core.types import Precision

BoxForm = Literal["xyxy", "xywh", "cxcywh"]
Against = Literal["labels", "original"]
Share = Annotated[float, Interval(ge=0, le=1)]
Least = Annotated[float, Ge(0)]


class Declared:
    """Base of the dataclasses into which pydantic reads a spec. Other keys are forbidden. A number is accepted as text:
    older PyTorch exporters use names such as 387 for outputs, which YAML reads as a number."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid", "allow_inf_nan": False, "coerce_numbers_to_str": True
    }  # fmt: skip


def about(text: str) -> dict[str, str]:
    """The metadata of a field, with its description for pydantic."""
    return {"description": text}


def limit(text: str) -> Any:
    """A field for a limit, which is None unless a spec sets it."""
    return field(default=None, kw_only=True, metadata=about(text))


def setting(text: str, default: Any = None) -> Any:
    """A field with a default. text: its description in the reference of the spec."""
    return field(default=default, metadata=about(text))


@dataclass(frozen=True)
class Metric(Declared):
    """Base of all task metrics: settings and limits; a limit of None is not checked.

    values: names of the metric's values; `floor` limits the first, any other value has a limit of its own name. Smaller
    is better for 'perplexity' and names that end in '_error'.  answers: the default of `against` if there are labels.
    """

    values: ClassVar[tuple[str, ...]]
    answers: ClassVar[Against] = "labels"

    output: str = field(metadata=about("the output that holds the answers"))
    floor: float | None = limit("lowest value that passes")
    against: Against | None = limit(
        "what the answers are compared with; default: golden.labels where it is given, else the original's outputs"
    )
    decides: tuple[Precision, ...] = field(
        default=(),
        kw_only=True,
        metadata=about(
            "limits on numeric drift do not count beside it: true for all precisions but fp32, or a list of precisions "
            "(docs/guides/bring-a-model.md#add-a-task-metric)"
        ),
    )

    @classmethod
    def limit_keys(cls) -> dict[str, str]:
        """The name of each value by the key of its limit."""
        main_name, *other_names = cls.values
        return {"floor": main_name, **{name: name for name in other_names if name in cls.__dataclass_fields__}}

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are not None, by name of the value."""
        settings = {value: getattr(self, key) for key, value in self.limit_keys().items()}
        return {value: float(floor) for value, floor in settings.items() if floor is not None}

    @property
    def outputs(self) -> dict[str, str]:
        """The outputs that the metric names, by key."""
        output_names = {key: getattr(self, key, None) for key in ("output", "scores", "classes")}
        return {key: name for key, name in output_names.items() if isinstance(name, str)}

    @property
    def sets(self) -> tuple[str, ...]:
        """The outputs that are sets, such as boxes that the graph selects: their size may differ between the sides."""
        return ()

    def resolve(self, precision: Precision | None, labelled: bool) -> Self:
        """The metric with `against` and `decides` set for one precision (None: the export, where limits on drift always
        count). labelled: whether the golden set has labels."""
        default: Against = self.answers if labelled else "original"
        deciding_names = tuple(name for name in self.decides if name == precision)
        return replace(self, against=self.against or default, decides=deciding_names)

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """(key, message) of each key that does not fit the others."""
        if self.decides and not self.limits:
            yield "decides", f"metric {self.name} decides nothing without a limit; give floor: VALUE"

    @property
    def name(self) -> str:
        """The metric's name in a spec, which every metric declares as a field."""
        raise NotImplementedError


@dataclass(frozen=True)
class AccuracyMetric(Metric):
    """The share of answers that equal their labels: argmax over the last axis of `output`, or its integers."""

    values = ("accuracy",)

    output: str = field(metadata=about("the output whose argmax over the last axis is the predicted class"))
    floor: Share | None = limit("lowest accuracy that passes, e.g. 0.95")
    against: Literal["labels"] | None = limit("labels, which golden.labels names")
    name: Literal["accuracy"] = "accuracy"


@dataclass(frozen=True)
class TopKMetric(Metric):
    """The share of rows whose label, or the original's likeliest class, is among the k likeliest classes."""

    values = ("top_k",)

    k: Annotated[int, Ge(1)] = setting("1: the share of equal decisions", 5)
    floor: Share | None = limit("lowest share that passes, e.g. 0.99")
    name: Literal["top_k"] = "top_k"


@dataclass(frozen=True)
class DetectionMetric(Metric):
    """Boxes: COCO's mean average precision, and the share of matched boxes. Labels: [samples, boxes, 5], each a box in
    `form` and its class, which is negative for padding.
    """

    values = ("mean_average_precision", "matched_boxes")

    output: str = field(metadata=about("boxes [.., n, 4]; of a head [batch, 4 + classes, n]"))
    form: BoxForm = "xyxy"
    scores: str | None = setting("the output [.., n], or [.., n, classes], with the scores")
    classes: str | None = setting("the output [.., n] with the classes; default: one class")
    head: bool = setting("`output` is a head: rows of 4 coordinates and a score per class", False)
    least_score: Least = setting("boxes below it do not count, e.g. 0.25", 0.0)
    nms: Annotated[float, Gt(0), Le(1)] | None = setting("drop the lower of boxes that overlap by more, e.g. 0.45")
    iou: Annotated[float, Gt(0), Le(1)] = setting("least overlap of boxes that match", 0.5)
    floor: Share | None = limit("lowest mean average precision that passes")
    matched_boxes: Share | None = limit("lowest share of boxes found again that passes")
    name: Literal["detection"] = "detection"

    @property
    def sets(self) -> tuple[str, ...]:
        """All outputs of boxes, unless they are those of a head."""
        return () if self.head else tuple(self.outputs.values())

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """Also: outputs besides a head, and settings that need scores without an output of scores."""
        yield from super().mistakes()
        if self.head:
            keys = [key for key in ("scores", "classes") if getattr(self, key) is not None]
            yield from ((key, f"a head has its own {key}; leave it out") for key in keys)
        elif self.scores is None:
            keys = [key for key in ("least_score", "nms") if getattr(self, key)]
            yield from ((key, f"{key} needs to know the scores; name their output in scores") for key in keys)


@dataclass(frozen=True)
class TextMetric(Metric):
    """Texts of a CTC recogniser, decoded greedily. Labels: class indices [samples, length], filled up with -1."""

    values = ("equal_texts", "character_error", "word_error")

    output: str = field(metadata=about("scores [batch, time, classes], or integer classes [batch, time]"))
    blank: Annotated[int, Ge(0)] = setting("index of the class that stands for none", 0)
    space: Annotated[int, Ge(0)] | None = setting("index of the class between words; word_error needs it")
    time_first: bool = setting("the output is [time, batch, ..]", False)
    floor: Share | None = limit("lowest share of equal texts that passes")
    character_error: Least | None = limit("highest character error rate that passes")
    word_error: Least | None = limit("highest word error rate that passes")
    name: Literal["ctc"] = "ctc"

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """Also: a limit on words without `space`, which separates words."""
        yield from super().mistakes()
        if self.word_error is not None and self.space is None:
            yield "word_error", "word_error needs to know where words end; give space: INDEX"


@dataclass(frozen=True)
class EmbeddingsMetric(Metric):
    """Vectors of a search: rank correlation of all pairs' cosine similarities, and recall of the nearest neighbours."""

    values = ("spearman", "neighbours")
    answers = "original"

    output: str = field(metadata=about("vectors [batch, size]; with pool [batch, places, size]"))
    k: Annotated[int, Ge(1)] = setting("so many neighbours of each sample", 5)
    pool: Literal["none", "first", "mean"] = setting("what of the places makes the vector", "none")
    against: Literal["original"] | None = limit("the original's outputs; labels have no vectors")
    floor: Annotated[float, Interval(ge=-1, le=1)] | None = limit("lowest rank correlation that passes, e.g. 0.99")
    neighbours: Share | None = limit("lowest recall of neighbours that passes")
    name: Literal["embeddings"] = "embeddings"


@dataclass(frozen=True)
class RegressionMetric(Metric):
    """Numbers: errors relative to the expected values. Labels: as many numbers as the output has."""

    values = ("r2", "relative_error", "largest_error")

    floor: Annotated[float, Le(1)] | None = limit("lowest coefficient of determination (R2) that passes")
    relative_error: Least | None = limit("highest sum of errors over that of numbers")
    largest_error: Least | None = limit("highest error over the greatest number")
    name: Literal["regression"] = "regression"


@dataclass(frozen=True)
class SegmentationMetric(Metric):
    """Class maps: mean intersection over union. Labels: class indices [samples, ..]."""

    values = ("mean_iou", "equal_pixels")

    axis: int = setting("axis of the classes", 1)
    threshold: float | None = setting("of one value per pixel: above it is class 1, else 0")
    ignore: int | None = setting("class of pixels that do not count, e.g. 255")
    floor: Share | None = limit("lowest mean intersection over union that passes")
    equal_pixels: Share | None = limit("lowest share of equal pixels that passes")
    name: Literal["segmentation"] = "segmentation"


@dataclass(frozen=True)
class SignalDistortion(Metric):
    """Audio: scale-invariant signal-to-distortion ratio in decibels. Labels: signals of the output's shape."""

    values = ("si_sdr_db", "least_si_sdr_db")

    output: str = field(metadata=about("signals whose last axis is time"))
    floor: float | None = limit("lowest mean that passes, in decibels, e.g. 30")
    least_si_sdr_db: float | None = limit("lowest ratio of a single signal that passes")
    name: Literal["si_sdr"] = "si_sdr"


@dataclass(frozen=True)
class TokensMetric(Metric):
    """Tokens place by place, by argmax or as ids. Labels: token ids [samples, places]."""

    values = ("equal_tokens", "equal_sequences")

    output: str = field(metadata=about("scores [batch, places, vocabulary], or integer ids [batch, places]"))
    until: int | None = setting("token id: what follows its first place does not count")
    pad: int | None = setting("token id: its places do not count")
    floor: Share | None = limit("lowest share of equal tokens that passes")
    equal_sequences: Share | None = limit("lowest share of equal sequences that passes")
    name: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class PerplexityMetric(Metric):
    """Language models: likelihood of the next tokens. Labels: token ids, negative at places that do not count."""

    values = ("kept_likelihood", "perplexity")

    output: str = field(metadata=about("logits [.., vocabulary]"))
    floor: Annotated[float, Gt(0), Le(1)] | None = limit("lowest likelihood beside the original's, e.g. 0.98")
    perplexity: Annotated[float, Ge(1)] | None = limit("highest perplexity of the labels that passes")
    name: Literal["perplexity"] = "perplexity"


TaskMetric: TypeAlias = (
    AccuracyMetric
    | TopKMetric
    | DetectionMetric
    | TextMetric
    | EmbeddingsMetric
    | RegressionMetric
    | SegmentationMetric
    | SignalDistortion
    | TokensMetric
    | PerplexityMetric
)
# The class of each metric by its name.
METRICS: Mapping[str, type[TaskMetric]] = {kind.name: kind for kind in get_args(TaskMetric)}
