"""The forecast of a build with reasons, in the spec's names: the output of `enginesmith plan`.

It is read from the records; no job runs and nothing is written. Missing results are either computed first (`prepare`),
which completes every build key, or left open: a unit whose graph is not on record is 'unknown'.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Concatenate, cast

from enginesmith.core.codec import encode
from enginesmith.registry.store.base import Store
from pipeline.compile.causes import Causes
from pipeline.compile.composition import InProcess, Item, P, Quantized, Run, Value
from pipeline.compile.plan import (
    HERE,
    MissedGraphs,
    PlanCandidate,
    candidates,
    find_missed,
    plan_builds,
    search_follows,
    search_missed,
)
from pipeline.compile.run_context import NotOnRecord, OnlyRecords, RunContext, Work
from pipeline.compile.steps.engines import build
from pipeline.compile.steps.exports import recorded_export
from pipeline.compile.steps.graphs import quantize, write_graph
from pipeline.compile.steps.proofs import validate
from pipeline.progress.events import Progress
from pipeline.spec.model import matches_unit
from pipeline.values import Exported, Graph, Json, Observed, StepFailure, Unit


@dataclass(frozen=True)
class OnRecord:
    """The export and the graphs of a run that are on record. exported: None without a recorded export; its golden set
    is '' if only that is not recorded.

    missing: the steps known to be not on record.  missed: graphs, not among `graphs`, that a search will replace.
    """

    exported: Exported | None = None
    graphs: tuple[Graph, ...] = ()
    missing: tuple[str, ...] = ()
    missed: tuple[MissedGraphs, ...] = ()


class _RecordReader(RunContext):
    """A run context that runs and writes nothing."""

    foresees = True

    def remember(self, kind: str, key: Mapping[str, object], value: Mapping[str, object], blobs: list[str]) -> None:
        """Leave the record as it is."""


def open_records(store: Store) -> RunContext:
    """A run context that answers from the records of a store and raises NotOnRecord where a job would run."""
    return _RecordReader(store, OnlyRecords(), OnlyRecords(), Progress())


class _Recalling(InProcess):
    """A runner that leaves out graphs that are not recorded. If only a graph's checks are not recorded, it returns the
    graph without them (they may have failed).  missing: the steps that are not recorded."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **kwargs: P.kwargs
    ) -> list[Value]:
        """The values that are on record. Only `quantize` may lack some; other steps then raise NotOnRecord."""
        if step.__name__ != quantize.__name__:
            return super().map(step, items, *arguments, **kwargs)
        value_lists = [self._recall(step, item, *arguments, **kwargs) for item in items]
        return [value for values in value_lists for value in values]

    def _recall(
        self, step: Callable[Concatenate[Item, P], Value], item: Item, *arguments: P.args, **kwargs: P.kwargs
    ) -> list[Value]:
        with suppress(NotOnRecord):
            return [step(item, *arguments, **kwargs)]
        with suppress(NotOnRecord):  # if a cast was written twice, its checks decide which one is used
            if (wide_graph := write_graph(item, *arguments, **kwargs, wide_ends=True)).recipe:  # type: ignore[arg-type, misc]
                self.missing.append(f"check {wide_graph.variant.name}")
                return []
        try:
            return [cast("Value", write_graph(item, *arguments, **kwargs))]  # type: ignore[arg-type]
        except NotOnRecord as lacking:
            self.missing.append(str(lacking))
            return []


def on_record(run: Run) -> OnRecord:
    """The recorded export and graphs of a run, whose context must come from `open_records`."""
    try:
        export = recorded_export(run)
    except NotOnRecord as step:
        return OnRecord(missing=(str(step),))
    if export is None:
        return OnRecord(missing=("export",))
    recall_runner, batches = _Recalling(), list[Quantized]()
    missing_parts = [] if export.golden else ["golden set"]
    try:
        batches.extend(replace(run, runner=recall_runner).quantize(export))
    except NotOnRecord as step:
        missing_parts.append(str(step))
    ranges = batches[-1].ranges if batches else None
    record_state = OnRecord(
        export,
        tuple(graph for batch in batches for graph in batch.graphs),
        tuple(dict.fromkeys([*missing_parts, *recall_runner.missing])),
    )
    return _search_on_record(record_state, export, None if isinstance(ranges, StepFailure) else ranges, run)


def _search_on_record(records: OnRecord, export: Exported, ranges: Observed | None, run: Run) -> OnRecord:
    """The records with searched graphs in place of graphs that missed their limits. Graphs whose search is not on
    record move to `missed`."""
    if not any(graph.proof.failed for graph in records.graphs):
        return records
    searched_graphs, searches = list[Graph](), list[MissedGraphs]()
    for missed_graphs in find_missed(plan_builds(export, records.graphs, run), run.spec, export):
        try:
            searched_graphs += search_missed([missed_graphs], export, ranges, run)
        except NotOnRecord:
            searches.append(missed_graphs)
    other_graphs = [graph for graphs_of_kind in searches for graph in graphs_of_kind.graphs]
    graphs_by_variant = {graph.variant: graph for graph in searched_graphs}
    graphs = tuple(graphs_by_variant.get(graph.variant, graph) for graph in records.graphs if graph not in other_graphs)
    missing_parts = (*records.missing, *(f"search of {graphs_of_kind.kind.name}" for graphs_of_kind in searches))
    return OnRecord(export, graphs, missing_parts, tuple(searches))


# Inputs of a proof other than the engine.
_PROVING = ("golden", "proof")


@dataclass(frozen=True)
class UnitForecast:
    """A unit of the plan. action: that of a `Unit`, or 'unknown'.  unit: None if its graph is not known.

    proven_again: whether its engine exists and a build would prove this engine again.  required: whether
    `build.required` of the spec names the unit.
    """

    candidate: PlanCandidate
    action: str
    reason: str
    required: bool
    unit: Unit | None = None
    proven_again: bool = False

    @property
    def built_at(self) -> str:
        """`candidate.built_at`; '' for a refused unit that would be built here, since no build makes it."""
        return "" if (self.action, self.candidate.built_at) == ("refused", HERE) else self.candidate.built_at

    def to_json(self) -> Json:
        """The unit's part of `enginesmith plan --json`; without a graph, build key and request are null."""
        request = self.unit.request if self.unit else None
        return {
            "target": self.candidate.target.name,
            "backend": self.candidate.backend.name,
            **{name: getattr(self.candidate, name) for name in ("precision", "opens_in", "absence")},
            **{name: getattr(self, name) for name in ("action", "reason", "required", "proven_again", "built_at")},
            "build_key": request and request.key,
            "request": request and encode(request),
        }


@dataclass(frozen=True)
class Forecast:
    """Forecast of a model's build. changes: of its sources since its units' last build, even if no unit is built.

    missing: the steps that are not on record.
    """

    model: str
    units: tuple[UnitForecast, ...]
    changes: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """The output of `enginesmith plan --json`."""
        units = [unit.to_json() for unit in self.units]
        return {"model": self.model, "missing": list(self.missing), "changes": list(self.changes), "units": units}

    @property
    def counts(self) -> Counter[str]:
        """The number of units per action."""
        return Counter(unit.action for unit in self.units)


def foresee(records: OnRecord, run: Run) -> Forecast:
    """Every unit of a run with its action and the named cause. The run's context must come from `open_records`."""
    causes, planned_units = Causes(run), dict[str, Unit]()
    if records.exported is not None:
        plan = plan_builds(records.exported, records.graphs, run)
        planned_units = {unit.name: unit for unit in plan.units}
    unit_candidates = candidates(run.spec, run.selection)
    units = tuple(
        _foresee_unit(candidate, planned_units.get(candidate.unit), records, causes, run)
        for candidate in unit_candidates
    )
    stages = ("export", "calibration", "golden", "proof")
    changes = (
        change for stage in stages for unit in units for change in causes.list_changes(unit.candidate.unit, stage)
    )
    return Forecast(run.spec.model, units, tuple(dict.fromkeys(changes)), records.missing)


def _foresee_unit(
    candidate: PlanCandidate, unit: Unit | None, records: OnRecord, causes: Causes, work: Work
) -> UnitForecast:
    if unit is None or records.exported is None:
        is_required = any(matches_unit(pattern, candidate.unit) for pattern in work.spec.build.required)
        return UnitForecast(candidate, "unknown", _explain_unknown(candidate, records, causes), is_required)
    reason, is_reproven = unit.reason, False
    if unit.action == "cached":
        try:
            validate(build(unit, work), records.exported, work)
        except NotOnRecord:  # the engine runs here, and its proof is not on record
            change_text = "; ".join(causes.list_changes(unit.name, *_PROVING)) or "this proof is not in the registry"
            reason, is_reproven = f"{reason}; it is proven again: {change_text}", True
    return UnitForecast(candidate, unit.action, reason, unit.required, unit, is_reproven)


def _explain_unknown(candidate: PlanCandidate, records: OnRecord, causes: Causes) -> str:
    for missed_graphs in records.missed:
        if candidate.variant in {graph.variant for graph in missed_graphs.graphs}:
            return (
                f"{missed_graphs.why}: build searches for a better quantization; the action is known after the search"
            )
    name, is_exported = candidate.unit, records.exported is not None
    stages = ["calibration"] if is_exported else ["export", *(["calibration"] if candidate.precision != "fp32" else [])]
    reason_text = (
        "no engine for this unit yet" if name not in causes.before else f"missing: {', '.join(records.missing)}"
    )
    state_text = "quantized" if is_exported else "exported"
    needs_search = candidate.variant.searched and search_follows(causes.work.spec)
    search_text = (
        "; if plain calibration misses the limits, build searches for a better quantization" if needs_search else ""
    )
    change_text = "; ".join(causes.list_changes(name, *stages)) or reason_text
    return f"{change_text}; the action is known once the model is {state_text}{search_text}"
