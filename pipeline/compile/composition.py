"""The six steps in order, in the only place that has it: spec in, proven engines out. A runner carries them out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from enginesmith.core.errors import EnginesmithError
from pipeline.compile.caches.judged import JudgedCache
from pipeline.compile.caches.plan import check_required_caches, plan_caches
from pipeline.compile.missed import MissedGraphs, find_missed, search_missed
from pipeline.compile.plan import (
    Selection,
    buildable_variants,
    candidates,
    check_required,
    describe_narrowing,
    find_unserved,
    plan_builds,
)
from pipeline.compile.publication.attributed import publish_attributions
from pipeline.compile.publication.draft import draft_version
from pipeline.compile.publication.pages import draw_page
from pipeline.compile.publication.publish import publish_version
from pipeline.compile.run_context import RunContext, fail_step
from pipeline.compile.steps.attributions import attribute
from pipeline.compile.steps.calibration import merge, observe, parts_of
from pipeline.compile.steps.engines import build
from pipeline.compile.steps.exports import export
from pipeline.compile.steps.graphs import is_exported, quantize
from pipeline.compile.steps.latency import measure
from pipeline.compile.steps.proofs import validate
from pipeline.compile.steps.search import choose, find_searched_kinds
from pipeline.compile.suspects import find_suspects
from pipeline.outcome import JudgedUnit, Outcome
from pipeline.progress.events import Finished, Planned, PlannedCaches, RunConcluded
from pipeline.spec.consistency import matches_unit
from pipeline.spec.model import ModelSpec
from pipeline.values import (
    Attributed,
    BuildPlan,
    Built,
    Exported,
    Graph,
    GraphVariant,
    Observed,
    Searched,
    SearchResult,
    StepFailure,
    Unit,
)

Item = TypeVar("Item")
Value = TypeVar("Value")
P = ParamSpec("P")

# Threads only wait for processes, whose number the executor bounds: this many units are under way at once. A waiting
# thread costs little, but containers often allow a thousand.
MOST_THREADS = 256


class StepRunner(Protocol):
    """Carries out steps: directly, or as Prefect tasks."""

    def call(self, step: Callable[P, Value], *arguments: P.args, **named: P.kwargs) -> Value:
        """Run one step and return its value."""
        ...

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **named: P.kwargs
    ) -> list[Value]:
        """Run a step for each item, side by side, and return the values in order."""
        ...


class InProcess:
    """Runs the steps here and now; `map` runs side by side in threads."""

    def call(self, step: Callable[P, Value], *arguments: P.args, **named: P.kwargs) -> Value:
        """Call the function."""
        return step(*arguments, **named)

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **named: P.kwargs
    ) -> list[Value]:
        """Call the function for each item in a thread of its own."""
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            futures = [pool.submit(step, item, *arguments, **named) for item in items]
            return [future.result() for future in futures]


@dataclass(frozen=True)
class Prepared:
    """A model exported, quantized and planned: all that `enginesmith plan` needs. ranges: what calibration observed, or
    failed of.

    missed: graphs of the plan that a search shall take the place of.
    """

    exported: Exported
    ranges: Observed | StepFailure | None
    graphs: tuple[Graph, ...]
    plan: BuildPlan
    missed: tuple[MissedGraphs, ...] = ()

    @property
    def ready(self) -> BuildPlan:
        """The units that wait for no search."""
        waiting = {graph.variant for kind in self.missed for graph in kind.graphs}
        return replace(self.plan, units=tuple(unit for unit in self.plan.units if unit.graph.variant not in waiting))


def prepare(spec: ModelSpec, selection: Selection, context: RunContext, run: StepRunner) -> Prepared:
    """The first three steps: export, quantize, plan; with the search of what plain int8 ranges missed."""
    return search_int8(prepare_plainly(spec, selection, context, run), spec, selection, context, run)


def prepare_plainly(spec: ModelSpec, selection: Selection, context: RunContext, run: StepRunner) -> Prepared:
    """The first three steps: export, quantize, plan."""
    exported = export_served(spec, selection, context, run)
    return quantize_all(buildable_variants(spec, selection, exported), spec, exported, selection, context, run)


def export_served(spec: ModelSpec, selection: Selection, context: RunContext, run: StepRunner) -> Exported:
    """The first step, after what the run leaves out was told."""
    for name in find_unserved(spec, selection):
        reason = f"no backend of the spec ({', '.join(spec.backends)}) builds for it"
        context.progress.emit(Finished(name, reason=reason, words=f"left out: {reason}"))
    return run.call(export, spec, context)


def quantize_all(
    variants: Sequence[GraphVariant],
    spec: ModelSpec,
    exported: Exported,
    selection: Selection,
    context: RunContext,
    run: StepRunner,
) -> Prepared:
    """The model in these variants, and the plan of the units that are built from them."""
    ranges = calibrate(spec, exported, context, run)
    choices = search_asked(find_searched_kinds(variants, spec, exported), spec, exported, ranges, context, run)
    graphs = run.map(quantize, variants, spec, exported, ranges, choices, context)
    plan = run.call(plan_builds, spec, exported, graphs, selection, context)
    return Prepared(exported, ranges, tuple(graphs), plan, find_missed(plan, spec, exported))


def search_int8(
    plain: Prepared, spec: ModelSpec, selection: Selection, context: RunContext, run: StepRunner
) -> Prepared:
    """The same with searched graphs in the place of those that missed their limits, and planned anew."""
    if not plain.missed:
        return plain
    ranges = None if isinstance(plain.ranges, StepFailure) else plain.ranges
    found = run.call(search_missed, plain.missed, spec, plain.exported, ranges, context)
    searched = {graph.variant: graph for graph in found}
    graphs = tuple(searched.get(graph.variant, graph) for graph in plain.graphs)
    late = run.call(plan_builds, spec, plain.exported, [*searched.values()], selection, context)
    by_name = {unit.name: unit for unit in late.units}
    units = tuple(by_name.get(unit.name, unit) for unit in plain.plan.units)
    return replace(plain, graphs=graphs, plan=replace(plain.plan, units=units), missed=())


def calibrate(
    spec: ModelSpec, exported: Exported, context: RunContext, run: StepRunner
) -> Observed | StepFailure | None:
    """`observe_all`, or why the samples could not be observed."""
    try:
        return observe_all(spec, exported, context, run)
    except EnginesmithError as error:
        return fail_step("calibrate", error, context)


def observe_all(spec: ModelSpec, exported: Exported, context: RunContext, run: StepRunner) -> Observed | None:
    """What calibration samples show, observed in as many parts as the spec says; None when there are none.

    Raises what observing raises.
    """
    parts = run.map(observe, parts_of(spec, exported), spec, exported, context)
    return parts[0] if len(parts) == 1 else run.call(merge, parts, spec, context) if parts else None


def search_asked(
    kinds: Sequence[Searched],
    spec: ModelSpec,
    exported: Exported,
    ranges: Observed | StepFailure | None,
    context: RunContext,
    run: StepRunner,
) -> Mapping[Searched, SearchResult | StepFailure]:
    """What the searches that the spec asks for chose, by kind of int8, or why there is none: calibration failed, or the
    search, which is one job for all kinds."""
    if not kinds or isinstance(ranges, StepFailure):
        return dict.fromkeys(kinds, ranges) if isinstance(ranges, StepFailure) else {}
    try:
        return run.call(choose, kinds, spec, exported, ranges, context)
    except EnginesmithError as error:
        return dict.fromkeys(kinds, fail_step("search int8", error, context))


def compile_model(spec: ModelSpec, selection: Selection, context: RunContext, run: StepRunner) -> Outcome:
    """All six steps: export, quantize, plan, build, validate, publish; then which node drifted in what failed.

    Raises what a step raises.
    """
    check_required_caches(plan_caches(spec, selection, None, context))
    exported = export_served(spec, selection, context, run)
    plan, judged = judge_all(spec, exported, selection, context, run)
    # One by one: two engines at once would time each other.
    judged = [run.call(measure, item, spec, exported, context) for item in judged]
    caches = _make_caches(spec, selection, exported, context, run) if spec.compile_cache else []
    draft = draft_version(spec, exported, plan, judged, context, caches, describe_narrowing(spec, selection))
    outcome = run.call(publish_version, draft, draw_page, context)
    # What is proven is published by now: it does not wait for what failed.
    if attributed := attribute_failures(judged, spec, exported, context, run):
        outcome = run.call(publish_attributions, outcome, draft, attributed, draw_page, context)
    context.progress.emit(RunConcluded(outcome))
    return outcome


def _make_caches(
    spec: ModelSpec, selection: Selection, exported: Exported, context: RunContext, run: StepRunner
) -> list[JudgedCache]:
    from pipeline.compile.caches.step import make_cache  # imports numpy, which other runs on record do without

    units = plan_caches(spec, selection, exported, context)
    context.progress.emit(PlannedCaches(units))
    return run.map(make_cache, units, spec, exported, context)


def judge_all(
    spec: ModelSpec, exported: Exported, selection: Selection, context: RunContext, run: StepRunner
) -> tuple[BuildPlan, list[JudgedUnit]]:
    """Every unit, planned, built and judged, in the order of the spec.

    Those of the model as it was exported wait for no calibration, so that the first proof comes as early as it can.
    When a step raises, they are finished and on record before that is raised.
    """
    variants = buildable_variants(spec, selection, exported)
    plain = find_plain(variants, spec, exported, selection)
    first = plan_plain(plain, spec, exported, selection, context, run)
    with ThreadPoolExecutor(1) as aside:
        # In this context: what a runner knows of its run is kept in variables of it.
        early = aside.submit(copy_context().run, judge_units, first.wanted, spec, exported, context, run)
        others = [variant for variant in variants if variant not in plain]
        prepared = quantize_all(others, spec, exported, selection, context, run)
        told = {unit.name for unit in first.units}
        fresh = tuple(unit for unit in prepared.plan.units if unit.name not in told)
        ready, built = build_all(
            replace(prepared, plan=replace(prepared.plan, units=fresh)), spec, selection, context, run
        )
        judged = run.map(validate, built, spec, exported, context)
    known = {unit.name: unit for unit in (*first.units, *ready.plan.units)}
    verdicts = {item.built.unit.name: item for item in (*early.result(), *judged)}
    names = [item.unit for item in candidates(spec, selection) if item.unit in known]
    plan = BuildPlan(spec.model, tuple(known[name] for name in names))
    return plan, [verdicts[unit.name] for unit in plan.wanted]


def find_plain(
    variants: Sequence[GraphVariant], spec: ModelSpec, exported: Exported, selection: Selection
) -> list[GraphVariant]:
    """The variants that are the exported model itself; none where the spec requires a unit of another one, which may
    turn out to be refused: then nothing is to be built."""
    plain = [variant for variant in variants if is_exported(variant, exported)]
    others = [item.unit for item in candidates(spec, selection) if item.variant not in plain]
    waits = any(matches_unit(pattern, unit) for pattern in spec.build.required for unit in others)
    return [] if waits else plain


def plan_plain(
    variants: Sequence[GraphVariant],
    spec: ModelSpec,
    exported: Exported,
    selection: Selection,
    context: RunContext,
    run: StepRunner,
) -> BuildPlan:
    """The plan of the units of the exported model itself. Raises EnginesmithError where one that must be is refused."""
    if not variants:
        return BuildPlan(spec.model, ())
    graphs = run.map(quantize, variants, spec, exported, None, {}, context)
    plan = run.call(plan_builds, spec, exported, graphs, selection, context)
    context.progress.emit(Planned(plan))
    check_required(plan)
    return plan


def judge_units(
    units: Sequence[Unit], spec: ModelSpec, exported: Exported, context: RunContext, run: StepRunner
) -> list[JudgedUnit]:
    """Some units, built and then judged."""
    return run.map(validate, run.map(build, units, spec, context), spec, exported, context)


def build_all(
    plain: Prepared, spec: ModelSpec, selection: Selection, context: RunContext, run: StepRunner
) -> tuple[Prepared, list[Built]]:
    """Every unit of the plan, built; what waits for a search of int8 is built after it, and the others beside it."""
    if plain.ready.units:
        context.progress.emit(Planned(plain.ready))
        check_required(plain.ready)
    with ThreadPoolExecutor(1) as aside:
        # In this context: what a runner knows of its run is kept in variables of it.
        searching = aside.submit(copy_context().run, search_int8, plain, spec, selection, context, run)
        built = run.map(build, plain.ready.wanted, spec, context)
        ready = searching.result()
    known, early = {item.unit.name: item for item in built}, {unit.name for unit in plain.ready.units}
    late = replace(ready.plan, units=tuple(unit for unit in ready.plan.units if unit.name not in early))
    if plain.missed:
        context.progress.emit(Planned(late))
        check_required(late)
        known |= {item.unit.name: item for item in run.map(build, late.wanted, spec, context)}
    return ready, [known[unit.name] for unit in ready.plan.wanted]


def attribute_failures(
    judged: Sequence[JudgedUnit], spec: ModelSpec, exported: Exported, context: RunContext, run: StepRunner
) -> list[Attributed]:
    """Which node drifted, for each graph and engine of which a check failed; none where the spec wants no
    attribution."""
    broken = find_suspects(judged) if spec.validation.attribution != "off" else []
    return run.map(attribute, broken, spec, exported.model.digest, exported.golden, context) if broken else []
