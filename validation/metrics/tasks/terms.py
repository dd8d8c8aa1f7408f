"""What a spec may ask of a model's answers, by name. Standard library only: a driver reads this without numpy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

BoxForm = Literal["xyxy", "xywh", "cxcywh"]
Against = Literal["labels", "original"]


@dataclass(frozen=True)
class AccuracyTerms:
    """The share of answers that equal their labels. output: its argmax over the last axis is the predicted class."""

    output: str
    name: Literal["accuracy"] = "accuracy"


@dataclass(frozen=True)
class TopKTerms:
    """The share of rows whose right class is among the k with the greatest values of the last axis."""

    output: str
    k: int = 5
    name: Literal["top_k"] = "top_k"


@dataclass(frozen=True)
class DetectionTerms:
    """Boxes. output: [.., n, 4], or of a `head` [batch, 4 + classes, n].  scores: output [.., n] or [.., n, classes].

    classes: output [.., n].  nms: overlap above which the lower of two boxes of a class is dropped; None for outputs
    that are final.  iou: least overlap of two boxes that match.
    """

    output: str
    form: BoxForm = "xyxy"
    scores: str | None = None
    classes: str | None = None
    head: bool = False
    least_score: float = 0.0
    nms: float | None = None
    iou: float = 0.5
    name: Literal["detection"] = "detection"


@dataclass(frozen=True)
class TextTerms:
    """Texts by greedy CTC decoding. output: [batch, time, classes], or classes [batch, time] of integers.

    blank: index of the class that stands for none.  space: of the one between words.  time_first: [time, batch, ..].
    """

    output: str
    blank: int = 0
    space: int | None = None
    time_first: bool = False
    name: Literal["ctc"] = "ctc"


@dataclass(frozen=True)
class EmbeddingTerms:
    """Vectors. output: [batch, size]; with pool [batch, places, size].  k: how many neighbours are looked at."""

    output: str
    k: int = 5
    pool: Literal["none", "first", "mean"] = "none"
    name: Literal["embeddings"] = "embeddings"


@dataclass(frozen=True)
class RegressionTerms:
    """Numbers, of any shape."""

    output: str
    name: Literal["regression"] = "regression"


@dataclass(frozen=True)
class SegmentationTerms:
    """Class maps. axis: of the classes.  threshold: of one value per pixel, above which it is class 1, else 0.

    ignore: class of pixels that do not count.
    """

    output: str
    axis: int = 1
    threshold: float | None = None
    ignore: int | None = None
    name: Literal["segmentation"] = "segmentation"


@dataclass(frozen=True)
class SignalTerms:
    """Signals along the last axis, which is time."""

    output: str
    name: Literal["si_sdr"] = "si_sdr"


@dataclass(frozen=True)
class TokenTerms:
    """Tokens. output: [batch, places, vocabulary], or token ids [batch, places] of integers.

    until: token id after whose first place in the reference nothing counts.  pad: token id of places that do not count.
    """

    output: str
    until: int | None = None
    pad: int | None = None
    name: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class PerplexityTerms:
    """Likelihoods of tokens. output: logits [.., vocabulary]."""

    output: str
    name: Literal["perplexity"] = "perplexity"


TaskTerms: TypeAlias = (
    AccuracyTerms
    | TopKTerms
    | DetectionTerms
    | TextTerms
    | EmbeddingTerms
    | RegressionTerms
    | SegmentationTerms
    | SignalTerms
    | TokenTerms
    | PerplexityTerms
)


def sets_of(terms: TaskTerms) -> tuple[str, ...]:
    """The outputs that hold sets, of which each side may have another number: boxes that the graph selects itself."""
    if not isinstance(terms, DetectionTerms) or terms.head:
        return ()
    return tuple(filter(None, (terms.output, terms.scores, terms.classes)))


# What each measures, by its name. `floor` of a spec is the least value of the first; the others have keys of their own.
# 'perplexity' and a value whose name ends in '_error' are better the smaller they are, all others the greater.
VALUES: Mapping[str, tuple[str, ...]] = {
    "accuracy": ("accuracy",),
    "top_k": ("top_k",),
    "detection": ("mean_average_precision", "matched_boxes"),
    "ctc": ("equal_texts", "character_error", "word_error"),
    "embeddings": ("spearman", "neighbours"),
    "regression": ("r2", "relative_error", "largest_error"),
    "segmentation": ("mean_iou", "equal_pixels"),
    "si_sdr": ("si_sdr_db", "least_si_sdr_db"),
    "tokens": ("equal_tokens", "equal_sequences"),
    "perplexity": ("kept_likelihood", "perplexity"),
}


@dataclass(frozen=True)
class TaskMetric:
    """A task metric. limits: by value the lowest that passes, or the highest of an error; others are only reported.

    against: what answers are compared with.  decides: whether the limits on numeric drift do not count beside it.
    """

    terms: TaskTerms
    limits: Mapping[str, float] = field(default_factory=dict)
    against: Against = "original"
    decides: bool = False
