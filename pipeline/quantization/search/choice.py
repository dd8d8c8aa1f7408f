"""The result of a mixed-precision search: the ranked groups, the frontier, and what was chosen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from onnx import ModelProto

from enginesmith.core.reports.quantization import RecordedSearch, SearchPoint
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.search.quality import SearchFloor
from pipeline.quantization.search.sensitivity import SweepCost
from pipeline.quantization.statistics.observations import TensorStatistics
from validation.reporting.quantization import BROKEN_DB, decibels_text


@dataclass(frozen=True)
class GroupDamage:
    """One group in the ranked table. sqnr_db: of the model's outputs when only this group is quantized.

    int8_ms, float_ms: what the whole model takes with this group in int8 and in float, where that was measured.
    """

    activation: str
    nodes: tuple[str, ...]
    op_type: str
    macs: float
    share: float
    weight_bytes: int
    sqnr_db: float | None
    strength: float | None
    clip: float
    folded: bool
    kept: bool
    int8_ms: float | None = None
    float_ms: float | None = None


@dataclass(frozen=True)
class FrontierPoint:
    """One point of the frontier: the share of the weighted multiplications in int8, and the quality that gives.

    left: groups that stay in float.  predicted_db: from the damages of single groups.  The others: of the whole model,
    where it was run; accuracy where there are labels.
    """

    share: float
    left: tuple[str, ...]
    predicted_db: float | None
    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class MixedPrecisionChoice:
    """What to quantize and how.

    model: prepared, with outliers moved and weights rounded, in float.  ranges: for it.  left: nodes that stay in
    float, with the reason.  rows: the groups, most damage per multiplication first.  frontier: from all in int8 down.
    point: what was chosen.  cost: of the sweep.  smoothed: what the smoothed activations hold, by the names that they
    have in `model`.  weight_db: node -> SQNR of its rounded weight.  ended: how far the search got when its time was
    over; '' where it was done.
    """

    model: ModelProto
    ranges: Ranges
    left: Mapping[str, str]
    rows: tuple[GroupDamage, ...]
    frontier: tuple[FrontierPoint, ...]
    point: FrontierPoint
    cost: SweepCost
    smoothed: Mapping[str, TensorStatistics] = field(default_factory=dict)
    weight_db: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""

    @property
    def summary(self) -> str:
        """The chosen point in one line of text."""
        point = self.point
        quality = "not run"
        if point.sqnr_db is not None:
            quality = f"{decibels_text(in_json(point.sqnr_db))}, cosine {point.cosine:.4f}"
        quality += f", accuracy {point.accuracy:.4f}" if point.accuracy is not None else ""
        ended = f"; the search {self.ended}" if self.ended else ""
        return f"{point.share:.1%} of the weighted multiplications in int8: {quality} on calibration samples{ended}"

    def document(self, floor: SearchFloor | None) -> "SearchDocument":
        """Everything but model and ranges, and the floor that was asked for, with SQNR `in_json`."""
        weight_db = {node: in_json(value) for node, value in self.weight_db.items()}
        groups = tuple(replace(row, sqnr_db=in_json(row.sqnr_db)) for row in self.rows)
        frontier = tuple(map(_point_in_json, self.frontier))
        return SearchDocument(self.left, groups, frontier, _point_in_json(self.point), weight_db, self.cost, floor)


@dataclass(frozen=True)
class SearchDocument:
    """The result of a search, as a registry keeps it. Fields as in `MixedPrecisionChoice`; chosen: its `point`."""

    left: Mapping[str, str]
    groups: tuple[GroupDamage, ...]
    frontier: tuple[FrontierPoint, ...]
    chosen: FrontierPoint
    weight_db: Mapping[str, float | None]
    cost: SweepCost
    floor: SearchFloor | None

    @property
    def recorded(self) -> RecordedSearch:
        """The frontier for a quantization record, without the names of the groups."""
        floor_db = self.floor.sqnr_db if self.floor else None
        *frontier, chosen = (
            SearchPoint(found.share, found.predicted_db, found.sqnr_db, found.cosine, len(found.left))
            for found in (*self.frontier, self.chosen)
        )
        return RecordedSearch(floor_db, tuple(frontier), chosen)


def in_json(sqnr_db: float | None) -> float | None:
    """Decibels as JSON can hold them: null for no loss, `BROKEN_DB` for outputs that are broken."""
    if sqnr_db is None or sqnr_db == math.inf:
        return None
    return sqnr_db if math.isfinite(sqnr_db) else BROKEN_DB


def _point_in_json(found: FrontierPoint) -> FrontierPoint:
    predicted_db, sqnr_db, cosine = map(in_json, (found.predicted_db, found.sqnr_db, found.cosine))
    return replace(found, predicted_db=predicted_db, sqnr_db=sqnr_db, cosine=cosine)
