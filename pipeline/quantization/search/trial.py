"""Trials of a mixed-precision search, and its choice."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, cast

from onnx import ModelProto

from enginesmith.core.reports.breakdown import RecordedSearch, SearchPoint
from enginesmith.core.text import format_plain
from enginesmith.core.types import Dim, Precision, QuantizationScheme, Shape, Tensors, TensorSpec
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.block_floats import FORMATS, FP8, find_block_sites
from pipeline.quantization.schemes.overrides import OverridePrecision, ProductPrecision
from pipeline.quantization.schemes.qdq import carries_qdq, usable_sites
from pipeline.quantization.schemes.write import write_searched
from pipeline.quantization.search.costs import CostModel
from pipeline.quantization.search.graph_limits import GraphJudge, deal, make_edges
from pipeline.quantization.search.latency import PATIENCE, PairedRounds, Timing
from pipeline.quantization.search.quality import GraphLimits, Quality, SearchClock, SearchFloor
from pipeline.quantization.search.rates import Peaks
from pipeline.quantization.search.sensitivity import Answers, SweepCost, quality, sweep
from pipeline.quantization.search.steps import FLOAT, FormatStep, describe_alone, find_steps, list_formats
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
    """One group in the ranked table. sqnr_db: of the model's outputs if only this group is quantized; alone: the same
    by format, as in JSON.

    int8_ms, float_ms: time of the whole model with this group in int8 and in float, if measured; with several formats,
    the reasons contain the times.  activation: the tensor that `nodes`, of type `op_type`, read.  macs, share: number
    of multiplications, and their share of all.  strength, clip: as in `SmoothingPlan`.  folded: whether other nodes
    take the smoothing's factors.  kept: whether it is quantized in the requested format.  format: its format."""

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
    alone: tuple[tuple[str, float | None], ...] = ()
    format: str = ""

    @property
    def choice_text(self) -> str:
        """'yes', 'in fp8', or 'left in float'."""
        return "yes" if self.kept else "left in float" if self.format in ("", FLOAT) else f"in {self.format}"


@dataclass(frozen=True)
class FrontierPoint:
    """One point of the frontier: the share of the multiplications with weights that are quantized, and the quality.

    left: groups left in float; with several formats, names of `find_steps`; () in a frontier if the point was not run.
    predicted_db: from the damages of single groups.  sqnr_db, cosine, argmax_agreement, accuracy: of the whole model,
    if it was run; accuracy if there are labels.  ms: of a run, measured or modelled.  weight_bytes: of all weights.
    mix: the shares of other formats.  float_groups: number of groups left in float; None: all of `left`."""

    share: float
    left: tuple[str, ...]
    predicted_db: float | None
    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None
    ms: float | None = None
    weight_bytes: int | None = None
    mix: tuple[tuple[str, float], ...] = ()
    float_groups: int | None = None

    @property
    def mix_text(self) -> str:
        """', 12.5 % in fp8, 3.0 % in fp16', or ''."""
        return "".join(f", {100 * share:.1f} % in {name}" for name, share in self.mix if share)


@dataclass(frozen=True)
class MixedPrecisionChoice:
    """The result of a search: the groups to quantize, and their settings.

    model: in float, prepared: outliers moved, weights rounded.  ranges: of its activations.  left: node that stays in
    float or in a wider format -> reason; formats: of these nodes.  rows: the groups, most damage per multiplication
    first.  frontier: from all groups in `precision` down.  point: the chosen one.  smoothed: name in `model` of a
    smoothed activation -> its statistics.  weight_db: node -> SQNR of its rounded weight.  ended: how far the search
    got in its time; '' if it was completed.  table: points that were run and whose cost is known, fastest first.
    latency: source of the times.  rule: how `point` was chosen."""

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
    formats: Mapping[str, ProductPrecision] = field(default_factory=dict)

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
        return f"{share_text} in {self.precision}{point.mix_text}: {quality_text} on calibration samples{end_text}"

    def document(self, floor: SearchFloor | None) -> "SearchDocument":
        """The choice without model and ranges, with the requested floor and with SQNR `in_json`."""
        weight_db = {node: in_json(value) for node, value in self.weight_db.items()}
        groups = tuple(replace(row, sqnr_db=in_json(row.sqnr_db)) for row in self.rows)
        frontier, table = (tuple(map(_point_in_json, points)) for points in (self.frontier, self.table))
        point, more = _point_in_json(self.point), (table, self.latency, self.rule, self.precision)
        return SearchDocument(self.left, groups, frontier, point, weight_db, self.cost, floor, *more)


@dataclass(frozen=True)
class SearchDocument:
    """The result of a search, as a registry stores it. Fields as in `MixedPrecisionChoice`; chosen: its `point`."""

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
    precision: str = "int8"

    @property
    def recorded(self) -> RecordedSearch:
        """The frontier for a quantization record, without the names of the groups."""
        floor_db = self.floor.sqnr_db if self.floor else None
        frontier, table = (tuple(map(_record_point, points)) for points in (self.frontier, self.table))
        rule = (self.rule + self.chosen.mix_text).removeprefix(", ")
        return RecordedSearch(floor_db, frontier, _record_point(self.chosen), table, self.latency, rule)


def _record_point(point: FrontierPoint) -> SearchPoint:
    fields = {name: value for name, value in vars(point).items() if name not in ("left", "mix", "float_groups")}
    return SearchPoint(**fields, left=len(point.left) if point.float_groups is None else point.float_groups)


def in_json(sqnr_db: float | None) -> float | None:
    """Decibels as JSON can hold them: null for no loss, `BROKEN_DB` for outputs that are not finite."""
    if sqnr_db is None or sqnr_db == math.inf:
        return None
    return sqnr_db if math.isfinite(sqnr_db) else BROKEN_DB


def _point_in_json(point: FrontierPoint) -> FrontierPoint:
    predicted_db, sqnr_db, cosine = map(in_json, (point.predicted_db, point.sqnr_db, point.cosine))
    return replace(point, predicted_db=predicted_db, sqnr_db=sqnr_db, cosine=cosine)


# Statistics, the float model's outputs and the runs for judging do not depend on a scheme: all kinds share them. A
# convolution's weight that two kinds round to the same levels is rounded once.

# The most threads that fit settings.
_MOST_THREADS = 4


@dataclass(frozen=True)
class SearchTarget:
    """A kind of int8, or a block format, to search for. ranges: of activations.  scheme, precision: of the graphs.
    race: times pairs of graphs, if a group must make the model faster; None if speed does not count.  peaks: rates that
    model costs without a race; None if unknown."""

    ranges: Ranges
    scheme: QuantizationScheme
    race: PairedRounds | None = None
    precision: Precision = "int8"
    peaks: Peaks | None = None


@dataclass(frozen=True)
class FloatSide:
    """The data by which all kinds of int8 are fitted and judged. model: prepared, with weights in a file that its
    graphs share.  fitted: runs for fitting settings.

    runs: inputs for judging.  expected: the float model's outputs for `runs`, then for `edges`, runs at other sizes.
    answers: the right ones, if there are labels.
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
        """From an exported model and calibration runs; raises ModelError if the model does not run on them.

        folder: for the weights, until the search ends.  shapes: inputs and dims, at whose edges limits are held;
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
        sizes, mask = {name: array.shape for name, array in tuned_inputs.items()}, find_mask(plain_runner, fitting_runs)
        rest = answers, overrides, limits, clock, mask, edges, sizes
        return cls(graph, fitting_runs, judged_inputs, expected_outputs, *rest)


def open_trials(
    side: FloatSide, targets: Sequence[SearchTarget], smoothing: Literal["none", "auto"]
) -> "list[SearchTrial]":
    """A trial for each target, with settings fitted and damages measured."""
    kinds = [_find_kinds(side, target) for target in targets]
    all_kinds = [kind for by_format in kinds for kind in by_format.values()]
    groups = [group for kind in all_kinds for group in kind.groups]
    statistics, node_work = gather(side.model, groups, side.fitted, side.clock.check, side.mask)
    mixing_plans = _fit_mixing(side, all_kinds, statistics, STRENGTHS if smoothing == "auto" else (None,))
    statistics.clear()
    other_plans = fit_convolutions(side.model, all_kinds, side.fitted, side.clock.check)
    fitted_plans = iter([{**mixing, **other} for mixing, other in zip(mixing_plans, other_plans, strict=True)])
    costs = CostModel.of(side.model, side.tuned)
    trials = []
    for target, by_format in zip(targets, kinds, strict=True):
        scheme, plans = replace(target.scheme, float_precision="fp32"), {name: next(fitted_plans) for name in by_format}
        terms = target.ranges, scheme, side.runs, side.clock.check, target.precision
        sweeps = {name: sweep(side.model, kind.groups, plans[name], *terms, name) for name, kind in by_format.items()}
        own_cost, sweep_costs = sweeps[target.precision][1], [cost for _, cost in sweeps.values()]
        total_s = sum(cost.sweep_s for cost in sweep_costs)
        trials.append(
            SearchTrial(
                side=side,
                ranges=target.ranges,
                scheme=scheme,
                precision=target.precision,
                groups={group.activation: group for kind in by_format.values() for group in kind.groups},
                plans=plans,
                work=node_work,
                noises={name: group_noise for name, (group_noise, _) in sweeps.items()},
                cost=replace(own_cost, groups=sum(cost.groups for cost in sweep_costs), sweep_s=total_s),
                costs=costs if target.peaks else None,
                peaks=target.peaks,
            )
        )
    return trials


def leave_all(side: FloatSide, target: SearchTarget, reason: str) -> MixedPrecisionChoice:
    """The choice of a search that ended before any point was tried: everything in float."""
    groups = {group.activation: group for kind in _find_kinds(side, target).values() for group in kind.groups}
    reasons = dict.fromkeys((node for group in groups.values() for node in group.nodes), f"the search {reason}")
    point, formats = FrontierPoint(0.0, tuple(groups), None), dict.fromkeys(reasons, FLOAT)
    details = with_weights_inside(side.model), target.ranges, reasons, (), (), point, SweepCost(0, 0.0, 0.0)
    return MixedPrecisionChoice(*details, ended=reason, precision=target.precision, formats=formats)


def _find_kinds(side: FloatSide, target: SearchTarget) -> dict[Precision, FittedKind]:
    """The kind of each format that groups may have. A group has the nodes that take the target's own format or, if no
    reader of its activation does, those that take fp8."""
    kinds = {name: _find_kind(side, replace(target, precision=name)) for name in list_formats(target.precision)}
    first_kinds = [kinds[name] for name in ("fp8", target.precision) if name in kinds]
    groups = {group.activation: group for kind in first_kinds for group in kind.groups}
    nodes = {name: {node for group in kind.groups for node in group.nodes} for name, kind in kinds.items()}
    return {
        name: replace(kind, groups=[group for group in groups.values() if nodes[name] >= {*group.nodes}])
        for name, kind in kinds.items()
    }


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
    """For each kind, the plans of the groups that multiply matrices, by activation; groups are fitted in parallel."""
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
    """The state of the search for one kind of int8.

    plans: by format and group, the settings of its nodes.  work: by node.  cost: of the sweeps in all formats.
    noises: by format, the narrowest first, and by group, the noise at the outputs if only this group has that format.
    side: the reference.  qualities, timings: measured so far; float_ratios: of a point, its time divided by that of the
    float model.
    costs, peaks: model of the costs; None if unknown.  float_ms: measured time of the float model, if any.
    """

    side: FloatSide
    ranges: Ranges
    scheme: QuantizationScheme
    precision: Precision
    groups: Mapping[str, SmoothingGroup]
    plans: Mapping[Precision, Mapping[str, SmoothingPlan]]
    work: Mapping[str, StatisticsWork]
    noises: Mapping[str, Mapping[str, float]]
    cost: SweepCost
    qualities: dict[tuple[str, ...], Quality] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    costs: CostModel | None = None
    peaks: Peaks | None = None
    float_ratios: dict[tuple[str, ...], float] = field(default_factory=dict)
    float_ms: float | None = None

    @cached_property
    def float_model(self) -> ModelProto:
        """The graph with all groups in float, with which others are timed."""
        return with_weights_inside(self.write(self.ranked, self.scheme))

    def _list_taken(self, steps: Sequence[str]) -> tuple[str, ...]:
        """The given steps that can be taken: all earlier steps of the same group are given, too."""
        names, ended_groups = {*steps}, set[str]()
        for name, step in self.steps.items():
            if name not in names or step.group in ended_groups:
                ended_groups.add(step.group)
                names.discard(name)
        return tuple(name for name in steps if name in names)

    def formats(self, steps: Sequence[str]) -> dict[str, str]:
        """The format of each group after these steps."""
        taken_names = {*self._list_taken(steps)}
        wider_formats = {step.group: step.format for name, step in self.steps.items() if name in taken_names}
        return self._first_formats | wider_formats

    @cached_property
    def _first_formats(self) -> dict[str, str]:
        """The narrowest format of each group."""
        return {group: name for name in [*self.noises][::-1] for group in self.noises[name]}

    def time_point(self, steps: tuple[str, ...], race: PairedRounds) -> None:
        """Time a point and the float model in turns, `PATIENCE` rounds."""
        if steps in self.float_ratios or {*steps} == {*self.ranked}:
            return
        self.side.clock.check("timing points", len(self.float_ratios))
        model = with_weights_inside(self.write(steps, self.scheme))
        timing = Timing.of(list(islice(race(model, self.float_model), PATIENCE)))
        self.float_ms = self.float_ms or timing.float_ms
        self.float_ratios[steps] = 1 - timing.saving_ms / timing.float_ms

    @property
    def latency(self) -> str:
        """The source of the times of points."""
        if self.float_ms is not None:
            return f"measured in {PATIENCE} rounds"
        return f"modelled, {self.peaks.source}" if self.peaks else ""

    def _cost(self, point: FrontierPoint) -> FrontierPoint:
        """The point with its cost: measured if any point was timed, else modelled."""
        ratio = 1.0 if {*point.left} == {*self.ranked} else self.float_ratios.get(point.left)
        ms = self.float_ms and ratio and self.float_ms * ratio
        if self.costs is None or self.peaks is None:
            return replace(point, ms=ms)
        products = self.formats(point.left).items()
        formats = {node: name for group, name in products if name != FLOAT for node in self.groups[group].nodes}
        ms = ms if self.float_ms is not None else self.costs.estimate_ms(formats, self.peaks)
        return replace(point, ms=ms, weight_bytes=self.costs.weight_bytes(formats, self.peaks.floats))

    @cached_property
    def multiplications(self) -> dict[str, float]:
        """The multiplications of each group."""
        return {name: sum(self.work[node].macs for node in group.nodes) for name, group in self.groups.items()}

    @cached_property
    def steps(self) -> dict[str, FormatStep]:
        """`find_steps` of the groups."""
        return find_steps(self.multiplications, self.noises)

    @cached_property
    def macs(self) -> dict[str, float]:
        """Multiplications by step."""
        return {name: step.macs for name, step in self.steps.items()}

    @cached_property
    def ranked(self) -> tuple[str, ...]:
        """Steps by damage per multiplication, worst first."""
        return tuple(self.steps)

    def predicted_db(self, steps: Sequence[str]) -> float:
        """The SQNR in decibels that the sum of the groups' damages predicts."""
        formats = self.formats(steps)
        return _decibels(
            sum(noises[group] for name, noises in self.noises.items() for group in noises if formats[group] == name)
        )

    def predict(self, steps: Sequence[str]) -> FrontierPoint:
        """The point, with the quality that the sum of the groups' damages predicts."""
        formats, total = self.formats(steps), sum(self.multiplications.values()) or 1.0
        shares = {
            name: sum(count for group, count in self.multiplications.items() if formats[group] == name) / total
            for name in (*self.noises, FLOAT)
        }
        point = FrontierPoint(shares.pop(self.precision), tuple(steps), self.predicted_db(steps))
        mix = tuple(shares.items()) if len(self.noises) > 1 else ()
        return replace(point, mix=mix, float_groups=sum(name == FLOAT for name in formats.values()))

    def point(self, steps: Sequence[str]) -> FrontierPoint:
        """The point, with the quality of the whole quantized model in a run."""
        steps = self._list_taken(steps)
        if steps not in self.qualities:
            float_side = self.side
            float_side.clock.check("trials of the whole model", len(self.qualities))
            runner = SessionRunner(self.write(steps, self.scheme), exact=True)
            answers = (runner.run(inputs) for inputs in (*float_side.runs, *float_side.edges))
            judge = GraphJudge(float_side.limits, float_side.runs, float_side.edges) if float_side.limits else None
            self.qualities[steps] = quality(float_side.expected, answers, float_side.answers, judge)
        figures = ("sqnr_db", "cosine", "argmax_agreement", "accuracy")
        quality_figures = {name: getattr(self.qualities[steps], name) for name in figures}
        return self._cost(replace(self.predict(steps), **quality_figures))

    def _list_plans(self, steps: Sequence[str]) -> list[SmoothingPlan]:
        """The plans of all groups in their formats; floats have none."""
        formats = self.formats(steps)
        return [plan for name, plans in self.plans.items() for group, plan in plans.items() if formats[group] == name]

    def _list_wider(self, steps: Sequence[str]) -> dict[str, ProductPrecision]:
        """The formats of the nodes that these steps move out of their first format."""
        wider = [(group, name) for group, name in self.formats(steps).items() if name != self._first_formats[group]]
        return {node: cast("ProductPrecision", name) for group, name in wider for node in self.groups[group].nodes}

    def write(self, steps: Sequence[str], scheme: QuantizationScheme) -> ModelProto:
        """The graph after these steps (`schemes.write`); its float weights stay in the file of `side`."""
        changed_model, ranges = apply_plans(self.side.model, self._list_plans(steps), self.ranges)
        overrides = {**self.side.overrides, **self._list_wider(steps)}
        return write_searched(changed_model, self.precision, scheme, ranges, overrides)

    def choose(self, point: FrontierPoint, frontier: tuple[FrontierPoint, ...], rule: str) -> MixedPrecisionChoice:
        """The result for a point of the frontier. rule: why groups are left in float."""
        plans, formats = self._list_plans(point.left), self.formats(point.left)
        model, ranges = apply_plans(self.side.model, plans, self.ranges)
        folds, total = find_folds(self.side.model, self.groups.values()), sum(self.multiplications.values())
        names = dict.fromkeys(step.group for step in self.steps.values())
        rows = tuple(self._row(name, name in folds, total, formats[name]) for name in names)
        wider = dict.fromkeys(self.steps[name].group for name in point.left)
        reasons = {node: self._reason(name, rule, point.left) for name in wider for node in self.groups[name].nodes}
        node_inputs = {node.name: node.input[0] for node in model.graph.node if node.input}
        smoothed_statistics = {node_inputs[plan.group.nodes[0]]: plan.seen for plan in plans if plan.seen}
        weight_db = {node: value for plan in plans for node, value in plan.weight_db.items()}
        model = with_weights_inside(model)
        details = (frontier, point, self.cost, smoothed_statistics, weight_db, "", self.precision)
        choice = MixedPrecisionChoice(model, ranges, reasons, rows, *details)
        return replace(choice, formats=self._list_wider(point.left))

    def _reason(self, name: str, rule: str, steps: Sequence[str]) -> str:
        """Why a group takes its last step: its previous format was not faster, else the rule."""
        narrow, reason = self._first_formats[name], ""
        for key, step in self.steps.items():
            if step.group != name or key not in steps:
                continue
            wide, timing = "" if step.format == FLOAT else step.format, self.timings.get(key)
            narrow, reason = step.format, timing.describe(narrow, wide) if timing and timing.lost else ""
        return reason or f"{rule}: quantized alone it leaves {describe_alone(self._list_alone(name), self.precision)}"

    def _list_alone(self, name: str) -> tuple[tuple[str, float | None], ...]:
        """The SQNR in decibels with only this group quantized, by the formats that it may have."""
        return tuple((form, in_json(_decibels(noise[name]))) for form, noise in self.noises.items() if name in noise)

    def _row(self, name: str, folds: bool, total: float, precision: str) -> GroupDamage:
        """A row of the table. total: multiplications of all groups.  precision: of the group."""
        group, timing = self.groups[name], self.timings.get(name) if len(self.noises) == 1 else None
        plan = next((plans[name] for plans in self.plans.values() if name in plans), None)
        macs = self.multiplications[name]
        return GroupDamage(
            name,
            group.nodes,
            group.sites[0].op_type,
            macs,
            macs / total if total else 0.0,
            sum(self.work[node].weight_bytes for node in group.nodes),
            _decibels(next(noises[name] for noises in self.noises.values() if name in noises)),
            plan.strength if plan else None,
            plan.clip if plan else 1.0,
            bool(plan and plan.factors is not None and folds),
            precision == self.precision,
            timing.int8_ms if timing else None,
            timing.float_ms if timing else None,
            self._list_alone(name),
            precision,
        )


def _decibels(noise: float) -> float:
    return Quality(noise, 1.0, finite=noise < math.inf).sqnr_db
