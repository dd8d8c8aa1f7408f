"""The section `quantization` of a spec, and sequences of stored data."""

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from enginesmith.core.names import inside
from pipeline.spec.source import DimName, GraphName, Loc, Mistakes, SpecPart


class SequenceArrays(SpecPart):
    """Names of arrays with a number for each sample, in a data file of a model with state."""

    omitted: ClassVar[frozenset[str]] = frozenset({"sequence", "steps"})

    sequence: GraphName | None = Field(
        None, description="of a model with state: name of the array that says which sequence each step is of"
    )
    steps: dict[DimName, GraphName] | None = Field(
        None,
        description="of a model with state: {DIM: ARRAY}; samples behind each other with the same number in the array "
        "are one step, joined along the dim, such as the tokens of a prompt",
    )

    @field_validator("steps")
    @classmethod
    def _along_one(cls, steps: dict[str, str] | None) -> dict[str, str] | None:
        if steps is not None and len(steps) != 1:
            raise ValueError(f"joins samples along one dim; give {{DIM: ARRAY}}, found {len(steps)} of them")
        return steps

    @property
    def joined(self) -> tuple[str, str] | None:
        """(dim, name of the array) of `steps`."""
        return next(iter(self.steps.items())) if self.steps else None

    @property
    def orders(self) -> list[str]:
        """The names of these arrays."""
        return [name for name in (self.sequence, *(self.steps or {}).values()) if name]


class EnsembleArrays(SequenceArrays):
    """Names of such arrays in a data file of an ensemble, with dims as 'GRAPH.DIM'."""

    steps: dict[str, GraphName] | None = Field(
        None,
        description="of graphs with state: {GRAPH.DIM: ARRAY}; samples behind each other with the same number in the "
        "array are one step, joined along the dim of the graph's inputs, such as the tokens of a prompt",
    )


class Calibration(SequenceArrays):
    """Real samples from which int8 and fp8 ranges are measured, and the method that chooses a range."""

    data: str = Field(
        description=".npz or safetensors with one array per input, .npy or a folder of them, or 'file.py:function': a "
        "generator of dicts with one array per input"
    )
    method: Literal["minmax", "percentile", "entropy", "mse", "moving-average"] = "minmax"
    percentile: float | None = Field(
        None, gt=50, le=100, description="for method percentile: the share of values kept; default 99.99"
    )

    parts: int = Field(
        1, ge=1, le=256, description="observe stored samples in so many parts, side by side, each kept once it is done"
    )

    labels: GraphName | None = Field(
        None, description="name of the array of class indices in stored data, for a floor of accuracy"
    )

    @field_validator("data")
    @classmethod
    def _file_or_generator(cls, text: str) -> str:
        file, colon, function = text.partition(":")
        if colon and not (file.endswith(".py") and function.isidentifier()):
            raise ValueError("must be a file, a folder, or 'data.py:samples', a file and a function in it")
        return inside(file) + colon + function

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        mistakes: list[tuple[Loc, str]] = []
        if self.percentile is not None and self.method != "percentile":
            text = f"method {self.method} accepts no percentile; remove it, or use method percentile"
            mistakes.append((("percentile",), text))
        if self.parts > 1 and self.function:
            text = "a generator cannot be divided into parts; remove parts, or store the samples"
            mistakes.append((("parts",), text))
        if self.sequence and self.function:
            text = "the samples of a generator are the steps of one sequence; remove sequence, or store the samples"
            mistakes.append((("sequence",), text))
        if self.steps and self.function:
            mistakes.append((("steps",), "a generator gives whole steps, of any size; remove steps"))
        if self.labels and self.function:
            mistakes.append((("labels",), "a generator gives no labels; remove labels, or store the samples"))
        if mistakes:
            raise Mistakes(mistakes)
        return self

    @property
    def file(self) -> str:
        """The file or folder of the data, or the file of the function."""
        return self.data.partition(":")[0]

    @property
    def function(self) -> str | None:
        """The generator's name; None for stored data."""
        return self.data.partition(":")[2] or None


class NodeOverride(SpecPart):
    """The precision of some nodes, by hand."""

    match: GraphName = Field(
        min_length=1, description="a node's name, an operator type, or a glob over names: '*/attn/*'"
    )
    precision: Literal["fp32", "fp16", "int8"] = Field(
        description="fp32 and fp16 leave the nodes in float; int8 takes back an earlier rule"
    )


class QualityFloor(SpecPart):
    """The least quality of an int8 graph on calibration samples; of several outputs, the worst one counts."""

    sqnr_db: float | None = Field(None, gt=0, lt=140, description="signal-to-quantization-noise ratio, in decibels")
    cosine: float | None = Field(None, gt=0, lt=1, description="cosine similarity of the outputs")
    argmax_agreement: float | None = Field(
        None, gt=0, le=1, description="share of decisions, along the last axis, that stay those of the float model"
    )
    accuracy: float | None = Field(
        None, gt=0, le=1, description="share of right answers, of golden.metric.output or of the first output, by "
        "calibration.labels"
    )  # fmt: skip

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not any(self.model_dump().values()):
            raise ValueError(f"needs one of {', '.join(type(self).model_fields)}")
        return self


class Quantization(SpecPart):
    """Settings for graphs in other precisions, where they differ from the default."""

    io: Literal["fp32", "native"] = Field(
        "fp32", description="native: an fp16 graph also takes and gives fp16; callers then convert"
    )
    overrides: tuple[NodeOverride, ...] = Field((), description="rules by node; the last one that matches counts")
    search: Literal["when-needed", "never"] = Field(
        "when-needed",
        description="when-needed: where plain int8 ranges miss the graph's limits, what int8 takes is searched on the "
        "calibration samples until they hold; never: such a graph fails. With smoothing, floor, latency or "
        "budget_ms, int8 is searched at once",
    )
    smoothing: Literal["none", "auto"] = Field(
        "none", description="auto: int8 moves outliers of activations into weights, with a strength searched per group"
    )
    floor: QualityFloor | None = Field(
        None, description="int8 leaves what costs most in float until this holds, and no more than that"
    )
    latency: Literal["ignore", "measure"] = Field(
        "ignore",
        description="measure: what int8 does not make faster on an engine of this machine is left in float; the graph "
        "then depends on the machine that chose it first",
    )
    budget_ms: float | None = Field(
        None,
        gt=0,
        description="the most milliseconds of a run at the sizes that dims have as opt, measured as latency: measure "
        "does where a target runs here, else modelled by peak rates; int8 is the most accurate graph within it",
    )
    gain: Literal["any", "latency", "bytes"] = Field(
        "any",
        description="what a unit of a quantized precision must gain over the unit in floats that it stands for. "
        "latency: 1.02 times its speed; bytes: at most 0.9 of its weights' bytes; a unit that gains less is refused, "
        "unless build.required names it. any: it is built, and the plan says that it is no faster",
    )

    @property
    def searches(self) -> tuple[str, ...]:
        """The keys that request a search of the int8 graph (`pipeline.quantization.search`); empty without a search."""
        search_flags = {
            "smoothing": self.smoothing != "none",
            "floor": self.floor is not None,
            "latency": self.latency == "measure",
            "budget_ms": self.budget_ms is not None,
        }
        return tuple(key for key, is_set in search_flags.items() if is_set)

    @model_validator(mode="after")
    def _searched_or_not(self) -> Self:
        if self.search == "never" and self.searches:
            text = " and ".join(self.searches)
            raise Mistakes([(("search",), f"search: never contradicts {text}, which search; remove search, or {text}")])
        if self.floor is not None and self.budget_ms is not None:
            raise Mistakes(
                [(("budget_ms",), "a floor asks for the fastest graph, a budget for the most accurate; keep one")]
            )
        return self
