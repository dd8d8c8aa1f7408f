"""The six steps in order, in the only place that has it: spec in, proven engines out. A runner carries them out.

A step's results may come in batches, each made on demand: the graphs that are the exported model itself, then those
that wait for calibration, then those that wait for a search of int8. The units of one batch are built and proven while
the next batch is made, so that the first proof comes as early as it can.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from enginesmith.core.errors import EnginesmithError
from pipeline.compile.plan import (
    buildable_variants,
    candidates,
    check_required,
    find_missed,
    find_unserved,
    plan_builds,
    search_missed,
)
from pipeline.compile.publication.publish import VersionDraft, draft_version, publish_attributions, publish_version
from pipeline.compile.run_context import Work, fail_step
from pipeline.compile.steps.attributions import attribute, find_suspects
from pipeline.compile.steps.calibration import merge, observe, parts_of
from pipeline.compile.steps.engines import build
from pipeline.compile.steps.exports import export
from pipeline.compile.steps.graphs import is_exported, quantize
from pipeline.compile.steps.keys import measure
from pipeline.compile.steps.proofs import validate
from pipeline.compile.steps.search import choose, find_searched_kinds
from pipeline.outcome import Judged, JudgedUnit, Outcome
from pipeline.progress.events import Finished, Planned, RunConcluded
from pipeline.spec.model import matches_unit
from pipeline.values import BuildPlan, Exported, Graph, GraphVariant, Observed, Searched, SearchResult, StepFailure

Item = TypeVar("Item")
Value = TypeVar("Value")
P = ParamSpec("P")

# Threads only wait for processes, whose number the executor bounds: this many units are under way at once. A waiting
# thread costs little, but containers often allow a thousand.
MOST_THREADS = 256


class StepRunner(Protocol):
    """Carries out steps: directly, or as Prefect tasks."""

    def call(self, step: Callable[P, Value], *arguments: P.args, **kwargs: P.kwargs) -> Value:
        """Run one step and return its value."""

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **kwargs: P.kwargs
    ) -> list[Value]:
        """Run a step for each item, side by side, and return the values in order.

        items: the first argument of each call.  arguments, named: the others, equal in all calls.
        """


class InProcess:
    """Runs the steps in this process; `map` runs them in parallel threads."""

    def call(self, step: Callable[P, Value], *arguments: P.args, **kwargs: P.kwargs) -> Value:
        """Call the function."""
        return step(*arguments, **kwargs)

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **kwargs: P.kwargs
    ) -> list[Value]:
        """Call the function for each item in a thread of its own."""
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            futures = [pool.submit(step, item, *arguments, **kwargs) for item in items]
            return [future.result() for future in futures]


IN_PROCESS = InProcess()


@dataclass(frozen=True)
class Quantized:
    """Graphs of a model that are ready together. ranges: the observed statistics, or the failure of calibration; None
    without calibration."""

    exported: Exported
    graphs: tuple[Graph, ...]
    ranges: Observed | StepFailure | None = None


@dataclass(frozen=True)
class Prepared:
    """A model with graphs that are ready together, and the plan of the units that are built from them."""

    exported: Exported
    graphs: tuple[Graph, ...]
    plan: BuildPlan


@dataclass(frozen=True)
class Run(Work):
    """One run of a spec: its steps as methods, each of which takes the result of the one before."""

    runner: StepRunner = IN_PROCESS

    def export(self) -> Exported:
        """The model as canonical ONNX with its golden set; reports what the run leaves out. Raises what `export` and
        `find_unserved` raise."""
        for name in find_unserved(self.spec, self.selection):
            reason = f"no backend of the spec ({', '.join(self.spec.backends)}) builds for it"
            self.context.progress.emit(Finished(name, reason=reason, words=f"left out: {reason}"))
        return self.runner.call(export, self)

    def quantize(self, export_result: Exported) -> Iterator[Quantized]:
        """The model in every variant that the selection needs, in two batches: first the exported model itself, which
        waits for no calibration, then the others."""
        variants = buildable_variants(self.spec, self.selection, export_result)
        plain_variants = [variant for variant in variants if is_exported(variant, export_result)]
        other_variants = [variant for variant in variants if variant not in plain_variants]
        if plain_variants:
            yield self._write(plain_variants, export_result)
        ranges: Observed | StepFailure | None
        try:
            ranges = self.observe(export_result)
        except EnginesmithError as error:  # why the samples could not be observed
            ranges = fail_step("calibrate", error, self.context)
        choices = self._search(find_searched_kinds(other_variants, self.spec, export_result), export_result, ranges)
        yield self._write(other_variants, export_result, ranges, choices)

    def plan(self, graphs: Iterable[Quantized]) -> Iterator[Prepared]:
        """The units of each batch of graphs, each unit once; units whose int8 graph missed its limits come last,
        with the graph that a search found instead. If the spec requires a unit other than fp32, all graphs form one
        batch: the required unit may be refused, and then nothing may be built."""
        unit_names = set[str]()
        other_units = [unit.unit for unit in candidates(self.spec, self.selection) if unit.precision != "fp32"]
        if any(matches_unit(pattern, unit) for pattern in self.spec.build.required for unit in other_units):
            all_batches = list(graphs)
            all_graphs = tuple(graph for batch in all_batches for graph in batch.graphs)
            graphs = [replace(all_batches[-1], graphs=all_graphs)]
        for batch in graphs:
            for ready_batch in self._plan_batch(batch):
                units = tuple(unit for unit in ready_batch.plan.units if unit.name not in unit_names)
                unit_names |= {unit.name for unit in units}
                yield replace(ready_batch, plan=replace(ready_batch.plan, units=units))

    def build_and_prove(self, plan: Iterable[Prepared]) -> Judged:
        """Every unit built and judged, in the order of the spec. When a step raises, units under way are finished and
        recorded before the error is raised. Raises EnginesmithError if a required unit is refused."""
        batches, futures = list[Prepared](), list[Future[list[JudgedUnit]]]()
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            for batch in plan:
                batches.append(batch)
                if batch.plan.units:
                    self.context.progress.emit(Planned(batch.plan))
                    check_required(batch.plan)
                # In a copy of this context, because runners keep their run's state in context variables.
                futures.append(pool.submit(copy_context().run, self._judge, batch))
        judged_units = {unit.built.unit.name: unit for future in futures for unit in future.result()}
        units = {unit.name: unit for batch in batches for unit in batch.plan.units}
        order = [candidate.unit for candidate in candidates(self.spec, self.selection) if candidate.unit in units]
        whole_plan = BuildPlan(self.spec.model, tuple(units[name] for name in order))
        return Judged(batches[-1].exported, whole_plan, tuple(judged_units[unit.name] for unit in whole_plan.wanted))

    def prepare(self) -> Iterator[Prepared]:
        """The first three steps, for callers that do not continue as `compile_model`."""
        return self.plan(self.quantize(self.export()))

    def time(self, judgement: Judged) -> Judged:
        """The units with latency reports, if the spec asks for them. One by one: engines that run at the same time slow
        each other down."""
        units = tuple(self.runner.call(measure, unit, judgement.exported, self) for unit in judgement.units)
        return replace(judgement, units=units)

    def draft(self, judgement: Judged) -> VersionDraft:
        """The draft that `publish` would publish. Raises OSError if a file of the spec is missing."""
        return draft_version(judgement, self)

    def publish(self, judgement: Judged) -> Outcome:
        """Publish the engines that passed; then add the attributions of the engines that failed."""
        judgement = self.time(judgement)
        draft = self.draft(judgement)
        outcome = self.runner.call(publish_version, draft, self.context)
        # Proven units are already published: they do not wait for the attribution of failed ones.
        suspects = find_suspects(judgement.units) if self.spec.validation.attribution != "off" else []
        if suspects:
            reference_digest, golden = judgement.exported.model.digest, judgement.exported.golden
            attributions = self.runner.map(attribute, suspects, reference_digest, golden, self)
            outcome = self.runner.call(publish_attributions, outcome, draft, attributions, self.context)
        self.context.progress.emit(RunConcluded(outcome))
        return outcome

    def observe(self, export_result: Exported) -> Observed | None:
        """Statistics of the calibration samples, observed in the spec's number of parts; None without samples. Raises
        the errors of observing."""
        results = self.runner.map(observe, parts_of(self.spec, export_result), export_result, self)
        return results[0] if len(results) == 1 else self.runner.call(merge, results, self) if results else None

    def _search(
        self, kinds: Sequence[Searched], export_result: Exported, ranges: Observed | StepFailure | None
    ) -> Mapping[Searched, SearchResult | StepFailure]:
        """The results of the spec's searches by kind of int8, or why there is none: calibration failed, or the search,
        which is one job for all kinds."""
        if not kinds or isinstance(ranges, StepFailure):
            return dict.fromkeys(kinds, ranges) if isinstance(ranges, StepFailure) else {}
        try:
            return self.runner.call(choose, kinds, export_result, ranges, self)
        except EnginesmithError as error:
            return dict.fromkeys(kinds, fail_step("search int8", error, self.context))

    def _write(
        self,
        variants: Sequence[GraphVariant],
        export_result: Exported,
        ranges: Observed | StepFailure | None = None,
        choices: Mapping[Searched, SearchResult | StepFailure] | None = None,
    ) -> Quantized:
        graphs = self.runner.map(quantize, variants, export_result, ranges, choices or {}, self)
        return Quantized(export_result, tuple(graphs), ranges)

    def _plan_batch(self, batch: Quantized) -> Iterator[Prepared]:
        export_result, ranges = batch.exported, batch.ranges
        plan = self.runner.call(plan_builds, export_result, batch.graphs, self)
        missed_graphs = find_missed(plan, self.spec, export_result)
        missed_variants = {graph.variant for kind in missed_graphs for graph in kind.graphs}
        ready_units = tuple(unit for unit in plan.units if unit.graph.variant not in missed_variants)
        yield Prepared(export_result, batch.graphs, replace(plan, units=ready_units))
        if missed_graphs:
            observed_ranges = None if isinstance(ranges, StepFailure) else ranges
            graphs = self.runner.call(search_missed, missed_graphs, export_result, observed_ranges, self)
            yield Prepared(export_result, graphs, self.runner.call(plan_builds, export_result, graphs, self))

    def _judge(self, batch: Prepared) -> list[JudgedUnit]:
        built_units = self.runner.map(build, batch.plan.wanted, self)
        return self.runner.map(validate, built_units, batch.exported, self)


def compile_model(run: Run) -> Outcome:
    """All six steps: export, quantize, plan, build, validate, publish. Raises what a step raises."""
    export_result = run.export()
    graphs = run.quantize(export_result)
    plan = run.plan(graphs)
    judgement = run.build_and_prove(plan)
    return run.publish(judgement)
