"""What the search gives: the floor it kept, the ranked groups, the frontier, and what was chosen."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onnx import ModelProto

from pipeline.quantization.ranges import Ranges
from pipeline.quantization.search.sensitivity import Cost
from pipeline.quantization.statistics.observations import Seen
from validation.reporting.pictures import BROKEN_DB, decibels_text


@dataclass(frozen=True)
class Row:
    """One group in the ranked table. sqnr_db: of the model's outputs when only this group is quantized.

    int8_ms, float_ms: what the whole model takes with this group in int8 and in float, where that was measured.
    """

    activation: str
    nodes: tuple[str, ...]
    op_type: str
    macs: float
    share: float
    weight_bytes: int
    sqnr_db: float
    strength: float | None
    clip: float
    folded: bool
    kept: bool
    int8_ms: float | None = None
    float_ms: float | None = None


@dataclass(frozen=True)
class Point:
    """One point of the frontier: the share of the weighted multiplications in int8, and the quality that gives.

    predicted_db: from the damages of single groups.  The others: of the whole model, where it was run; accuracy where
    there are labels.
    """

    share: float
    left: tuple[str, ...]
    predicted_db: float
    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class Chosen:
    """What to quantize and how.

    model: prepared, with outliers moved and weights rounded, in float.  ranges: for it.  left: nodes that stay in
    float, with the reason.  rows: the groups, most damage per multiplication first.  frontier: from all in int8 down.
    point: what was chosen.  cost: of the sweep.  smoothed: what the smoothed activations hold, by the names that they
    have in `model`.  weight_db: node -> SQNR of its rounded weight.
    """

    model: ModelProto
    ranges: Ranges
    left: Mapping[str, str]
    rows: tuple[Row, ...]
    frontier: tuple[Point, ...]
    point: Point
    cost: Cost
    smoothed: Mapping[str, Seen] = field(default_factory=dict)
    weight_db: Mapping[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One line for people."""
        point = self.point
        quality = (
            f"{decibels_text(in_json(point.sqnr_db))}, cosine {point.cosine:.4f}"
            if point.sqnr_db is not None
            else "not run"
        )
        quality += f", accuracy {point.accuracy:.4f}" if point.accuracy is not None else ""
        return f"{point.share:.1%} of the weighted multiplications in int8: {quality} on calibration samples"

    def to_json(self) -> dict[str, Any]:
        """Everything but model and ranges, as a JSON object, with SQNR `in_json`."""
        return {
            "left": dict(self.left),
            "groups": [_finite(asdict(row)) for row in self.rows],
            "frontier": [_finite(asdict(point)) for point in self.frontier],
            "chosen": _finite(asdict(self.point)),
            "weight_db": _finite(dict(self.weight_db)),
            "cost": {**asdict(self.cost), "inferences_per_group": self.cost.per_group},
        }


def in_json(sqnr_db: float | None) -> float | None:
    """Decibels as JSON can hold them: null for no loss, `BROKEN_DB` for outputs that are broken."""
    if sqnr_db is None or sqnr_db == math.inf:
        return None
    return sqnr_db if math.isfinite(sqnr_db) else BROKEN_DB


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: in_json(value) if isinstance(value, float) else value for name, value in values.items()}
