"""Mixed-precision search: as much of the compute in int8 as a quality floor allows.

Groups are ranked by damage per multiplication. Those at the top are left in float until the whole model, quantized and
run on samples that no setting was fitted on, reaches the floor; then each of them is taken back where the floor still
holds. Damages of single groups add up closely enough to say which to try; what decides is the run of the whole model.

A floor that cannot do its work ends in an error: one that nothing can miss, and one that nothing reaches.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from onnx import ModelProto

from enginery.core.errors import DataError
from enginery.core.types import QuantizationScheme, Tensors
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.schemes.qdq import carries_qdq, quantize_int8, usable_sites
from pipeline.quantization.search.choice import FrontierPoint, GroupDamage, MixedPrecisionChoice, in_json
from pipeline.quantization.search.graph_limits import GraphJudge, with_margin
from pipeline.quantization.search.latency import PairedRounds, Timing, benchmark_until_decided
from pipeline.quantization.search.quality import GraphLimits, Quality, SearchFloor
from pipeline.quantization.search.sensitivity import Answers, SweepCost, decides, quality, sweep
from pipeline.quantization.settings.fit import STRENGTHS, fit, fit_convolutions
from pipeline.quantization.settings.groups import SmoothingGroup, StatisticsWork, find_groups, gather, matrices
from pipeline.quantization.settings.runs import Run, RunLabels, SessionRunner, divide_runs
from pipeline.quantization.settings.smooth import SmoothingPlan, apply_plans, folds
from validation.reporting.quantization import decibels_text

# Groups that are tried to be swapped, each by two runs of the whole model.
_MOST_SWAPS = 8
# Groups that are tried to be taken back by a search that nobody asked for, each by a run of the whole model.
_MOST_REFILLS = 16


def choose(
    model: ModelProto,
    ranges: Ranges,
    scheme: QuantizationScheme,
    runs: Iterable[Run],
    floor: SearchFloor | None = None,
    smoothing: Literal["none", "auto"] = "auto",
    overrides: Mapping[str, OverridePrecision] | None = None,
    race: PairedRounds | None = None,
    labels: RunLabels | None = None,
) -> MixedPrecisionChoice:
    """What to quantize, with which strength of smoothing, clipping and rounding, found on calibration samples.

    runs: (number of samples, inputs) of one run after the other; the first few hundred samples are used.
    overrides: node -> precision that a person decided on.  race: where given, what int8 does not make faster is left in
    float, but for nodes that a person wants in int8.  labels: for a floor of accuracy. Raises ModelError when the model
    does not run on the samples, DataError when the labels do not fit them, or when not even the float model holds the
    floor.
    """
    floor = floor and with_margin(floor)
    scheme_fp32, limits = replace(scheme, float_precision="fp32"), floor.graph if floor else None
    trial = _Trial.of(model, ranges, scheme_fp32, runs, smoothing, overrides or {}, labels, limits)
    if floor is not None and floor.argmax_agreement is not None:
        _check_decisions(trial.expected[0])
    tried: dict[int, FrontierPoint] = {}
    depth = 0 if floor is None else _find_shallowest(trial, floor, tried)
    point = trial.point(trial.ranked[:depth]) if depth not in tried else tried[depth]
    if floor is not None:
        point = swap_groups(trial, floor, refill_groups(trial, floor, point))
        _check_reached(floor, trial.qualities[point.left])
    if race is not None:
        point = _leave_slow_groups(trial, scheme, point, race)
    frontier = [tried.get(depth) or trial.predict(trial.ranked[:depth]) for depth in range(len(trial.ranked) + 1)]
    return trial.choose(point, tuple(frontier))


def _leave_slow_groups(
    trial: "_Trial", scheme: QuantizationScheme, point: FrontierPoint, race: PairedRounds
) -> FrontierPoint:
    """The point with what int8 does not make faster in float too; groups with the least compute are tried first.

    A group that is left in float is so while the next ones are tried.
    """
    forced = {node for node, precision in trial.overrides.items() if precision == "int8"}
    tried = [name for name, group in trial.groups.items() if name not in point.left and not forced & set(group.nodes)]
    tried.sort(key=lambda name: trial.macs[name])
    left, current = point.left, trial.write(point.left, scheme)
    for name in tried:
        other = trial.write((*left, name), scheme)
        trial.timings[name] = benchmark_until_decided(race(current, other))
        if trial.timings[name].lost:
            left, current = (*left, name), other
    return trial.point(left)


def _check_decisions(outputs: Tensors) -> None:
    """Raises DataError when no output of the model holds decisions: a floor of these would hold whatever int8 does."""
    if not any(decides(values) for values in outputs.values()):
        raise DataError(
            "quantization.floor.argmax_agreement: every output has one value along its last axis, whose argmax cannot "
            "change; ask for sqnr_db or cosine"
        )


def _check_reached(floor: SearchFloor, found: Quality) -> None:
    """Raises DataError when the search ended without reaching the floor: not even the float model (found) does."""
    if not found.finite:
        raise DataError(
            "quantization.floor cannot be judged: the float model itself gives NaN or infinities on the calibration "
            "samples; correct the samples or the model"
        )
    if floor.accuracy is not None and (found.accuracy is None or found.accuracy < floor.accuracy):
        own = "was not measured" if found.accuracy is None else f"has {found.accuracy:.4f} on the calibration samples"
        raise DataError(
            f"quantization.floor.accuracy {floor.accuracy:g} is out of reach: the float model itself {own}; "
            "ask for less, or correct calibration.labels"
        )


def _find_shallowest(trial: "_Trial", floor: SearchFloor, tried: dict[int, FrontierPoint]) -> int:
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


def refill_groups(trial: "_Trial", floor: SearchFloor, point: FrontierPoint) -> FrontierPoint:
    """The point with groups taken back into int8 that the floor allows, those that compute most first.

    For the limits of a graph, which nobody asked to search for, `_MOST_REFILLS` are tried.
    """
    for group in sorted(point.left, key=lambda name: -trial.macs[name])[: _MOST_REFILLS if floor.graph else None]:
        left = tuple(name for name in point.left if name != group)
        if floor.sqnr_db is not None and trial.predicted_db(left) < floor.sqnr_db:
            continue
        other = trial.point(left)
        if floor.holds(trial.qualities[other.left]):
            point = other
    return point


def swap_groups(trial: "_Trial", floor: SearchFloor, point: FrontierPoint) -> FrontierPoint:
    """The point with groups taken back into int8 and smaller ones left in float instead, which together compute less.

    Only for a floor in decibels, which can be predicted: a group is often more than what is missing.
    """
    if floor.sqnr_db is None:
        return point
    for group in sorted(point.left, key=lambda name: -trial.macs[name])[:_MOST_SWAPS]:
        left = _smaller(trial, floor.sqnr_db, tuple(name for name in point.left if name != group), trial.macs[group])
        if left is not None:
            other = trial.point(left)
            if floor.holds(trial.qualities[other.left]):
                point = other
    return point


def _smaller(trial: "_Trial", sqnr_db: float, left: tuple[str, ...], most: float) -> tuple[str, ...] | None:
    """`left` with more groups, of less than `most` multiplications together, that should reach the floor; or None."""
    start = trial.point(left)
    # What interactions cost beyond the sum of damages is taken to stay the same over so small a step.
    beyond = trial.predicted_db(left) - start.sqnr_db if start.sqnr_db is not None else 0.0
    spent = 0.0
    for name in trial.ranked:
        if name in left or spent + trial.macs[name] >= most:
            continue
        left, spent = (*left, name), spent + trial.macs[name]
        if trial.predicted_db(left) - beyond >= sqnr_db:
            return left
    return None


@dataclass
class _Trial:
    """What is known of the model while points are tried.

    plans: by group, how its nodes are quantized.  work: by node.  alone: by group, the quality with only it quantized.
    runs, expected: inputs and the float model's outputs to judge on.  limits: of the graph's own checks.
    """

    model: ModelProto
    ranges: Ranges
    scheme: QuantizationScheme
    overrides: Mapping[str, OverridePrecision]
    groups: Mapping[str, SmoothingGroup]
    plans: Mapping[str, SmoothingPlan]
    work: Mapping[str, StatisticsWork]
    alone: Mapping[str, Quality]
    cost: SweepCost
    runs: Sequence[Tensors]
    expected: Sequence[Tensors]
    answers: Answers | None = None
    limits: GraphLimits | None = None
    qualities: dict[tuple[str, ...], Quality] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: ModelProto,
        ranges: Ranges,
        scheme: QuantizationScheme,
        runs: Iterable[Run],
        smoothing: str,
        overrides: Mapping[str, OverridePrecision],
        labels: RunLabels | None,
        limits: GraphLimits | None,
    ) -> "_Trial":
        graph = prepare_model(model)
        sites = () if carries_qdq(model) else usable_sites(graph, ranges, scheme.activation, overrides)[0]
        groups = find_groups(graph, sites)
        fitted, judging = divide_runs(runs, filled=limits is not None)
        judged = [run.inputs for run in judging]
        answers = Answers(labels.output, [labels.of(run) for run in judging]) if labels else None
        statistics, work = gather(graph, groups, fitted)
        weights = matrices(graph, groups)
        strengths = STRENGTHS if smoothing == "auto" else (None,)
        kind, levels = scheme.activation, scheme.weight_levels
        plans = {
            group.activation: fit(group, statistics.pop(group.activation), weights, kind, strengths, levels)
            for group in groups
            if group.mixes
        }
        plans |= fit_convolutions(graph, groups, ranges, kind, fitted, levels)
        alone, cost = sweep(graph, groups, plans, ranges, scheme, judged)
        plain = SessionRunner(graph)
        expected = [plain.run(inputs) for inputs in judged]
        by_name = {group.activation: group for group in groups}
        return cls(
            graph, ranges, scheme, overrides, by_name, plans, work, alone, cost, judged, expected, answers, limits
        )

    @property
    def macs(self) -> dict[str, float]:
        """Multiplications by group."""
        return {name: sum(self.work[node].macs for node in group.nodes) for name, group in self.groups.items()}

    @property
    def ranked(self) -> tuple[str, ...]:
        """Groups by damage per multiplication, worst first."""
        macs = self.macs
        return tuple(sorted(self.groups, key=lambda name: (-_noise(self.alone[name]) / max(macs[name], 1e-9), name)))

    def predicted_db(self, left: Sequence[str]) -> float:
        """The SQNR in decibels to which the damages of single groups add up."""
        return Quality(sum(_noise(self.alone[name]) for name in self.groups if name not in left), 1.0).sqnr_db

    def predict(self, left: Sequence[str]) -> FrontierPoint:
        """The point, with the quality to which the damages of single groups add up."""
        macs = self.macs
        total = sum(macs.values())
        share = 1 - sum(macs[name] for name in left) / total if total else 0.0
        return FrontierPoint(share, tuple(left), self.predicted_db(left))

    def point(self, left: Sequence[str]) -> FrontierPoint:
        """The point, with the quality of the whole model, quantized so and run."""
        left = tuple(left)
        if left not in self.qualities:
            runner = SessionRunner(self.write(left, self.scheme), optimized=False)
            answered = (runner.run(inputs) for inputs in self.runs)
            judge = GraphJudge(self.limits, self.runs) if self.limits else None
            self.qualities[left] = quality(self.expected, answered, self.answers, judge)
        found = self.qualities[left]
        return replace(
            self.predict(left),
            sqnr_db=found.sqnr_db,
            cosine=found.cosine,
            argmax_agreement=found.argmax_agreement,
            accuracy=found.accuracy,
        )

    def apply_other_plans(self, left: Sequence[str]) -> tuple[ModelProto, Ranges]:
        """The model with the plans of all other groups carried out."""
        return apply_plans(self.model, [plan for name, plan in self.plans.items() if name not in left], self.ranges)

    def write(self, left: Sequence[str], scheme: QuantizationScheme) -> ModelProto:
        """The graph with these groups in float and all others in int8."""
        changed, ranges = self.apply_other_plans(left)
        in_float: dict[str, OverridePrecision] = {node: "fp16" for name in left for node in self.groups[name].nodes}
        return quantize_int8(changed, ranges, scheme, {**self.overrides, **in_float})[0]

    def choose(self, point: FrontierPoint, frontier: tuple[FrontierPoint, ...]) -> MixedPrecisionChoice:
        """The result for a point of the frontier."""
        model, ranges = self.apply_other_plans(point.left)
        rows = tuple(self._row(name, point) for name in self.ranked)
        reasons = {node: self._reason(name) for name in point.left for node in self.groups[name].nodes}
        plans = [plan for name, plan in self.plans.items() if name not in point.left]
        reads = {node.name: node.input[0] for node in model.graph.node if node.input}
        smoothed = {reads[plan.group.nodes[0]]: plan.seen for plan in plans if plan.seen}
        rounded = {node: value for plan in plans for node, value in plan.weight_db.items()}
        return MixedPrecisionChoice(model, ranges, reasons, rows, frontier, point, self.cost, smoothed, rounded)

    def _reason(self, name: str) -> str:
        if name in self.timings:
            return self.timings[name].reason
        what = "floor" if self.limits is None else "graph's limits"
        return f"the {what}: quantized alone it leaves {decibels_text(in_json(self.alone[name].sqnr_db))}"

    def _row(self, name: str, point: FrontierPoint) -> GroupDamage:
        group, plan, timing = self.groups[name], self.plans.get(name), self.timings.get(name)
        works = [self.work[node] for node in group.nodes]
        macs, total = sum(work.macs for work in works), sum(self.macs.values())
        return GroupDamage(
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
            timing.int8_ms if timing else None,
            timing.float_ms if timing else None,
        )


def _noise(found: Quality) -> float:
    return found.noise if found.finite else math.inf
