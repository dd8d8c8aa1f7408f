"""Mixed-precision search: as much of the compute in int8 as a quality floor allows, or as accurate as a budget allows.

Groups are ranked by damage per multiplication. From the top, groups are left in float until the whole quantized model
reaches the floor on samples that no setting was fitted on; then each is returned to int8 if the floor still holds. The
sum of single damages decides which groups are tried; the run of the whole model decides the result. Without a floor,
points from all in int8 to all in float are run, and one is chosen by its latency (`pareto`).

A floor that nothing can miss, or that nothing reaches, is an error.
"""

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from onnx import ModelProto

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, QuantizationScheme, TensorSpec
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.search.graph_limits import with_margin
from pipeline.quantization.search.latency import PairedRounds, benchmark_until_decided
from pipeline.quantization.search.pareto import describe_point, error_of, find_knee, find_within, list_depths
from pipeline.quantization.search.quality import OutOfTimeError, Quality, SearchClock, SearchFloor
from pipeline.quantization.search.sensitivity import decides
from pipeline.quantization.search.trial import (
    FloatSide,
    FrontierPoint,
    MixedPrecisionChoice,
    SearchTarget,
    SearchTrial,
    leave_all,
    open_trials,
)
from pipeline.quantization.settings.runs import Run, RunLabels, with_weights_inside

# The number of tried depths that damages predict; the later ones are found by bisection.
_PREDICTED = 4
_SLACK_DB = 0.5
# The number of groups for which a swap is tried, each by a run of the whole model.
_MOST_SWAPS = 8
# The number of groups that a search without a request tries to return to int8, each by a run of the whole model.
_MOST_REFILLS = 16
# The number of points that a search with a floor times.
_MOST_TIMED = 6


def choose_each(
    model: ModelProto,
    targets: Sequence[SearchTarget],
    runs: Iterable[Run],
    floor: SearchFloor | None = None,
    smoothing: Literal["none", "auto"] = "auto",
    overrides: Mapping[str, OverridePrecision] | None = None,
    labels: RunLabels | None = None,
    clock: SearchClock | None = None,
    budget_ms: float | None = None,
    shapes: tuple[Sequence[TensorSpec], Sequence[Dim]] | None = None,
) -> list[MixedPrecisionChoice]:
    """For each kind of int8, the nodes to quantize and their smoothing, clipping and rounding, found on calibration
    samples.

    runs: (number of samples, inputs) of each run; the first few hundred samples are used.
    overrides: node -> precision that a person chose.  labels: for a floor of accuracy.  clock: at its end, the best
    known point is chosen. If a target has a race, groups that int8 does not make faster are left in float, except
    nodes that a person wants in int8.
    shapes: the model's inputs and dims; the limits of a graph are also held at their edges.
    floor: the least quality; None sets none.  smoothing: 'none' does not move outliers.  budget_ms: the longest time of
    a run. Without floor and budget, targets with known costs get the knee (`pareto`), and others all groups in int8.
    Raises ModelError when the model does not run on the samples, DataError when the labels do not fit them, when not
    even the float model holds the floor, or when no point keeps the budget.
    """
    floor, clock = floor and with_margin(floor), clock or SearchClock()
    with tempfile.TemporaryDirectory(prefix="enginesmith-search-") as folder:
        limits = floor.graph if floor else None
        float_side = FloatSide.of(model, runs, overrides or {}, labels, limits, clock, Path(folder), shapes)
        del model  # frees its weights during the search
        asks_decisions = floor is not None and floor.argmax_agreement is not None
        if asks_decisions and float_side.expected and not any(map(decides, float_side.expected[0].values())):
            raise DataError(
                "quantization.floor.argmax_agreement: every output has one value along its last axis, whose argmax "
                "cannot change; ask for sqnr_db or cosine"
            )
        try:
            trials = open_trials(float_side, targets, smoothing)
        except OutOfTimeError as error:
            return [leave_all(float_side, target, str(error)) for target in targets]
        choices = []
        for index, (trial, target) in enumerate(zip(trials, targets, strict=True)):
            trial.side = replace(float_side, clock=clock.part(len(trials) - index))
            choices.append(_choose(trial, target, floor, budget_ms))
        return choices


def _choose(
    trial: SearchTrial, target: SearchTarget, floor: SearchFloor | None, budget_ms: float | None
) -> MixedPrecisionChoice:
    end_reason, rule = "", _name_rule(trial, floor, budget_ms)
    try:
        point = trial.point(trial.ranked[: 0 if floor is None else _find_shallowest(trial, floor)])
        if floor is not None:
            point = swap_groups(trial, floor, refill_groups(trial, floor, point))
            _check_reached(floor, trial.qualities[point.left])
        if target.race is not None:
            point = _leave_slow_groups(trial, target.scheme, point, target.race)
        if rule:
            point = _choose_by_cost(trial, target, point, floor, budget_ms)
    except OutOfTimeError as error:
        end_reason, point = str(error), _find_best(trial, floor, budget_ms)
        rule = "the time of the search"
    point = trial.point(point.left) if point.left in trial.qualities else point
    prefixes = [trial.ranked[:depth] for depth in range(len(trial.ranked) + 1)]
    frontier = tuple(
        trial.point(steps) if steps in trial.qualities else replace(trial.predict(steps), left=()) for steps in prefixes
    )
    table = tuple(sorted(_list_costed(trial), key=lambda entry: (entry.ms or 0.0, error_of(entry))))
    choice = replace(trial.choose(point, frontier, rule), ended=end_reason, table=table)
    narrow_points = [entry for entry in table if {*entry.left} != {*trial.ranked}]
    is_missed = floor is not None and not any(
        floor.holds(quality) for steps, quality in trial.qualities.items() if {*steps} != {*trial.ranked}
    )
    if is_missed and not end_reason and point.share == 0 and narrow_points:
        rule += f", which nothing narrow reaches; the nearest takes {describe_point(min(narrow_points, key=error_of))}"
    return replace(choice, rule=rule, latency=trial.latency if table else "")


def _choose_by_cost(
    trial: SearchTrial, target: SearchTarget, point: FrontierPoint, floor: SearchFloor | None, budget_ms: float | None
) -> FrontierPoint:
    """The point that a floor, a budget or the knee chooses among the points that were run.

    point: with groups in float because of the floor, or because int8 is slower. Without a floor, more and more of the
    other groups are left in float, the most damaging first. With a floor, some of the points that were run are timed.
    """
    if floor is not None:
        if target.race is not None:
            tried_groups = sorted(trial.qualities, key=lambda steps: trial.predict(steps).share)
            for steps in (point.left, *tried_groups[:: -(-len(tried_groups) // _MOST_TIMED)]):
                trial.time_point(steps, target.race)
        passing_points = [entry for entry in _list_costed(trial) if floor.holds(trial.qualities[entry.left])]
        return min(passing_points, key=lambda entry: (entry.ms or 0.0, -entry.share), default=point)

    def run_point(depth: int) -> FrontierPoint:
        steps = (*point.left, *names[:depth])
        trial.point(steps)
        if target.race is not None:
            trial.time_point(steps, target.race)
        return trial.point(steps)

    if target.race is not None:
        trial.time_point((), target.race)  # if no other point is timed, this one gives the float model's time
    names = _list_free(trial, point)
    entries = {depth: run_point(depth) for depth in list_depths(len(names))}
    if budget_ms is None:
        return find_knee([*entries.values()])
    low = max((depth for depth, entry in entries.items() if (entry.ms or 0.0) <= budget_ms), default=len(names))
    high = min((depth for depth in entries if depth > low), default=low)
    while high - low > 1:  # from the last point that was within the budget to the first one beyond it
        middle = (low + high) // 2
        entries[middle] = run_point(middle)
        low, high = (middle, high) if (entries[middle].ms or 0.0) <= budget_ms else (low, middle)
    return find_within([*entries.values()], budget_ms, trial.latency)


def _name_rule(trial: SearchTrial, floor: SearchFloor | None, budget_ms: float | None) -> str:
    """The rule that chooses the point, and why it leaves groups in float that are faster in int8; '' for none."""
    if floor is not None:
        return "the floor" if floor.graph is None else "the graph's limits"
    if budget_ms is not None and trial.groups:
        return f"the budget of {budget_ms:g} ms"
    return "the knee" if trial.costs and trial.groups else ""


def _list_costed(trial: SearchTrial) -> list[FrontierPoint]:
    """The points that were run and have a time, each once whatever the order of its groups."""
    points = {frozenset(steps): trial.point(steps) for steps in trial.qualities}
    return [point for point in points.values() if point.ms is not None]


def _find_best(trial: SearchTrial, floor: SearchFloor | None, budget_ms: float | None) -> FrontierPoint:
    """The tried point with the most int8 that holds the floor, or the most accurate one within the budget; all in float
    if there is none."""
    if budget_ms is not None and (points := _list_costed(trial)):
        return find_within(points, budget_ms, trial.latency)
    passing_steps = [steps for steps, quality in trial.qualities.items() if floor is None or floor.holds(quality)]
    least_steps = min(passing_steps, key=lambda steps: sum(trial.macs[name] for name in steps), default=None)
    return trial.predict(trial.ranked) if least_steps is None else trial.point(least_steps)


def _list_free(trial: SearchTrial, point: FrontierPoint) -> list[str]:
    """The steps that a point has not taken, of groups that no person wants in int8, worst first."""
    forced_nodes = {node for node, precision in trial.side.overrides.items() if precision == "own"}
    forced_groups = {name for name, group in trial.groups.items() if forced_nodes & {*group.nodes}}
    return [name for name, step in trial.steps.items() if name not in point.left and step.group not in forced_groups]


def _leave_slow_groups(
    trial: SearchTrial, scheme: QuantizationScheme, point: FrontierPoint, race: PairedRounds
) -> FrontierPoint:
    """The point, in which the groups that int8 does not make faster are also in float. Groups with the least compute
    are tried first, each group's steps in their order.

    A group that is left in float stays in float in the later trials.
    """
    names = _list_free(trial, point)
    tried_names = sorted(names, key=lambda name: trial.multiplications[trial.steps[name].group])
    float_groups, current_model = point.left, with_weights_inside(trial.write(point.left, scheme))
    for name in tried_names:
        if trial.formats((*float_groups, name)) == trial.formats(float_groups):
            continue  # it follows a step that is not taken
        other_model = with_weights_inside(trial.write((*float_groups, name), scheme))
        trial.timings[name] = benchmark_until_decided(race(current_model, other_model))
        if trial.timings[name].lost:
            float_groups, current_model = (*float_groups, name), other_model
    return trial.point(float_groups)


def _check_reached(floor: SearchFloor, float_quality: Quality) -> None:
    """Raise DataError if not even the float model reaches the floor."""
    if not float_quality.finite:
        raise DataError(
            "quantization.floor cannot be judged: the float model itself gives NaN or infinities on the calibration "
            "samples; correct the samples or the model"
        )
    accuracy = float_quality.accuracy
    if floor.accuracy is not None and (accuracy is None or accuracy < floor.accuracy):
        score_text = "was not measured" if accuracy is None else f"has {accuracy:.4f} on the calibration samples"
        raise DataError(
            f"quantization.floor.accuracy {floor.accuracy:g} is out of reach: the float model itself {score_text}; "
            "ask for less, or correct calibration.labels"
        )


def _find_shallowest(trial: SearchTrial, floor: SearchFloor) -> int:
    """The least number of top-ranked groups to leave in float. Damages predict the first depths; bisection finds the
    others. Each depth is a run of the whole model."""
    tried_points = list[FrontierPoint]()
    low, high = 0, len(trial.ranked)
    while low < high:
        midpoint = (low + high) // 2 if tried_points else 0
        if floor.sqnr_db is not None and 0 < len(tried_points) <= _PREDICTED:
            midpoint = _predict_depth(trial, floor.sqnr_db, tried_points[-1], low, high)
        tried_points.append(trial.point(trial.ranked[:midpoint]))
        if floor.holds(trial.qualities[tried_points[-1].left]):
            high = midpoint
        else:
            low = midpoint + 1
    return low


def _predict_depth(trial: SearchTrial, sqnr_db: float, last: FrontierPoint, low: int, high: int) -> int:
    """The least depth from `low` on, below `high`, that should reach the floor, corrected by the error of the last
    prediction."""
    excess = _beyond(trial, last)
    depths = range(low, high)
    return next((depth for depth in depths if trial.predicted_db(trial.ranked[:depth]) - excess >= sqnr_db), high - 1)


def _beyond(trial: SearchTrial, point: FrontierPoint) -> float:
    """The decibels by which a point is worse than its groups' damages predict; assumed equal at similar points."""
    excess_db = trial.predicted_db(point.left) - (math.inf if point.sqnr_db is None else point.sqnr_db)
    return excess_db if math.isfinite(excess_db) else 0.0


def refill_groups(trial: SearchTrial, floor: SearchFloor, point: FrontierPoint) -> FrontierPoint:
    """The point with groups returned to int8 where the floor allows it, the largest first. Groups that are predicted to
    miss the floor by more than `_SLACK_DB` are not tried.

    For the limits of a graph (a search without a request), `_MOST_REFILLS` groups are tried. If one step of a group
    cannot be returned, the group's other steps are not tried.
    """
    names = sorted(point.left, key=lambda name: -trial.macs[name])
    groups = {*list(dict.fromkeys(trial.steps[name].group for name in names))[: _MOST_REFILLS if floor.graph else None]}
    for name in names:
        group = trial.steps[name].group
        if name not in point.left or group not in groups:
            continue
        float_groups = tuple(other for other in point.left if other != name)
        expected_db = trial.predicted_db(float_groups) - _beyond(trial, point)
        if floor.sqnr_db is not None and expected_db < floor.sqnr_db - _SLACK_DB:
            continue
        other_point = trial.point(float_groups)
        if floor.holds(trial.qualities[other_point.left]):
            point = other_point
        else:
            groups.remove(group)
    return point


def swap_groups(trial: SearchTrial, floor: SearchFloor, point: FrontierPoint) -> FrontierPoint:
    """The point with groups returned to int8, and smaller groups, with less compute together, in float instead.

    Only for a floor in decibels, which can be predicted: a whole group is often more than the floor needs.
    """
    if floor.sqnr_db is None:
        return point
    for group in sorted(point.left, key=lambda name: -trial.macs[name])[:_MOST_SWAPS]:
        if group not in point.left:
            continue  # an earlier swap returned it
        other_groups = tuple(name for name in point.left if name != group)
        float_groups = _smaller(trial, floor.sqnr_db + _beyond(trial, point), other_groups, trial.macs[group])
        if float_groups is not None:
            other_point = trial.point(float_groups)
            if floor.holds(trial.qualities[other_point.left]):
                point = other_point
    return point


def _smaller(
    trial: SearchTrial, sqnr_db: float, float_groups: tuple[str, ...], max_macs: float
) -> tuple[str, ...] | None:
    """`float_groups` with further groups, of less than `max_macs` multiplications together, whose predicted SQNR is
    `sqnr_db` or more; None if there are none."""
    total_macs = 0.0
    for name in trial.ranked:
        if name in float_groups or total_macs + trial.macs[name] >= max_macs:
            continue
        float_groups, total_macs = (*float_groups, name), total_macs + trial.macs[name]
        if trial.predicted_db(float_groups) >= sqnr_db:
            return float_groups
    return None
