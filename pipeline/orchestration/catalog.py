"""Plans and builds all specs of a place."""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Literal

from builders.execution.local import workdir
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.core.hardware.machine import match_targets
from enginesmith.core.text import pluralize
from enginesmith.core.types import Precision, Target
from enginesmith.registry.builds.runs import RecordCopies, StoreListing
from enginesmith.registry.manifest import STATUSES
from enginesmith.registry.registered_specs import addresses
from enginesmith.registry.store.base import open_store
from pipeline.compile.composition import Run, StepRunner
from pipeline.compile.ensembles.assembly import Assembly, CompiledGraph, EnsembleForecast, ForecastGraph
from pipeline.compile.forecast import Forecast, OnRecord, foresee, on_record, open_records
from pipeline.compile.plan import candidates, find_unserved, plan_builds
from pipeline.compile.steps.exports import export
from pipeline.intake.registration import SCHEME, Bucket, Found, below, files_below, place_at, registry_of, spec_at
from pipeline.orchestration.run import (
    Compiled,
    Executors,
    RunOptions,
    compile_locked,
    open_context,
    open_run,
    select,
    split_names,
    start_executors,
    store_named,
)
from pipeline.outcome import Outcome
from pipeline.progress import Progress, by_model
from pipeline.progress.events import RunConcluded
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import LoadedEnsemble, load_ensemble, named_graphs
from pipeline.spec.model import ModelSpec
from pipeline.values import Selection

# One run of a spec of either kind, of a model or of an ensemble, whose graphs are models of their own; and what a
# build of it would do: what is not on record is exported and quantized, where that is wanted.


def compile_any(
    address: Path | str | Found,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors | None = None,
) -> Compiled:
    """Build, prove and publish the spec at an address: of a model, or of an ensemble with its graphs.

    Of several runs on the same thing at once one works; the others wait for its lock and find the steps on record.

    executors: None: are started for this run.
    Raises what `open_run` and `compile_model` raise.
    """
    with spec_at(address, options.registry) as spec_file:
        if not is_ensemble(spec_file.path):
            with open_run(spec_file, options, progress, executors, runner) as run:
                return Compiled(compile_locked(run, options), run.context.store)
        with nullcontext(executors) if executors else start_executors(options) as executor_pair:
            return _compile_ensemble(spec_file, options, runner, progress, executor_pair)


def _compile_ensemble(
    spec_place: Found, options: RunOptions, runner: StepRunner, progress: Progress, executors: Executors
) -> Compiled:
    ensemble = load_ensemble(spec_place.path, spec_place.address)
    options = replace(options, registry=registry_of(ensemble.spec, options.registry))
    store = open_store(str(options.registry), create=True)
    progress = by_model(progress)
    with open_context(ensemble.spec, store, options, progress, executors) as context, workdir() as folder:

        def compile_graph(spec: ModelSpec) -> CompiledGraph:
            # The options that its spec supports, without a channel, because the ensemble has one.
            graph_spec = spec.model_copy(update={"publication": spec.publication.model_copy(update={"channel": None})})
            graph_options = own_options(spec, ensemble, options)
            with open_run(graph_spec, graph_options, progress, executors, runner) as run:
                compiled_model, exported_graph = compile_locked(run, graph_options), export(run)
            return CompiledGraph(compiled_model, exported_graph, wanted_of(spec, run.selection, options))

        outcome = Assembly(ensemble, context, folder).run(compile_graph)
        context.progress.emit(RunConcluded(outcome))
        return Compiled(outcome, store)


def wanted_of(
    spec: ModelSpec, selection: Selection, options: RunOptions
) -> tuple[Sequence[Target], Sequence[Precision]]:
    """The targets and precisions of a graph that a run of the ensemble needs. selection: of the graph's own options."""
    precision_names = split_names(options.precisions) or spec.precision_list()
    precisions = [precision for precision in spec.precision_list() if precision in precision_names]
    return selection.targets or spec.target_list(), precisions


def own_options(spec: ModelSpec, ensemble: LoadedEnsemble, options: RunOptions) -> RunOptions:
    """The options of a run of one graph: names that only other graphs have are left out, and a precision that it does
    not have is replaced by its widest one. A name that no graph has stays, and is refused."""
    graphs = ensemble.graphs.values()

    def keep(text: str | None, have: dict[str, set[str]], instead: str | None) -> str | None:
        if text is None:
            return None
        names = split_names(text)
        graph_names = [
            name
            for name in names
            if name in have[spec.model] or not any(name in option_names for option_names in have.values())
        ]
        return ",".join(graph_names) or instead or text

    precisions = {graph.model: {str(precision) for precision in graph.precision_list()} for graph in graphs}
    backends = {graph.model: set(graph.backends) for graph in graphs}
    targets = {
        graph.model: {name for name in split_names(options.targets) if match_targets(name, graph.target_list())}
        for graph in graphs
    }
    return replace(
        options,
        targets=keep(options.targets, targets, None),
        precisions=keep(options.precisions, precisions, spec.precision_list()[0]),
        backends=keep(options.backends, backends, None),
    )


Tell = Callable[[str], object]


def foresee_spec(
    address: str | Found, options: RunOptions, progress: Progress, no_export: bool, tell: Tell = lambda _: None
) -> Forecast | EnsembleForecast:
    """Forecast of a build of the spec at an address. no_export: use only records.

    tell: called with what the plan leaves out, and what is done first.
    Raises as `open_run`, and what a step raises.
    """
    with spec_at(address, options.registry) as spec_file:
        if is_ensemble(spec_file.path):
            ensemble = load_ensemble(spec_file.path, spec_file.address)
            return foresee_ensemble(ensemble, options, progress, no_export, tell)
        return _foresee_model(spec_file.load(), options, progress, no_export, tell).forecast


def foresee_ensemble(
    ensemble: LoadedEnsemble, options: RunOptions, progress: Progress, no_export: bool, tell: Tell = lambda _: None
) -> EnsembleForecast:
    """`foresee_spec` of an ensemble that was read."""
    uri = registry_of(ensemble.spec, options.registry)
    store = store_named(uri)
    records = open_records(store)
    with nullcontext() if no_export else start_executors(options) as executors, workdir() as folder:

        def foresee_graph(spec: ModelSpec, step: str | None) -> ForecastGraph:
            graph_options = own_options(spec, ensemble, replace(options, registry=uri))
            graph = _foresee_model(spec, graph_options, progress, no_export, tell, executors, step)
            return replace(graph, selection=wanted_of(spec, select(spec, graph_options), options))

        if executors is None:
            return Assembly(ensemble, records, folder).plan(foresee_graph, records)
        with open_context(ensemble.spec, store, options, progress, executors, keep_state=False) as context:
            return Assembly(ensemble, context, folder).plan(foresee_graph, records)


def _foresee_model(
    spec: ModelSpec,
    options: RunOptions,
    progress: Progress,
    no_export: bool,
    tell: Tell,
    executors: Executors | None = None,
    step: str | None = None,
) -> ForecastGraph:
    """The forecast of a model's build.  step: a step whose result is needed for any of it."""
    selection = select(spec, options)
    unserved_names = find_unserved(spec, selection)
    if no_export and unserved_names:
        tell(f"left out, because no backend of the spec builds for these targets: {', '.join(unserved_names)}")
    recorded_run = Run(spec, open_records(store_named(registry_of(spec, options.registry))), selection)
    record_state = OnRecord(missing=(step,)) if step else on_record(recorded_run)
    if record_state.missing and not no_export:
        verb = "is missing and runs" if len(record_state.missing) == 1 else "are missing and run"
        tell(f"{', '.join(record_state.missing)} {verb} first (--no-export: use only results in the registry)")
    if not no_export:
        with open_run(spec, options, progress, executors, keep_state=False) as run:
            batches = list(run.prepare())
            recorded_run = replace(recorded_run, selection=run.selection)
        # The last graph of each variant: a searched graph replaces one that missed its limits.
        graphs = {graph.variant: graph for batch in batches for graph in batch.graphs}
        record_state = OnRecord(batches[-1].exported, tuple(graphs.values()))
    return ForecastGraph(foresee(record_state, recorded_run), record_state.exported, ((), ()))


# Bytes of a file that are searched for the key `model`.
LARGEST_LOOKED_AT = 1 << 20
_MODEL = re.compile(rb"^[\"']?model[\"']?\s*:", re.MULTILINE)


@dataclass(frozen=True)
class CatalogRow:
    """The outcome of one spec. state: 'published', 'unchanged' (the version existed) or 'failed' (there is none).

    engines: how many by status.  reason: why it failed, or the engines that did.
    model: None where the spec cannot be read.
    """

    spec: str
    model: str | None
    state: Literal["published", "unchanged", "failed"]
    version: str | None = None
    engines: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether neither the spec nor one of its engines failed."""
        return self.state != "failed" and not self.engines.get("failed")


@contextmanager
def gather_specs(specs: str, registry: str | None) -> Iterator[Sequence[str | Found]]:
    """Addresses of the specs in a folder, at a `file://` URI or in a bucket (copied, while inside); for 'registered',
    of the newest registered spec of each model. Raises InputError where there is none, UnavailableError."""
    if specs == SCHEME.removesuffix(":"):
        uri = registry_of(None, registry)
        spec_addresses = addresses(open_store(uri))
        if not spec_addresses:
            raise InputError(f"no spec is registered in {uri}; `enginesmith prefect register SPEC` registers one")
        yield spec_addresses
        return
    with place_at(specs) as specs_place:
        specs_place.refresh()
        paths = without_graphs(spec_files(specs_place.folder))
        if not paths:
            raise InputError(f"{specs} holds no spec: no .yaml file there has the key `model`; name another place")
        # A copied file has the address of its original.
        names = [path.relative_to(specs_place.folder).as_posix() for path in paths]
        is_copied = isinstance(specs_place, Bucket)
        yield [
            Found(below(specs, name) if is_copied else str(path), path) for name, path in zip(names, paths, strict=True)
        ]


def spec_files(folder: Path) -> list[Path]:
    """YAML files with a key `model`. Whether one is a valid spec shows when it is read."""

    def has_model(path: Path) -> bool:
        try:
            with path.open("rb") as stream:
                return _MODEL.search(stream.read(LARGEST_LOOKED_AT)) is not None
        except OSError:
            return True  # reading it again says why not

    return [path for path in files_below(folder) if path.suffix in (".yaml", ".yml") and has_model(path)]


def without_graphs(paths: Sequence[Path]) -> list[Path]:
    """The specs without those of an ensemble's graphs, which are built with the ensemble."""
    graph_paths = {file.resolve() for path in paths if is_ensemble(path) for file in named_graphs(path)}
    return [path for path in paths if path.resolve() not in graph_paths]


def compile_row(
    address: str | Found,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors,
    report: Callable[[Compiled], object] = lambda _: None,
) -> CatalogRow:
    """Compile one spec of many. An error is not raised: it is the row's reason. report: called with what was
    compiled."""
    try:
        compiled_spec = compile_any(address, options, runner, progress, executors)
        report(compiled_spec)
    except EnginesmithError as error:
        return CatalogRow(str(address), None, "failed", reason=str(error))
    except Exception as error:
        logging.getLogger(__name__).exception("%s", address)
        return CatalogRow(str(address), None, "failed", reason=f"{type(error).__name__}: {error}")
    return _row(str(address), compiled_spec.outcome)


def compile_all(
    addresses: Sequence[str | Found],
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors,
    report: Callable[[Compiled], object] = lambda _: None,
) -> list[CatalogRow]:
    """Compile every spec, several at a time; a row for each, in order. report: as for `compile_row`."""
    return runner.map(compile_row, addresses, options, runner, by_model(progress), executors, report)


def words(rows: Sequence[CatalogRow]) -> str:
    """The outcome of a catalog in a line: '4 specs: 2 published, 1 unchanged, 1 failed'."""
    states = Counter(row.state for row in rows)
    counts = ", ".join(f"{states[state]} {state}" for state in ("published", "unchanged", "failed") if states[state])
    partial_count = sum(not row.good and row.state != "failed" for row in rows)
    return f"{pluralize(len(rows), 'spec')}: {counts}" + (
        f"; {partial_count} with engines that failed" if partial_count else ""
    )


def _row(address: str, outcome: Outcome) -> CatalogRow:
    counts = Counter(engine.entry.status for engine in outcome.engines)
    engine_counts: dict[str, int] = {status: counts[status] for status in STATUSES if counts[status]}
    reasons = [f"{engine.entry.unit}: {engine.entry.reason}" for engine in outcome.failed]
    if outcome.version is None:
        reason = "; ".join(reasons) or "no engine passed"
        return CatalogRow(address, outcome.model, "failed", None, engine_counts, reason)
    is_unchanged = outcome.cached or outcome.same_as
    state: Literal["published", "unchanged"] = "unchanged" if is_unchanged else "published"
    return CatalogRow(address, outcome.model, state, outcome.version, engine_counts, "; ".join(reasons))


# Forecast of a build of every spec of a catalog from the records; nothing is run.

# Threads that mostly wait for a store's answers.
READERS = 32
# Specs that are worth a process of their own: each process lists the store by itself.
LEAST_SHARE = 500
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class PlannedSpec:
    """Forecast of a build of one spec. units: number by action, as in `UnitForecast`.

    missing: the steps that are not on record.  reason: why the spec cannot be planned.
    model: None where the spec cannot be read.
    """

    spec: str
    model: str | None
    units: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    reason: str = ""

    @property
    def settled(self) -> bool:
        """Whether every engine that can be built is there."""
        return not self.reason and not self.units.keys() - {"cached", "refused"}


class Listings:
    """The listing of each registry, so that specs of one registry share it; for several threads."""

    def __init__(self) -> None:
        self._known: dict[str, StoreListing] = {}
        self._lock = Lock()

    def of(self, spec: ModelSpec, options: RunOptions) -> StoreListing:
        """The listing of a spec's registry. The registry is opened for the first of its specs."""
        uri = registry_of(spec, options.registry)
        with self._lock:
            if uri not in self._known:
                self._known[uri] = StoreListing(store_named(uri))
            return self._known[uri]


def plan_catalog(addresses: Sequence[str | Found], options: RunOptions) -> list[PlannedSpec]:
    """A row for each spec, in order; one that cannot be planned does not stop the others.

    Many specs are shared out over processes, one for each CPU or as many as options.jobs says.
    """
    processes = min(options.jobs or os.cpu_count() or 1, len(addresses) // LEAST_SHARE)
    if processes < 2:
        return _plan_share(addresses, options)
    size = -(-len(addresses) // processes)
    shares = [addresses[start : start + size] for start in range(0, len(addresses), size)]
    # Forked, to share imported modules; no thread runs here yet.
    with ProcessPoolExecutor(len(shares), get_context("fork")) as pool:
        return [row for rows in pool.map(partial(_plan_share, options=options), shares) for row in rows]


def _plan_share(addresses: Sequence[str | Found], options: RunOptions) -> list[PlannedSpec]:
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(partial(_plan_row, options=options, listings=Listings()), addresses))


def _plan_row(address: str | Found, options: RunOptions, listings: Listings) -> PlannedSpec:
    try:
        with spec_at(address, options.registry) as spec_file:
            if is_ensemble(spec_file.path):
                # The units of its graphs and of the whole.
                ensemble = load_ensemble(spec_file.path, spec_file.address)
                forecast = foresee_ensemble(ensemble, options, Progress(), no_export=True)
                missing_steps = dict.fromkeys(
                    f"{name}: {step}" for name, graph in forecast.graphs.items() for step in graph.missing
                )
                return PlannedSpec(str(address), ensemble.model, dict(forecast.counts), tuple(missing_steps))
            spec = spec_file.load()
            return replace(plan_spec(spec, options, listings.of(spec, options)), spec=str(address))
    except EnginesmithError as error:
        return PlannedSpec(str(address), None, reason=str(error))


def plan_spec(spec: ModelSpec, options: RunOptions, listing: StoreListing) -> PlannedSpec:
    """What a build of a spec would do by the records of a store; a unit whose graph is not on record is 'unknown'.

    The copies of the records that were read are renewed, where this user may write.
    """
    selection, copies = select(spec, options), RecordCopies(listing, spec.model)
    context = replace(open_records(listing.store), copies=copies)
    run = Run(spec, context, selection)
    record_state, unit_counts = on_record(run), Counter[str]()
    if record_state.exported is not None:
        plan = plan_builds(record_state.exported, record_state.graphs, run)
        unit_counts.update(unit.action for unit in plan.units)
    unit_counts[_UNKNOWN] += len(candidates(spec, selection)) - unit_counts.total()
    with suppress(UnavailableError):  # a registry that may only be read: the next plan reads the records one by one
        copies.save()
    return PlannedSpec(spec.address, spec.model, dict(+unit_counts), record_state.missing)


def summarize(rows: Sequence[PlannedSpec]) -> str:
    """'4 specs: 3 with nothing to do; 40 units: 36 cached, 4 build'."""
    counts = sum((Counter(row.units) for row in rows), Counter[str]())
    units = ", ".join(f"{count} {action}" for action, count in counts.most_common())
    idle_count = sum(row.settled for row in rows)
    return (
        f"{pluralize(len(rows), 'spec')}: {idle_count} with nothing to do; {pluralize(counts.total(), 'unit')}: {units}"
    )
