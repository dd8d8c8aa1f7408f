"""What a build would do and why, in names that the spec's owner knows: what `enginesmith plan` says.

It is answered from the records as far as they go, without running a job or writing anything. What they lack is either
made first (`prepare`), so that every build key is complete, or left open: a unit whose graph is not on record is
'unknown'.
"""

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
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **named: P.kwargs
    ) -> list[Value]:
        """The values that are on record. Raises NotOnRecord for other steps than that of a graph."""
        if step.__name__ != quantize.__name__:
            return super().map(step, items, *arguments, **named)
        value_lists = [self._recall(step, item, *arguments, **named) for item in items]
        return [value for values in value_lists for value in values]

    def _recall(
        self, step: Callable[Concatenate[Item, P], Value], item: Item, *arguments: P.args, **named: P.kwargs
    ) -> list[Value]:
        with suppress(NotOnRecord):
            return [step(item, *arguments, **named)]
        try:
            return [cast("Value", write_graph(item, *arguments, **named))]  # type: ignore[arg-type]
        except NotOnRecord as lacking:
            self.missing.append(str(lacking))
            return []


def on_record(run: Run) -> OnRecord:
    """The export and the graphs of a run as far as they are on record. Its context is of `open_records`."""
    try:
        exported = recorded_export(run)
    except NotOnRecord as step:
        return OnRecord(missing=(str(step),))
    if exported is None:
        return OnRecord(missing=("export",))
    recalling, batches = _Recalling(), list[Quantized]()
    missing = [] if exported.golden else ["golden set"]
    try:
        batches.extend(replace(run, runner=recalling).quantize(exported))
    except NotOnRecord as step:
        missing.append(str(step))
    ranges = batches[-1].ranges if batches else None
    record_state = OnRecord(
        exported,
        tuple(graph for batch in batches for graph in batch.graphs),
        tuple(dict.fromkeys([*missing, *recalling.missing])),
    )
    return _search_on_record(record_state, exported, None if isinstance(ranges, StepFailure) else ranges, run)


def _search_on_record(known: OnRecord, exported: Exported, ranges: Observed | None, run: Run) -> OnRecord:
    """The same with searched graphs in the place of those that missed their limits; without these where the search is
    not on record."""
    if not any(graph.proof.failed for graph in known.graphs):
        return known
    searched, waiting = list[Graph](), list[MissedGraphs]()
    for missed in find_missed(plan_builds(exported, known.graphs, run), run.spec, exported):
        try:
            searched += search_missed([missed], exported, ranges, run)
        except NotOnRecord:
            waiting.append(missed)
    others = [graph for kind in waiting for graph in kind.graphs]
    by_variant = {graph.variant: graph for graph in searched}
    graphs = tuple(by_variant.get(graph.variant, graph) for graph in known.graphs if graph not in others)
    missing = (*known.missing, *(f"search of {kind.name}" for kind in waiting))
    return OnRecord(exported, graphs, missing, tuple(waiting))


# What a proof depends on beside the engine.
_PROVING = ("golden", "proof")


@dataclass(frozen=True)
class UnitForecast:
    """A unit of the plan. action: as of a `Unit`, or 'unknown'.  unit: None where the graph is not known.

    proven_again: whether its engine is there, and a build proves it all the same.
    """

    item: PlanCandidate
    action: str
    reason: str
    required: bool
    unit: Unit | None = None
    proven_again: bool = False

    def to_json(self) -> Json:
        """What `enginesmith plan --json` prints of it; without a graph it has no build key and no request."""
        request = self.unit.request if self.unit else None
        return {
            "target": self.item.target.name,
            "precision": self.item.precision,
            "backend": self.item.backend.name,
            "action": self.action,
            "reason": self.reason,
            "built_at": self.item.built_at,
            "opens_in": self.item.opens_in,
            "absence": self.item.absence,
            "required": self.required,
            "proven_again": self.proven_again,
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

    def count(self, action: str) -> int:
        """How many units have this action."""
        return [unit.action for unit in self.units].count(action)


def foresee(known: OnRecord, run: Run, made: Collection[str] = ()) -> Forecast:
    """Every unit of a run with its action and the cause of it, by name. Its context is of `open_records`.

    made: names of the steps that were not on record and were carried out for this forecast.
    """
    causes, planned = Causes(run), dict[str, Unit]()
    if known.exported is not None:
        plan = plan_builds(known.exported, known.graphs, run)
        planned = {unit.name: unit for unit in plan.units}
    unit_candidates = candidates(run.spec, run.selection)
    units = tuple(_foresee_unit(item, planned.get(item.unit), known, causes, run) for item in unit_candidates)
    forecast = Forecast(run.spec.model, units, (), known.missing)
    return replace(forecast, changes=tuple(_changes(forecast, known, causes, (*made, *known.missing))))


def _foresee_unit(item: PlanCandidate, unit: Unit | None, known: OnRecord, causes: Causes, work: Work) -> UnitForecast:
    if unit is None or known.exported is None:
        required = any(matches_unit(pattern, item.unit) for pattern in work.spec.build.required)
        return UnitForecast(item, "unknown", _explain_unknown(item, known, causes), required)
    reason, again = unit.reason, False
    if unit.action == "cached":
        try:
            validate(build(unit, work), known.exported, work)
        except NotOnRecord:  # the engine runs here, and its proof is not on record
            changed = "; ".join(causes.list_changes(unit.name, *_PROVING)) or "this proof is not in the registry"
            reason, again = f"{reason}; it is proven again: {changed}", True
    return UnitForecast(item, unit.action, reason, unit.required, unit, again)


def _explain_unknown(item: PlanCandidate, known: OnRecord, causes: Causes) -> str:
    for missed in known.missed:
        if item.variant in {graph.variant for graph in missed.graphs}:
            return f"{missed.why}: build searches for a better quantization; the action is known after the search"
    name, exported = item.unit, known.exported is not None
    stages = ["calibration"] if exported else ["export", *(["calibration"] if item.precision != "fp32" else [])]
    none = "no engine for this unit yet" if name not in causes.before else f"missing: {', '.join(known.missing)}"
    after = "quantized" if exported else "exported"
    follows = item.variant.searched and search_follows(causes.work.spec)
    searched = "; if plain calibration misses the limits, build searches for a better quantization" if follows else ""
    changes = "; ".join(causes.list_changes(name, *stages)) or none
    return f"{changes}; the action is known once the model is {after}{searched}"


def _changes(forecast: Forecast, known: OnRecord, causes: Causes, made: Sequence[str]) -> list[ForecastChange]:
    """Each change once, with what follows from it as far as that is known. made: steps that are not on record; a graph
    that is written for new units alone follows from no change."""
    effects: dict[str, str] = {}
    before = [unit.item for unit in forecast.units if unit.item.unit in causes.before]
    write_steps = {f"write {item.variant.name}" for item in before}
    if any(unit.action == "unknown" and unit.item in before for unit in forecast.units):
        write_steps.add("quantize")
    made = [name for name in made if name in write_steps or not name.startswith(("write ", "quantize"))]
    for stage in ("export", "calibration", "golden", "proof"):
        for unit in forecast.units:
            for what in causes.list_changes(unit.item.unit, stage):
                effects.setdefault(what, _follows(what, stage, forecast, known, causes, made))
    return [ForecastChange(what, follows) for what, follows in effects.items()]


def _follows(what: str, stage: str, forecast: Forecast, known: OnRecord, causes: Causes, made: Sequence[str]) -> str:
    """What a build does because of a change: the steps that are not on record, and engines of which it is the cause."""
    if known.exported is None:
        if stage == "export":
            return "the model is exported again; if the ONNX model differs, its engines are built and proven again"
        if stage != "calibration":
            again = "the golden set is made again; " if stage == "golden" else ""
            return f"{again}which engines are proven again is known after the export"
    caused = [unit for unit in forecast.units if what in unit.reason]
    built = _count(sum(unit.action == "build" for unit in caused), "built and proven")
    proven = _count(sum(unit.proven_again for unit in caused), "proven again")
    if stage == "export":
        before = [causes.before[unit.item.unit] for unit in forecast.units if unit.item.unit in causes.before]
        same = known.exported is not None and {item.sources.onnx for item in before} == {known.exported.model.digest}
        return f"{_say_export(made, same)}; {built or 'no engine changes'}"
    if stage == "calibration":
        steps = _list_steps(made)
        done = f"the model is {' and '.join(steps)} again" if steps else "the results are in the registry"
        open_ = "which graphs change is known then" if steps and forecast.count("unknown") else ""
        return f"{done}; {open_ or built or 'no engine changes'}"
    proven = proven or "no engine is proven again"
    if stage != "golden":
        return proven
    anew = _has(made, "golden set", "export")
    return f"{'the golden set is made again' if anew else 'its golden set is in the registry'}; {proven}"


def _say_export(made: Sequence[str], same: bool) -> str:
    if not _has(made, "export"):
        return "its export is in the registry"
    to = "the same ONNX model" if same else "a different ONNX model"
    steps = _list_steps(made)
    return f"the model is exported again, to {to}" + (f", {' and '.join(steps)}" if steps else "")


def _list_steps(made: Sequence[str]) -> list[str]:
    words = {"calibrated": ("calibrate", "merge"), "quantized": ("write", "quantize", "choose", "search")}
    return [word for word, steps in words.items() if _has(made, *steps)]


def _has(made: Sequence[str], *steps: str) -> bool:
    return any(name.startswith(steps) for name in made)


def _count(count: int, what: str) -> str:
    return f"{count} {'engine is' if count == 1 else 'engines are'} {what}" if count else ""
