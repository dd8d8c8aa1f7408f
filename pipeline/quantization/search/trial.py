"""Trials of a mixed-precision search, and its choice."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

from onnx import ModelProto

from enginesmith.core.reports.breakdown import RecordedSearch, SearchPoint
from enginesmith.core.text import format_plain
from enginesmith.core.types import Dim, Precision, QuantizationScheme, Shape, Tensors, TensorSpec
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.block_floats import FORMATS, FP8, find_block_sites
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.schemes.qdq import carries_qdq, usable_sites
from pipeline.quantization.schemes.write import write_searched
from pipeline.quantization.search.costs import CostModel
from pipeline.quantization.search.graph_limits import GraphJudge, deal, make_edges
from pipeline.quantization.search.latency import PATIENCE, PairedRounds, Timing
from pipeline.quantization.search.quality import GraphLimits, Quality, SearchClock, SearchFloor
from pipeline.quantization.search.rates import Peaks
from pipeline.quantization.search.sensitivity import Answers, SweepCost, quality, sweep
from pipeline.quantization.settings.fit import fit
from pipeline.quantization.settings.groups import (
    SmoothingGroup,
    Statistics,
    StatisticsWork,
    find_biases,
    find_groups,
    gather,
    matrices,
)
from pipeline.quantization.settings.runs import (
    Run,
    RunLabels,
    SessionRunner,
    divide_runs,
    find_mask,
    with_weights_inside,
    with_weights_outside,
)
from pipeline.quantization.settings.smooth import (
    STRENGTHS,
    FittedKind,
    SmoothingPlan,
    apply_plans,
    find_folds,
    fit_convolutions,
)
from pipeline.quantization.statistics.observations import TensorStatistics
from validation.comparison.selections import selected_of
from validation.latency.measurement.loop import at_tuned_sizes
from validation.reporting.quantization import BROKEN_DB, decibels_text


@dataclass(frozen=True)
class GroupDamage:
    """One group in the ranked table. sqnr_db: of the model's outputs when only this group is quantized.

    int8_ms, float_ms: what the whole model takes with this group in int8 and in float, where that was measured.
    activation, nodes, op_type: the tensor that is read, and who reads it.  macs, share: multiplications, and their part
    of all.
    strength, clip: as in `SmoothingPlan`.  folded: whether other nodes take the smoothing's factors.
    kept: whether it is quantized.
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
    """One point of the frontier: the share of the multiplications with weights in int8, and the quality that gives.

    left: groups that stay in float.  predicted_db: from the damages of single groups.  The others: of the whole model,
    where it was run; accuracy where there are labels.
    ms: of a run, measured or modelled.  weight_bytes: of its weights.
    """

    share: float
    left: tuple[str, ...]
    predicted_db: float | None
    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None
    ms: float | None = None
    weight_bytes: int | None = None


@dataclass(frozen=True)
class MixedPrecisionChoice:
    """What to quantize and how.

    model: prepared, with outliers moved and weights rounded, in float.  ranges: for it.  left: nodes that stay in
    float, with the reason.  rows: the groups, most damage per multiplication first.  frontier: from all in int8 down.
    point: what was chosen.  smoothed: what the smoothed activations hold, by the names that they have in `model`.
    weight_db: node -> SQNR of its rounded weight.  ended: how far the search got when its time was over; '' where it
    was done.  table: points that were run and whose cost is known, the fastest first.  latency: where times are from.
    rule: by which `point` was chosen.
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
    precision: str = "int8"
    table: tuple[FrontierPoint, ...] = ()
    latency: str = ""
    rule: str = ""

    @property
    def summary(self) -> str:
        """The chosen point in one line of text."""
        point = self.point
        quality_text = "not run"
        if point.sqnr_db is not None:
            quality_text = f"{decibels_text(in_json(point.sqnr_db))}, cosine {point.cosine:.4f}"
        quality_text += f", accuracy {point.accuracy:.4f}" if point.accuracy is not None else ""
        if point.ms is not None:
            quality_text += f", {format_plain(point.ms)} ms ({self.latency})"
        end_text = f"; chosen by {self.rule}" if self.rule else ""
        end_text += f"; the search {self.ended}" if self.ended else ""
        share_text = f"{100 * point.share:.1f} % of the multiplications with weights"
        return f"{share_text} in {self.precision}: {quality_text} on calibration samples{end_text}"

    def document(self, floor: SearchFloor | None) -> "SearchDocument":
        """Everything but model and ranges, and the floor that was asked for, with SQNR `in_json`."""
        weight_db = {node: in_json(value) for node, value in self.weight_db.items()}
        groups = tuple(replace(row, sqnr_db=in_json(row.sqnr_db)) for row in self.rows)
        frontier, table = (tuple(map(_point_in_json, points)) for points in (self.frontier, self.table))
        chosen, more = _point_in_json(self.point), (table, self.latency, self.rule)
        return SearchDocument(self.left, groups, frontier, chosen, weight_db, self.cost, floor, *more)


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
    table: tuple[FrontierPoint, ...] = ()
    latency: str = ""
    rule: str = ""

    @property
    def recorded(self) -> RecordedSearch:
        """The frontier for a quantization record, without the names of the groups."""
        floor_db = self.floor.sqnr_db if self.floor else None
        frontier, table = (tuple(map(_record_point, points)) for points in (self.frontier, self.table))
        return RecordedSearch(floor_db, frontier, _record_point(self.chosen), table, self.latency, self.rule)


def _record_point(point: FrontierPoint) -> SearchPoint:
    fields = {name: value for name, value in vars(point).items() if name != "left"}
    return SearchPoint(**fields, left=len(point.left))


def in_json(sqnr_db: float | None) -> float | None:
    """Decibels as JSON can hold them: null for no loss, `BROKEN_DB` for outputs that are broken."""
    if sqnr_db is None or sqnr_db == math.inf:
        return None
    return sqnr_db if math.isfinite(sqnr_db) else BROKEN_DB


def _point_in_json(point: FrontierPoint) -> FrontierPoint:
    predicted_db, sqnr_db, cosine = map(in_json, (point.predicted_db, point.sqnr_db, point.cosine))
    return replace(point, predicted_db=predicted_db, sqnr_db=sqnr_db, cosine=cosine)


# Statistics, the float model's outputs and the runs to judge on say nothing about a scheme: the kinds share them, and a
# convolution's weight that two kinds round to the same levels is rounded once.

# Of those that fit settings.
_MOST_THREADS = 4


@dataclass(frozen=True)
class SearchTarget:
    """A kind of int8, or a block format, that is searched. ranges: for its activations.  scheme, precision: of the
    graphs. race: times pairs of graphs, where a group must make the model faster; None where speed does not count.
    peaks: by which costs are modelled where there is no race; None where they are not known."""

    ranges: Ranges
    scheme: QuantizationScheme
    race: PairedRounds | None = None
    precision: Precision = "int8"
    peaks: Peaks | None = None


@dataclass(frozen=True)
class FloatSide:
    """What all kinds of int8 are fitted on and compared with. model: prepared, its weights in a file, which graphs of
    it share.  fitted: runs that settings see.

    runs, expected: inputs and the float model's outputs to judge on, at the end those of `edges`, runs at other sizes.
    answers: the right ones, where there are labels.
    overrides: node -> precision.  limits: of the graph's own checks.  clock: of the search.  mask: as `find_mask`.
    tuned: shapes of the inputs at the sizes that the model is tuned for.
    """

    model: ModelProto
    fitted: Sequence[Run]
    runs: Sequence[Tensors]
    expected: Sequence[Tensors]
    answers: Answers | None
    overrides: Mapping[str, OverridePrecision]
    limits: GraphLimits | None
    clock: SearchClock
    mask: str | None = None
    edges: Sequence[Tensors] = ()
    tuned: Mapping[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: ModelProto,
        runs: Iterable[Run],
        overrides: Mapping[str, OverridePrecision],
        labels: RunLabels | None,
        limits: GraphLimits | None,
        clock: SearchClock,
        folder: Path,
        shapes: tuple[Sequence[TensorSpec], Sequence[Dim]] | None = None,
    ) -> "FloatSide":
        """From a model as it was exported and calibration runs; raises ModelError when it does not run on them.

        folder: for the weights, until the search is over.  shapes: inputs and dims, at whose edges limits are held;
        without them, costs are modelled at the sizes of the first run.
        """
        fitting_runs, judging_runs = divide_runs(runs, filled=limits is not None)
        if limits:
            judging_runs = deal(judging_runs)
            limits = replace(limits, selected=selected_of(model.graph, limits.given, limits.metrics))
        graph, judged_inputs = with_weights_outside(prepare_model(model), folder), [run.inputs for run in judging_runs]
        answers = Answers(labels.output, [labels.of(run) for run in judging_runs]) if labels else None
        plain_runner = SessionRunner(graph)
        expected_outputs = [plain_runner.run(inputs) for inputs in judged_inputs]
        edges = make_edges(judged_inputs, *shapes, expected_outputs) if limits and shapes else []
        expected_outputs += [plain_runner.run(inputs) for inputs in edges]
        tuned_inputs = at_tuned_sizes(judged_inputs[0], *shapes) if shapes else judged_inputs[0]
        tuned, mask = {name: array.shape for name, array in tuned_inputs.items()}, find_mask(plain_runner, fitting_runs)
        checked = answers, overrides, limits, clock, mask, edges, tuned
        return cls(graph, fitting_runs, judged_inputs, expected_outputs, *checked)


def open_trials(
    side: FloatSide, targets: Sequence[SearchTarget], smoothing: Literal["none", "auto"]
) -> "list[SearchTrial]":
    """A trial for each target, with settings fitted and damages measured."""
    kinds = [_find_kind(side, target) for target in targets]
    groups = [group for kind in kinds for group in kind.groups]
    statistics, node_work = gather(side.model, groups, side.fitted, side.clock.check, side.mask)
    wide_kinds = [
        replace(kind, groups=kind.groups if _leaves_fp8(target.precision) else (), levels=FP8)
        for kind, target in zip(kinds, targets, strict=True)
    ]
    plans = _fit_mixing(side, [*kinds, *wide_kinds], statistics, STRENGTHS if smoothing == "auto" else (None,))
    statistics.clear()
    convolution_plans = fit_convolutions(side.model, kinds, side.fitted, side.clock.check)
    costs = CostModel.of(side.model, side.tuned)
    trials = []
    for target, kind, mixing_plans, other_plans, eight_bit_nodes in zip(
        targets, kinds, plans[: len(kinds)], convolution_plans, plans[len(kinds) :], strict=True
    ):
        scheme, kind_plans = replace(target.scheme, float_precision="fp32"), mixing_plans | other_plans
        group_noise, cost = sweep(
            side.model, kind.groups, kind_plans, target.ranges, scheme, side.runs, side.clock.check, target.precision
        )
        trials.append(
            SearchTrial(
                side=side,
                ranges=target.ranges,
                scheme=scheme,
                precision=target.precision,
                groups={group.activation: group for group in kind.groups},
                plans=kind_plans,
                work=node_work,
                alone=group_noise,
                cost=cost,
                eight_bits=eight_bit_nodes,
                costs=costs if target.peaks else None,
                peaks=target.peaks,
            )
        )
    return trials


def _leaves_fp8(precision: Precision) -> bool:
    """Whether what a search leaves is in fp8, not in float."""
    return precision in FORMATS and FORMATS[precision].activations


def leave_all(side: FloatSide, target: SearchTarget, reason: str) -> MixedPrecisionChoice:
    """The choice of a search that ended before any point was tried: everything in float."""
    kind = _find_kind(side, target)
    reasons = dict.fromkeys((node for group in kind.groups for node in group.nodes), f"the search {reason}")
    point = FrontierPoint(0.0, tuple(group.activation for group in kind.groups), None)
    model = with_weights_inside(side.model)
    return MixedPrecisionChoice(
        model, target.ranges, reasons, (), (), point, SweepCost(0, 0.0, 0.0), ended=reason, precision=target.precision
    )


def _find_kind(side: FloatSide, target: SearchTarget) -> FittedKind:
    scheme, graph = target.scheme, side.model
    if block_format := FORMATS.get(target.precision):
        block_sites = (
            [] if carries_qdq(graph) else find_block_sites(graph, block_format, side.overrides, target.ranges)[0]
        )
        return FittedKind(find_groups(graph, block_sites), target.ranges, "int8", block_format)
    is_fp8 = target.precision == "fp8"
    grid = "fp8" if is_fp8 else scheme.activation
    sites = () if carries_qdq(graph) else usable_sites(graph, target.ranges, grid, side.overrides)[0]
    activation: Literal["int8", "uint8"] = "int8" if is_fp8 else scheme.activation  # fp8 is symmetric, as int8 is
    return FittedKind(find_groups(graph, sites), target.ranges, activation, FP8 if is_fp8 else scheme.weight_levels)


def _fit_mixing(
    side: FloatSide,
    kinds: Sequence[FittedKind],
    statistics: Mapping[str, Statistics],
    strengths: Sequence[float | None],
) -> list[dict[str, SmoothingPlan]]:
    """For each kind, the plans of the groups that multiply matrices, by activation; groups are fitted side by side."""
    groups = [group for kind in kinds for group in kind.groups]
    weights, biased_nodes = matrices(side.model, groups), find_biases(side.model, groups).keys()

    def fit_one(pair: tuple[FittedKind, SmoothingGroup]) -> SmoothingPlan:
        kind, group = pair
        side.clock.check("fitting settings")
        return fit(group, statistics[group.activation], weights, kind.activation, strengths, kind.levels, biased_nodes)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        mixing_groups = [[(kind, group) for group in kind.groups if group.mixes] for kind in kinds]
        futures = [[(group, pool.submit(fit_one, (kind, group))) for kind, group in pairs] for pairs in mixing_groups]
        return [{group.activation: future.result() for group, future in pairs} for pairs in futures]


@dataclass
class SearchTrial:
    """What is known of a kind of int8 while points are tried.

    plans: by group, how its nodes are quantized; eight_bits: in fp8, where groups are left in that.  work: by node.
    alone: by group, the noise at the outputs where only it is quantized.
    side: what is compared with.  qualities, timings: measured so far; float_ratios: of a point, the time over that of
    the float model.
    costs, peaks: model of its costs; None where these are not known.  float_ms: of the float model, once one was timed.
    """

    side: FloatSide
    ranges: Ranges
    scheme: QuantizationScheme
    precision: Precision
    groups: Mapping[str, SmoothingGroup]
    plans: Mapping[str, SmoothingPlan]
    work: Mapping[str, StatisticsWork]
    alone: Mapping[str, float]
    cost: SweepCost
    eight_bits: Mapping[str, SmoothingPlan] = field(default_factory=dict)
    qualities: dict[tuple[str, ...], Quality] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    costs: CostModel | None = None
    peaks: Peaks | None = None
    float_ratios: dict[tuple[str, ...], float] = field(default_factory=dict)
    float_ms: float | None = None

    @cached_property
    def float_model(self) -> ModelProto:
        """The graph with all groups in float, which others are timed against."""
        return with_weights_inside(self.write(self.ranked, self.scheme))

    def _formats(self, float_groups: Sequence[str]) -> dict[str, str]:
        """The formats of the products of a point, by node."""
        left_nodes = {node for name in float_groups for node in self.groups[name].nodes}
        nodes = (node for group in self.groups.values() for node in group.nodes)
        formats = {node: "fp8" if node in left_nodes else str(self.precision) for node in nodes}
        return {node: name for node, name in formats.items() if node not in left_nodes or _leaves_fp8(self.precision)}

    def time_point(self, float_groups: tuple[str, ...], race: PairedRounds) -> None:
        """Time a point and the float model in turns, `PATIENCE` rounds."""
        if float_groups in self.float_ratios or {*float_groups} == {*self.ranked}:
            return
        self.side.clock.check("timing points", len(self.float_ratios))
        model = with_weights_inside(self.write(float_groups, self.scheme))
        timing = Timing.of(list(islice(race(model, self.float_model), PATIENCE)))
        self.float_ms = self.float_ms or timing.float_ms
        self.float_ratios[float_groups] = 1 - timing.saving_ms / timing.float_ms

    @property
    def latency(self) -> str:
        """Where the times of points are from."""
        if self.float_ms is not None:
            return f"measured in {PATIENCE} rounds"
        return f"modelled, {self.peaks.source}" if self.peaks else ""

    def _cost(self, point: FrontierPoint) -> FrontierPoint:
        """The point with its cost: times measured where any point was timed, else modelled."""
        ratio = 1.0 if {*point.left} == {*self.ranked} else self.float_ratios.get(point.left)
        ms = self.float_ms and ratio and self.float_ms * ratio
        if self.costs is None or self.peaks is None:
            return replace(point, ms=ms)
        formats = self._formats(point.left)
        ms = ms if self.float_ms is not None else self.costs.estimate_ms(formats, self.peaks)
        return replace(point, ms=ms, weight_bytes=self.costs.weight_bytes(formats, self.peaks.floats))

    @cached_property
    def macs(self) -> dict[str, float]:
        """Multiplications by group."""
        return {name: sum(self.work[node].macs for node in group.nodes) for name, group in self.groups.items()}

    @cached_property
    def ranked(self) -> tuple[str, ...]:
        """Groups by damage per multiplication, worst first."""
        return tuple(sorted(self.groups, key=lambda name: (-self.alone[name] / max(self.macs[name], 1e-9), name)))

    def predicted_db(self, float_groups: Sequence[str]) -> float:
        """The SQNR in decibels to which the damages of single groups add up."""
        float_names = {*float_groups}
        return _decibels(sum(noise for name, noise in self.alone.items() if name not in float_names))

    def predict(self, float_groups: Sequence[str]) -> FrontierPoint:
        """The point, with the quality to which the damages of single groups add up."""
        total = sum(self.macs.values())
        share = 1 - sum(self.macs[name] for name in float_groups) / total if total else 0.0
        return FrontierPoint(share, tuple(float_groups), self.predicted_db(float_groups))

    def point(self, float_groups: Sequence[str]) -> FrontierPoint:
        """The point, with the quality of the whole model, quantized so and run."""
        float_groups = tuple(float_groups)
        if float_groups not in self.qualities:
            float_side = self.side
            float_side.clock.check("trials of the whole model", len(self.qualities))
            runner = SessionRunner(self.write(float_groups, self.scheme), exact=True)
            answers = (runner.run(inputs) for inputs in (*float_side.runs, *float_side.edges))
            judge = GraphJudge(float_side.limits, float_side.runs, float_side.edges) if float_side.limits else None
            self.qualities[float_groups] = quality(float_side.expected, answers, float_side.answers, judge)
        graph_quality = self.qualities[float_groups]
        figures = graph_quality.sqnr_db, graph_quality.cosine, graph_quality.argmax_agreement, graph_quality.accuracy
        predicted = self.predict(float_groups)
        return self._cost(FrontierPoint(predicted.share, predicted.left, predicted.predicted_db, *figures))

    def apply_other_plans(self, float_groups: Sequence[str]) -> tuple[ModelProto, Ranges]:
        """The model with the plans of all other groups carried out, and in these those of fp8 where there are any."""
        float_names = {*float_groups}
        plans = [plan for name, plan in self.plans.items() if name not in float_names]
        plans += [plan for name, plan in self.eight_bits.items() if name in float_names]
        return apply_plans(self.side.model, plans, self.ranges)

    def write(self, float_groups: Sequence[str], scheme: QuantizationScheme) -> ModelProto:
        """The graph with these groups in float, or fp8 (`schemes.write`), and all others in the precision; weights in
        float lie in the side's file."""
        changed_model, ranges = self.apply_other_plans(float_groups)
        precision: OverridePrecision = "fp8" if _leaves_fp8(self.precision) else "fp16"
        overrides = {
            **self.side.overrides,
            **{node: precision for name in float_groups for node in self.groups[name].nodes},
        }
        return write_searched(changed_model, self.precision, scheme, ranges, overrides)

    def choose(self, point: FrontierPoint, frontier: tuple[FrontierPoint, ...], rule: str) -> MixedPrecisionChoice:
        """The result for a point of the frontier. rule: which leaves groups in float."""
        model, ranges = self.apply_other_plans(point.left)
        folds = find_folds(self.side.model, self.groups.values())
        total, float_groups = sum(self.macs.values()), {*point.left}
        rows = tuple(self._row(name, name in folds, total, name not in float_groups) for name in self.ranked)
        reasons = {node: self._reason(name, rule) for name in point.left for node in self.groups[name].nodes}
        plans = [plan for name, plan in self.plans.items() if name not in float_groups]
        node_inputs = {node.name: node.input[0] for node in model.graph.node if node.input}
        smoothed_statistics = {node_inputs[plan.group.nodes[0]]: plan.seen for plan in plans if plan.seen}
        weight_db = {node: value for plan in plans for node, value in plan.weight_db.items()}
        model = with_weights_inside(model)
        details = (frontier, point, self.cost, smoothed_statistics, weight_db)
        return MixedPrecisionChoice(model, ranges, reasons, rows, *details, precision=self.precision)

    def _reason(self, name: str, rule: str) -> str:
        if name in self.timings and self.timings[name].lost:
            return self.timings[name].reason
        return f"{rule}: quantized alone it leaves {decibels_text(in_json(_decibels(self.alone[name])))}"

    def _row(self, name: str, folds: bool, total: float, in_int8: bool) -> GroupDamage:
        """A row of the table. total: multiplications of all groups."""
        group, plan, timing = self.groups[name], self.plans.get(name), self.timings.get(name)
        macs = self.macs[name]
        return GroupDamage(
            name,
            group.nodes,
            group.sites[0].op_type,
            macs,
            macs / total if total else 0.0,
            sum(self.work[node].weight_bytes for node in group.nodes),
            _decibels(self.alone[name]),
            plan.strength if plan else None,
            plan.clip if plan else 1.0,
            bool(plan and plan.factors is not None and folds),
            in_int8,
            timing.int8_ms if timing else None,
            timing.float_ms if timing else None,
        )


def _decibels(noise: float) -> float:
    return Quality(noise, 1.0, finite=noise < math.inf).sqnr_db
