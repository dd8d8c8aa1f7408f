"""The contract of a spec: promises on a model's outputs beside drift and task metrics. No numpy, which a driver lacks.

The defaults are explained in docs/concepts/validation.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

from validation.metrics.tasks.terms import BoxForm, Declared, Least, Share, setting

DTypeName = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"
]
Order = Literal["ascending", "descending", "strictly ascending", "strictly descending"]
Values = Literal["logits", "probabilities"]

# The default limits. KL: the perplexity on text drawn from the original model grows by e^KL, 1 %.
KL = 0.01
# No event of any row changes its probability by more than 0.2: JS >= TV^2 / 2, by Pinsker's inequality.
JS = 0.02
# FLIPS: one decision in a hundred. TOP_K: one entry of four top-5 lists.
FLIPS, TOP_K = 0.01, 0.05
# About the calibration error of a network after temperature scaling (Guo et al. 2017, table 1).
ECE = 0.02
# The cost of an error of 0.1 (root mean square over the row) for calibrated probabilities.
BRIER = 0.01
# One false alarm in a thousand engines; it repeats for the same engine, because the draws are seeded.
DRAWS, ALPHA = 100, 0.001


@dataclass(frozen=True)
class Bitwise(Declared):
    """The same inputs give the same bits. A sample's place in a batch is held to the limits, unless named here."""

    runs: Annotated[int, Interval(ge=2, le=1000)] = setting("how often each case runs", 3)
    position: bool = setting("the same bits wherever a sample lies in a batch", False)
    size: bool = setting("the same bits whatever the size of the batch", False)


@dataclass(frozen=True)
class Boxes(Declared):
    """Boxes (.., n, 4) are the graph's: matched within a class by intersection over union, in any order."""

    form: BoxForm = "xyxy"
    classes: str | None = setting("the output (.., n) with each box's class; default: one class")
    scores: str | None = setting("the output (.., n) with each box's score")
    iou: Annotated[float, Gt(0), Le(1)] = setting("least overlap of two boxes that match", 0.9)
    matched: Annotated[float, Gt(0), Le(1)] = setting("least share of the boxes of both sides that match", 0.99)
    score: Least | None = setting("greatest difference of the scores of two that match")
    least_score: float = setting("boxes below it do not count; needs scores", 0.0)

    def __post_init__(self) -> None:
        if self.scores is None and (self.score is not None or self.least_score):
            raise ValueError("score and least_score need to know the scores; name their output in scores")


@dataclass(frozen=True)
class Sequence(Declared):
    """Sequences are the graph's: their first tokens, or all but a share of edits (Levenshtein 1966)."""

    until: int | None = setting("token id: what follows its first place is free")
    first: Annotated[int, Ge(1)] | None = setting("so many tokens are equal, or all up to `until`")
    edits: Annotated[float, Ge(0), Lt(1)] | None = setting("insertions, deletions, replacements: share of the length")

    def __post_init__(self) -> None:
        if self.first is None and self.edits is None:
            raise ValueError("asks for nothing; give first: COUNT or edits: SHARE (or equal_until: TOKEN instead)")


@dataclass(frozen=True)
class End(Declared):
    """Sequences end where the graph's do. An end in only one of the two sides always breaks it."""

    token: int = field(metadata={"description": "token id of the end"})
    apart: Annotated[int, Ge(0)] | None = setting("places by which the ends may differ; null: any", 0)
    pad: int | None = setting("token id that fills the rest")


@dataclass(frozen=True)
class Structure(Declared):
    """What one output must be, in every case of the golden set. What is not given is not asked for."""

    finite: Literal[True] | None = setting("no NaN and no infinity")
    range: tuple[float | None, float | None] | None = setting("[least, greatest]; null is no end")
    sums_to_one: Least | None = setting("how far sums over the last axis may be from 1")
    unit_norm: Least | None = setting("how far norms over the last axis may be from 1")
    sorted: Order | None = None
    shape: tuple[int | str, ...] | None = setting("sizes, and names of dims")
    dtype: DTypeName | None = None
    equal_until: int | None = setting("token id: sequences equal the graph's up to its first one")
    sequence: Sequence | None = None
    eos: End | None = None
    boxes: Boxes | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, term_field.name) is None for term_field in fields(self)):
            raise ValueError("asks for nothing; name a predicate, such as finite: true")
        minimum, maximum = self.range or (None, None)
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError("range: the least value comes first")
        if self.shape is not None and any(isinstance(size, int) and size < 0 for size in self.shape):
            raise ValueError("shape: sizes are 0 or more; name a dim where any size is right")
        if self.boxes is not None and self.shape is not None and self.shape[-1:] != (4,):
            raise ValueError(f"boxes: lie along a last axis of 4, and shape ends in {self.shape[-1:]}")


@dataclass(frozen=True)
class Rows(Declared):
    """The last axis holds a distribution that is the original model's. Null lifts a limit
    (docs/concepts/validation.md).
    """

    values: Values = "logits"
    kl: Least | None = setting("mean Kullback-Leibler divergence, nats", KL)
    js: Annotated[float, Interval(ge=0, le=0.7)] | None = setting(
        "Jensen-Shannon divergence of the worst row, nats", JS
    )
    flips: Share | None = setting("share of rows with another decision", FLIPS)
    top_k: Share | None = setting("share of the five likeliest that are others", TOP_K)
    ece: Share | None = setting("difference of the expected calibration error", ECE)
    brier: Annotated[float, Interval(ge=0, le=2)] | None = setting("difference of the Brier score", BRIER)

    def __post_init__(self) -> None:
        if all(getattr(self, term_field.name) is None for term_field in fields(self)[1:]):
            raise ValueError("asks for nothing; leave one limit that is not null")


@dataclass(frozen=True)
class Seeds(Declared):
    """Draws of a stochastic model come from the graph's distribution: a two-sample test per output."""

    outputs: Annotated[tuple[str, ...], MinLen(1)]
    vary: str | None = setting("the input that is a seed or noise; null: runs differ by themselves")
    draws: Annotated[int, Interval(ge=20, le=2000)] = setting("of each side", DRAWS)
    alpha: Annotated[float, Ge(1e-5), Lt(0.5)] = setting("rate of false alarms, over all outputs together", ALPHA)


@dataclass(frozen=True)
class Distributional(Declared):
    """Outputs as distributions: along the last axis, and over seeds."""

    rows: Mapping[str, Rows] = field(default_factory=dict, metadata={"description": "by output"})
    seeds: Seeds | None = None

    def __post_init__(self) -> None:
        if not self.rows and self.seeds is None:
            raise ValueError("asks for nothing; name outputs under rows, or seeds")


@dataclass(frozen=True)
class Contract(Declared):
    """Checked on every engine that runs; one that breaks it has failed (docs/concepts/validation.md)."""

    bitwise: Bitwise | None = None
    structured: Mapping[str, Structure] = field(default_factory=dict, metadata={"description": "by output"})
    distributional: Distributional | None = None

    @property
    def asks(self) -> bool:
        """Whether the contract promises anything."""
        return bool(self.bitwise or self.structured or self.distributional)

    def outputs(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """(path of the key below the contract, output) for each output that is named."""
        yield from ((("structured", output), output) for output in self.structured)
        for output_name, structure in self.structured.items():
            for key in ("classes", "scores") if structure.boxes else ():
                if (name := getattr(structure.boxes, key)) is not None:
                    yield ("structured", output_name, "boxes", key), name
        if self.distributional is not None:
            yield from ((("distributional", "rows", output), output) for output in self.distributional.rows)
            seeds = self.distributional.seeds
            yield from ((("distributional", "seeds", "outputs"), output) for output in (seeds.outputs if seeds else ()))
