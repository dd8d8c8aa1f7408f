"""What a build would do and why, in names that the spec's owner knows: what `enginesmith plan` says.

It is answered from the records as far as they go, without running a job or writing anything. What they lack is either
made first (`prepare`), so that every build key is complete, or left open: a unit whose graph is not on record is
'unknown'.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Concatenate, cast

from enginesmith.core.codec import encode
from enginesmith.registry.store.base import Store
from pipeline.compile.causes import Causes
from pipeline.compile.composition import InProcess, Item, P, Quantized, Run, Value
from pipeline.compile.plan import (
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
    """The export, whose golden set is '' where that is not on record, and the graphs that are known.

    missing: the steps that are not on record, as far as that shows before they run.
    missed: graphs, not among these, that a search shall take the place of.
    exported: None where the export is not on record.
    """

    exported: Exported | None = None
    graphs: tuple[Graph, ...] = ()
    missing: tuple[str, ...] = ()
    missed: tuple[MissedGraphs, ...] = ()


class _RecordReader(RunContext):
    """Runs nothing and writes nothing."""

    def remember(self, kind: str, key: Mapping[str, object], value: Mapping[str, object], blobs: list[str]) -> None:
        """Leave the record as it is."""


def open_records(store: Store) -> RunContext:
    """A run context that answers from the records of a store and raises NotOnRecord where a job would run."""
    return _RecordReader(store, OnlyRecords(), OnlyRecords(), Progress())


class _Recalling(InProcess):
    """Leaves out graphs that are not on record, and takes one without its checks, which may have failed, where these
    are not. missing: the steps that are lacking."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **kwargs: P.kwargs
    ) -> list[Value]:
        """The values that are on record. Raises NotOnRecord for other steps than that of a graph."""
        if step.__name__ != quantize.__name__:
            return super().map(step, items, *arguments, **kwargs)
        value_lists = [self._recall(step, item, *arguments, **kwargs) for item in items]
        return [value for values in value_lists for value in values]

    def _recall(
        self, step: Callable[Concatenate[Item, P], Value], item: Item, *arguments: P.args, **kwargs: P.kwargs
    ) -> list[Value]:
        with suppress(NotOnRecord):
            return [step(item, *arguments, **kwargs)]
        with suppress(NotOnRecord):  # where a cast was written twice, its checks decide which one counts
            if (wide_graph := write_graph(item, *arguments, **kwargs, wide_ends=True)).recipe:  # type: ignore[arg-type, misc]
                self.missing.append(f"check {wide_graph.variant.name}")
                return []
        try:
            return [cast("Value", write_graph(item, *arguments, **kwargs))]  # type: ignore[arg-type]
        except NotOnRecord as lacking:
            self.missing.append(str(lacking))
            return []


def on_record(run: Run) -> OnRecord:
    """The export and the graphs of a run as far as they are on record. Its context is of `open_records`."""
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
    """The same with searched graphs for those that missed their limits; without these where no search is on record."""
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


# What a proof depends on beside the engine.
_PROVING = ("golden", "proof")


@dataclass(frozen=True)
class UnitForecast:
    """A unit of the plan. action: as of a `Unit`, or 'unknown'.  unit: None where the graph is not known.

    proven_again: whether its engine is there, and a build proves it all the same.
    required: whether `build.required` of the spec names it.
    """

    candidate: PlanCandidate
    action: str
    reason: str
    required: bool
    unit: Unit | None = None
    proven_again: bool = False

    def to_json(self) -> Json:
        """What `enginesmith plan --json` prints of it; without a graph it has no build key and no request."""
        request = self.unit.request if self.unit else None
        return {
            "target": self.candidate.target.name,
            "backend": self.candidate.backend.name,
            **{name: getattr(self.candidate, name) for name in ("precision", "built_at", "opens_in", "absence")},
            **{name: getattr(self, name) for name in ("action", "reason", "required", "proven_again")},
            "build_key": request and request.key,
            "request": request and encode(request),
        }


@dataclass(frozen=True)
class ForecastChange:
    """Something that changed since the last build, and what follows from it."""

    what: str
    follows: str


@dataclass(frozen=True)
class Forecast:
    """What a build of a model would do. changes: since the last build of its units, whether or not one is built.

    missing: the steps that are not on record.
    """

    model: str
    units: tuple[UnitForecast, ...]
    changes: tuple[ForecastChange, ...]
    missing: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """What `enginesmith plan --json` prints."""
        changes = [vars(change) for change in self.changes]
        units = [unit.to_json() for unit in self.units]
        return {"model": self.model, "missing": list(self.missing), "changes": changes, "units": units}

    @property
    def counts(self) -> Counter[str]:
        """How many units there are by action."""
        return Counter(unit.action for unit in self.units)


def foresee(records: OnRecord, run: Run, new_steps: Collection[str] = ()) -> Forecast:
    """Every unit of a run with its action and the cause of it, by name. Its context is of `open_records`.

    new_steps: names of the steps that were not on record and were carried out for this forecast.
    """
    causes, planned_units = Causes(run), dict[str, Unit]()
    if records.exported is not None:
        plan = plan_builds(records.exported, records.graphs, run)
        planned_units = {unit.name: unit for unit in plan.units}
    unit_candidates = candidates(run.spec, run.selection)
    units = tuple(
        _foresee_unit(candidate, planned_units.get(candidate.unit), records, causes, run)
        for candidate in unit_candidates
    )
    forecast = Forecast(run.spec.model, units, (), records.missing)
    return replace(forecast, changes=tuple(_changes(forecast, records, causes, (*new_steps, *records.missing))))


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


def _changes(forecast: Forecast, records: OnRecord, causes: Causes, new_steps: Sequence[str]) -> list[ForecastChange]:
    """Each change once, with what follows from it as far as that is known. new_steps: those that are not on record; a
    graph that is written for new units alone follows from no change."""
    effects: dict[str, str] = {}
    known_candidates = [unit.candidate for unit in forecast.units if unit.candidate.unit in causes.before]
    write_steps = {f"write {candidate.variant.name}" for candidate in known_candidates}
    if any(unit.action == "unknown" and unit.candidate in known_candidates for unit in forecast.units):
        write_steps.add("quantize")
    new_steps = [name for name in new_steps if name in write_steps or not name.startswith(("write ", "quantize"))]
    for stage in ("export", "calibration", "golden", "proof"):
        for unit in forecast.units:
            for change in causes.list_changes(unit.candidate.unit, stage):
                effects.setdefault(change, _follows(change, stage, forecast, records, causes, new_steps))
    return [ForecastChange(change, effect) for change, effect in effects.items()]


def _follows(
    change: str, stage: str, forecast: Forecast, records: OnRecord, causes: Causes, new_steps: Sequence[str]
) -> str:
    """What a build does because of a change: the steps that are not on record, and engines of which it is the cause."""
    if records.exported is None:
        if stage == "export":
            return "the model is exported again; if the ONNX model differs, its engines are built and proven again"
        if stage != "calibration":
            golden_text = "the golden set is made again; " if stage == "golden" else ""
            return f"{golden_text}which engines are proven again is known after the export"
    caused_units = [unit for unit in forecast.units if change in unit.reason]
    built_text = _count(sum(unit.action == "build" for unit in caused_units), "built and proven")
    proven_text = _count(sum(unit.proven_again for unit in caused_units), "proven again")
    if stage == "export":
        last_builds = [
            causes.before[unit.candidate.unit] for unit in forecast.units if unit.candidate.unit in causes.before
        ]
        is_same_export = records.exported is not None and {entry.sources.onnx for entry in last_builds} == {
            records.exported.model.digest
        }
        return f"{_say_export(new_steps, is_same_export)}; {built_text or 'no engine changes'}"
    if stage == "calibration":
        steps = _list_steps(new_steps)
        done_text = f"the model is {' and '.join(steps)} again" if steps else "the results are in the registry"
        open_text = "which graphs change is known then" if steps and forecast.counts["unknown"] else ""
        return f"{done_text}; {open_text or built_text or 'no engine changes'}"
    proven_text = proven_text or "no engine is proven again"
    if stage != "golden":
        return proven_text
    redo_steps = _has(new_steps, "golden set", "export")
    return f"{'the golden set is made again' if redo_steps else 'its golden set is in the registry'}; {proven_text}"


def _say_export(new_steps: Sequence[str], is_same_export: bool) -> str:
    if not _has(new_steps, "export"):
        return "its export is in the registry"
    result_text = "the same ONNX model" if is_same_export else "a different ONNX model"
    steps = _list_steps(new_steps)
    return f"the model is exported again, to {result_text}" + (f", {' and '.join(steps)}" if steps else "")


def _list_steps(new_steps: Sequence[str]) -> list[str]:
    verbs = {"calibrated": ("calibrate", "merge"), "quantized": ("write", "quantize", "choose", "search")}
    return [verb for verb, steps in verbs.items() if _has(new_steps, *steps)]


def _has(new_steps: Sequence[str], *steps: str) -> bool:
    return any(name.startswith(steps) for name in new_steps)


def _count(count: int, outcome: str) -> str:
    return f"{count} {'engine is' if count == 1 else 'engines are'} {outcome}" if count else ""
