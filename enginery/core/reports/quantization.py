"""The quantization record of one int8 or fp8 graph: what was quantized how well, what was not and why.

`pipeline.quantization.record` makes it; a registry keeps it as JSON (`enginery.core.codec`). SQNR is in decibels.
"""

from dataclasses import dataclass, field

from enginery.core.codec import OMIT_NONE

Span = tuple[float, float]


@dataclass(frozen=True)
class FloatNode:
    """A node that was left in float (int8) or in fp32 (fp16, bf16), and the reason."""

    node: str
    op_type: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op_type}): {self.reason}"


@dataclass(frozen=True)
class TensorHistogram:
    """Counts of a tensor's values in bins of one width, from end to end of `span`."""

    span: Span
    counts: tuple[float, ...]


@dataclass(frozen=True)
class QuantizedTensor:
    """One tensor, as the written graph rounds it. role: 'activation' or 'weight'.  readers: nodes.

    range: what the format holds; of an int8 weight, what its scheme uses.  scale: of a weight the largest channel's.
    seen: extremes.  clipped: share of the values that saturate.  sqnr_db: of quantizing this tensor alone; None
    without loss, or not measured.  measured: how: 'histogram', over all samples; 'rows', over some rows of a smoothed
    activation; 'weight', against the float weight, value by value.  histogram: of the worst activations.
    """

    name: str
    role: str
    format: str
    readers: tuple[str, ...]
    range: Span
    scale: float
    seen: Span | None = None
    clipped: float | None = None
    sqnr_db: float | None = None
    measured: str | None = None
    histogram: TensorHistogram | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class SearchPoint:
    """A point of a search's frontier: the share of the weighted multiplications in int8, and the quality that gives.

    predicted_db: from the damages of single groups.  sqnr_db, cosine: of the whole model, where it was run.
    left: how many groups stay in float.
    """

    share: float
    predicted_db: float | None
    sqnr_db: float | None
    cosine: float | None
    left: int


@dataclass(frozen=True)
class RecordedSearch:
    """A mixed-precision search in short: the SQNR that was asked for, the frontier, and what was chosen."""

    floor_db: float | None
    frontier: tuple[SearchPoint, ...]
    chosen: SearchPoint


@dataclass(frozen=True)
class QuantizationRecord:
    """One graph. method, dataset, samples: of the calibration.  quantized: how many nodes compute in `precision`.

    macs_share: of the multiplications with weights; None where there are none.  tensors: the worst first.
    choice: of a search, if there was one.
    """

    format: int
    precision: str
    method: str
    samples: int
    dataset: str
    quantized: int
    macs_share: float | None
    tensors: tuple[QuantizedTensor, ...]
    left: tuple[FloatNode, ...]
    choice: RecordedSearch | None
