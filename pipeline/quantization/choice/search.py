"""Keeps as much of the compute in int8 as a quality floor allows.

Groups are ranked by damage per multiplication. Those at the top are left in float until the whole model, quantized and
run on samples that no setting was fitted on, reaches the floor; then each of them is taken back where the floor still
holds. Damages of single groups add up closely enough to say where to look; what counts is the run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from onnx import ModelProto

from builders.types import QuantizationScheme, Tensors
from pipeline.quantization.calibration.ranges import Ranges
from pipeline.quantization.choice.convolutions import fit_convolutions
from pipeline.quantization.choice.fit import STRENGTHS, fit
from pipeline.quantization.choice.groups import Group, find_groups, matrices
from pipeline.quantization.choice.runs import Run, divided
from pipeline.quantization.choice.sensitivity import Cost, Quality, quality, sweep
from pipeline.quantization.choice.sessions import Runner
from pipeline.quantization.choice.smooth import Plan, applied, folds
from pipeline.quantization.choice.statistics import Work, gather
from pipeline.quantization.graphs.sites import prepared
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.schemes.qdq import carries_qdq, quantize_int8, usable_sites


@dataclass(frozen=True)
class Floor:
    """The least quality that is good enough; None asks for nothing."""

    sqnr_db: float | None = None
    cosine: float | None = None

    def holds(self, found: Quality) -> bool:
        """Whether a measured quality is good enough. NaN and infinities never are."""
        return (
            found.finite
            and (self.sqnr_db is None or found.sqnr_db >= self.sqnr_db)
            and (self.cosine is None or found.cosine >= self.cosine)
        )


@dataclass(frozen=True)
class Row:
    """One group in the ranked table. sqnr_db: of the model's outputs when only this group is quantized."""

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


@dataclass(frozen=True)
class Point:
    """One point of the frontier: the share of the weighted multiplications in int8, and the quality that gives.

    predicted_db: from the damages of single groups.  sqnr_db, cosine: of the whole model, where it was run.
    """

    share: float
    left: tuple[str, ...]
    predicted_db: float
    sqnr_db: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class Chosen:
    """What to quantize and how.

    model: prepared, with outliers moved and weights rounded, in float.  ranges: for it.  left: nodes that stay in
    float, with the reason.  rows: the groups, most damage per multiplication first.  frontier: from all in int8 down.
    point: what was chosen.  cost: of the sweep.
    """

    model: ModelProto
    ranges: Ranges
    left: Mapping[str, str]
    rows: tuple[Row, ...]
    frontier: tuple[Point, ...]
    point: Point
    cost: Cost

    @property
    def summary(self) -> str:
        """One line for people."""
        point = self.point
        quality = f"{point.sqnr_db:.1f} dB, cosine {point.cosine:.4f}" if point.sqnr_db is not None else "not run"
        return f"{point.share:.1%} of the weighted multiplications in int8: {quality} on calibration samples"

    def to_json(self) -> dict[str, Any]:
        """Everything but model and ranges, as a JSON object; an infinite SQNR is null."""
        return {
            "left": dict(self.left),
            "groups": [_finite(asdict(row)) for row in self.rows],
            "frontier": [_finite(asdict(point)) for point in self.frontier],
            "chosen": _finite(asdict(self.point)),
            "cost": {**asdict(self.cost), "inferences_per_group": self.cost.per_group},
        }


def choose(
    model: ModelProto,
    ranges: Ranges,
    scheme: QuantizationScheme,
    runs: Iterable[Run],
    floor: Floor | None = None,
    smoothing: Literal["none", "auto"] = "auto",
    overrides: Mapping[str, OverridePrecision] | None = None,
) -> Chosen:
    """Search strengths, clipping, rounding and exclusions for a model, on calibration samples.

    runs: (number of samples, inputs) of one run after the other; the first few hundred samples are used.
    overrides: nodes that a person decided on. Raises ModelError when the model does not run on the samples.
    """
    trial = _Trial.of(model, ranges, replace(scheme, float_precision="fp32"), runs, smoothing, overrides or {})
    tried: dict[int, Point] = {}
    depth = 0 if floor is None else _shallowest(trial, floor, tried)
    point = trial.point(trial.ranked[:depth]) if depth not in tried else tried[depth]
    if floor is not None:
        point = _refilled(trial, floor, point)
    frontier = [tried.get(depth) or trial.predicted(trial.ranked[:depth]) for depth in range(len(trial.ranked) + 1)]
    return trial.chosen(point, tuple(frontier))


def _shallowest(trial: "_Trial", floor: Floor, tried: dict[int, Point]) -> int:
    """The least number of top-ranked groups to leave in float, by bisection; every step runs the whole model."""

    def holds(depth: int) -> bool:
        if depth not in tried:
            tried[depth] = trial.point(trial.ranked[:depth])
        return floor.holds(trial.qualities[tried[depth].left])

    low, high = 0, len(trial.ranked)
    while low < high:
        middle = (low + high) // 2 if 0 in tried else 0
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    holds(low)
    return low


def _refilled(trial: "_Trial", floor: Floor, point: Point) -> Point:
    """Take groups back that the floor allows, those that compute most first."""
    for group in sorted(point.left, key=lambda name: -trial.macs[name]):
        left = tuple(name for name in point.left if name != group)
        if floor.sqnr_db is not None and trial.predicted(left).predicted_db < floor.sqnr_db:
            continue
        other = trial.point(left)
        if floor.holds(trial.qualities[other.left]):
            point = other
    return point


@dataclass
class _Trial:
    """Everything that is known about the model while points are tried."""

    model: ModelProto
    ranges: Ranges
    scheme: QuantizationScheme
    overrides: Mapping[str, OverridePrecision]
    groups: Mapping[str, Group]
    plans: Mapping[str, Plan]
    work: Mapping[str, Work]
    alone: Mapping[str, Quality]
    cost: Cost
    runs: Sequence[Tensors]
    expected: Sequence[Tensors]
    qualities: dict[tuple[str, ...], Quality] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: ModelProto,
        ranges: Ranges,
        scheme: QuantizationScheme,
        runs: Iterable[Run],
        smoothing: str,
        overrides: Mapping[str, OverridePrecision],
    ) -> "_Trial":
        graph = prepared(model)
        sites = () if carries_qdq(model) else usable_sites(graph, ranges, scheme.activation, overrides)[0]
        groups = find_groups(graph, sites)
        fitted, judged = divided(runs)
        statistics, work = gather(graph, groups, fitted)
        weights = matrices(graph, groups)
        strengths = STRENGTHS if smoothing == "auto" else (None,)
        plans = {
            group.activation: fit(group, statistics.pop(group.activation), weights, scheme.activation, strengths)
            for group in groups
            if group.mixes
        }
        plans |= fit_convolutions(graph, groups, ranges, scheme.activation, fitted)
        alone, cost = sweep(graph, groups, plans, ranges, scheme, judged)
        plain = Runner(graph)
        expected = [plain.run(inputs) for inputs in judged]
        by_name = {group.activation: group for group in groups}
        return cls(graph, ranges, scheme, overrides, by_name, plans, work, alone, cost, judged, expected)

    @property
    def macs(self) -> dict[str, float]:
        """Multiplications by group."""
        return {name: sum(self.work[node].macs for node in group.nodes) for name, group in self.groups.items()}

    @property
    def ranked(self) -> tuple[str, ...]:
        """Groups by damage per multiplication, worst first."""
        macs = self.macs
        return tuple(sorted(self.groups, key=lambda name: (-_noise(self.alone[name]) / max(macs[name], 1e-9), name)))

    def share(self, left: Sequence[str]) -> float:
        """Share of the weighted multiplications in int8."""
        macs = self.macs
        total = sum(macs.values())
        return 1 - sum(macs[name] for name in left) / total if total else 0.0

    def predicted(self, left: Sequence[str]) -> Point:
        """A point as the damages of single groups add up to it."""
        noise = sum(_noise(self.alone[name]) for name in self.groups if name not in left)
        return Point(self.share(left), tuple(left), Quality(noise, 1.0).sqnr_db)

    def point(self, left: Sequence[str]) -> Point:
        """A point as the whole model, quantized so, gives it."""
        left = tuple(left)
        if left not in self.qualities:
            changed, ranges = self.changed(left)
            written, _ = quantize_int8(changed, ranges, self.scheme, {**self.overrides, **self.nodes(left)})
            runner = Runner(written, optimized=False)
            self.qualities[left] = quality(self.expected, (runner.run(inputs) for inputs in self.runs))
        found = self.qualities[left]
        return replace(self.predicted(left), sqnr_db=found.sqnr_db, cosine=found.cosine)

    def changed(self, left: Sequence[str]) -> tuple[ModelProto, Ranges]:
        """The model with the plans of all other groups carried out."""
        return applied(self.model, [plan for name, plan in self.plans.items() if name not in left], self.ranges)

    def nodes(self, left: Sequence[str]) -> dict[str, OverridePrecision]:
        """The nodes of groups, as overrides that leave them in float."""
        return {node: "fp16" for name in left for node in self.groups[name].nodes}

    def chosen(self, point: Point, frontier: tuple[Point, ...]) -> Chosen:
        """The result, once a point is decided on."""
        model, ranges = self.changed(point.left)
        rows = tuple(self._row(name, point) for name in self.ranked)
        reasons = {node: self._reason(name) for name in point.left for node in self.groups[name].nodes}
        return Chosen(model, ranges, reasons, rows, frontier, point, self.cost)

    def _reason(self, name: str) -> str:
        return f"the floor: quantized alone it leaves {self.alone[name].sqnr_db:.1f} dB"

    def _row(self, name: str, point: Point) -> Row:
        group, plan = self.groups[name], self.plans.get(name)
        works = [self.work[node] for node in group.nodes]
        macs, total = sum(work.macs for work in works), sum(self.macs.values())
        return Row(
            name,
            group.nodes,
            group.sites[0].op_type,
            macs,
            macs / total if total else 0.0,
            sum(work.weight_bytes for work in works),
            self.alone[name].sqnr_db,
            plan.strength if plan else None,
            plan.clip if plan else 1.0,
            bool(plan and plan.factors is not None and folds(self.model, group)),
            name not in point.left,
        )


def _noise(found: Quality) -> float:
    return found.noise if found.finite else math.inf


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
