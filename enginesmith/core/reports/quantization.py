"""The quantization record of one int8 or fp8 graph: the error of each quantized tensor, and the nodes left in float.

`pipeline.quantization.record` makes it; a registry keeps it as JSON (`enginesmith.core.codec`). SQNR is in decibels.
"""

from dataclasses import dataclass, field
from typing import Annotated

from enginesmith.core.codec import OMIT_NONE
from enginesmith.core.constraints import Format

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
    """The quantization of one tensor. role: 'activation' or 'weight'.  readers: nodes that consume it.

    range: smallest and largest representable value; of an int8 weight, what its scheme uses.  scale: of a weight the
    largest channel's.  seen: extremes of the float values.  clipped: share of the values that saturate.  sqnr_db: of
    quantizing this tensor alone; None without loss, or not measured.  measured: 'histogram' (over all samples), 'rows'
    (over some rows of a smoothed activation) or 'weight' (against the float weight, value by value).
    histogram: of the worst activations.
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
    """A point of the frontier of a mixed-precision search. share: of the weighted multiplications in int8.

    predicted_db: SQNR predicted from the single groups' errors.  sqnr_db, cosine: measured on the whole model, or None.
    left: number of groups that stay in float.
    """

    share: float
    predicted_db: float | None
    sqnr_db: float | None
    cosine: float | None
    left: int


@dataclass(frozen=True)
class RecordedSearch:
    """The summary of a mixed-precision search. floor_db: the required SQNR.  chosen: the point that was built."""

    floor_db: float | None
    frontier: tuple[SearchPoint, ...]
    chosen: SearchPoint


@dataclass(frozen=True)
class QuantizationRecord:
    """The quantization of one graph. method, dataset, samples: of the calibration.  quantized: number of nodes that
    compute in `precision`.

    macs_share: share of the multiplications with weights that `precision` does; None where there are none.
    tensors: the worst first.  left: nodes that stay in float.  choice: the mixed-precision search, if there was one.
    """

    format: Annotated[int, Format(1)]
    precision: str
    method: str
    samples: int
    dataset: str
    quantized: int
    macs_share: float | None
    tensors: tuple[QuantizedTensor, ...]
    left: tuple[FloatNode, ...]
    choice: RecordedSearch | None
