"""One run of a spec of either kind, of a model or of an ensemble, whose graphs are models of their own; and what a
build of it would do: what is not on record is exported and quantized, where that is wanted."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from builders.execution.workdir import workdir
from enginesmith.core.hardware.targets import match_targets
from enginesmith.core.types import Precision, Target
from enginesmith.registry.store.base import open_store
from pipeline.compile.composition import Run, StepRunner, list_graphs
from pipeline.compile.ensembles.assembly import Assembly, CompiledGraph, EnsembleForecast, ForecastGraph
from pipeline.compile.forecast import Forecast, OnRecord, foresee, on_record, open_records
from pipeline.compile.plan import find_unserved
from pipeline.compile.steps.exports import export
from pipeline.intake.places import Found, registry_of, spec_at
from pipeline.orchestration.run import (
    Compiled,
    Executors,
    RunOptions,
    compile_locked,
    compile_once,
    open_context,
    open_loaded,
    select,
    split_names,
    start_executors,
    store_named,
)
from pipeline.progress import Progress, by_model, together
from pipeline.progress.events import Event, Finished, RunConcluded
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import LoadedEnsemble, load_ensemble
from pipeline.spec.model import ModelSpec
from pipeline.values import Selection


def compile_any(
    address: Path | str | Found,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors | None = None,
) -> Compiled:
    """Build, prove and publish the spec at an address: of a model (`compile_once`), or of an ensemble with its graphs.

    Raises what `compile_once` raises.
    """
    with spec_at(address, options.registry) as found:
        if not is_ensemble(found.path):
            return compile_once(found, options, runner, progress, executors)
        with nullcontext(executors) if executors else start_executors(options) as both:
            return _compile_ensemble(found, options, runner, progress, both)


def _compile_ensemble(
    found: Found, options: RunOptions, runner: StepRunner, progress: Progress, executors: Executors
) -> Compiled:
    loaded = load_ensemble(found.path, found.address)
    options = replace(options, registry=registry_of(loaded.spec, options.registry))
    store = open_store(str(options.registry), create=True)
    progress = by_model(progress)
    of = loaded.spec.model, loaded.spec.address, store, options, progress
    with open_context(*of, executors) as context, workdir() as folder:

        def compile_graph(spec: ModelSpec) -> CompiledGraph:
            return _compile_graph(spec, loaded, options, runner, progress, executors)

        outcome = Assembly(loaded, context, folder).run(compile_graph)
        context.progress.emit(RunConcluded(outcome))
        return Compiled(outcome, store)


def _compile_graph(
    spec: ModelSpec,
    loaded: LoadedEnsemble,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors,
) -> CompiledGraph:
    """A graph by itself: what of the options its spec has, and no channel, since the whole has one."""
    quiet = spec.model_copy(update={"publication": spec.publication.model_copy(update={"channel": None})})
    own = own_options(spec, loaded, options)
    with open_loaded(quiet, own, progress, executors, runner) as run:
        outcome = compile_locked(run, own)
        exported = export(run)
    return CompiledGraph(outcome, exported, wanted_of(spec, run.selection, options))


def wanted_of(
    spec: ModelSpec, selection: Selection, options: RunOptions
) -> tuple[Sequence[Target], Sequence[Precision]]:
    """The targets and precisions of a graph that a run of the whole asks for. selection: of the graph's own options."""
    asked = split_names(options.precisions) or spec.precision_list()
    precisions = [precision for precision in spec.precision_list() if precision in asked]
    return selection.targets or spec.target_list(), precisions


def own_options(spec: ModelSpec, loaded: LoadedEnsemble, options: RunOptions) -> RunOptions:
    """The options of a run of one graph: names that other graphs alone have are left out, and of precisions that it
    does not have it takes the widest in their place. A name that no graph has stays, and is refused."""
    graphs = loaded.graphs.values()

    def keep(text: str | None, have: dict[str, set[str]], instead: str | None) -> str | None:
        if text is None:
            return None
        names = split_names(text)
        own = [name for name in names if name in have[spec.model] or not any(name in found for found in have.values())]
        return ",".join(own) or instead or text

    precisions = {graph.model: {str(item) for item in graph.precision_list()} for graph in graphs}
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
    """What a build of the spec at an address would do. no_export: answer from the records alone.

    tell: called with what the plan leaves out, and what is done first. Raises as `open_run`, and what a step raises.
    """
    with spec_at(address, options.registry) as found:
        if is_ensemble(found.path):
            loaded = load_ensemble(found.path, found.address)
            return foresee_ensemble(loaded, options, progress, no_export, tell)
        return _foresee_model(found.load(), options, progress, no_export, tell).forecast


def foresee_ensemble(
    loaded: LoadedEnsemble, options: RunOptions, progress: Progress, no_export: bool, tell: Tell = lambda _: None
) -> EnsembleForecast:
    """`foresee_spec` of an ensemble that was read."""
    uri = registry_of(loaded.spec, options.registry)
    store = store_named(uri)
    records = open_records(store)
    with nullcontext() if no_export else start_executors(options) as executors, workdir() as folder:

        def foresee_graph(spec: ModelSpec, lacking: str | None) -> ForecastGraph:
            own = own_options(spec, loaded, replace(options, registry=uri))
            found = _foresee_model(spec, own, progress, no_export, tell, executors, lacking)
            return ForecastGraph(found.forecast, found.exported, wanted_of(spec, select(spec, own), options))

        if executors is None:
            return Assembly(loaded, records, folder).plan(foresee_graph, records)
        of = loaded.spec.model, loaded.spec.address, store, options, progress, executors
        with open_context(*of, keep_state=False) as context:
            return Assembly(loaded, context, folder).plan(foresee_graph, records)


def _foresee_model(
    spec: ModelSpec,
    options: RunOptions,
    progress: Progress,
    no_export: bool,
    tell: Tell,
    executors: Executors | None = None,
    lacking: str | None = None,
) -> ForecastGraph:
    """What a build of a model would do. lacking: a step without whose result nothing of it is known."""
    selection = select(spec, options)
    left_out = find_unserved(spec, selection)
    if no_export and left_out:
        tell(f"left out, since no backend of the spec builds for it: {', '.join(left_out)}")
    recorded = Run(spec, open_records(store_named(registry_of(spec, options.registry))), selection)
    known = OnRecord(missing=(lacking,)) if lacking else on_record(recorded)
    if known.missing and not no_export:
        tell(
            f"not on record: {', '.join(known.missing)}; that is done first, and what follows from it, so that "
            "every build key is complete (--no-export answers from what is on record)"
        )
    steps = _StepsMade()
    if not no_export:
        with open_loaded(spec, options, together(progress, steps), executors, keep_state=False) as run:
            batches = list(run.prepare())
        known = OnRecord(batches[-1].exported, list_graphs(batches))
    return ForecastGraph(foresee(known, recorded, steps.names), known.exported, ((), ()))


class _StepsMade(Progress):
    """Notes the steps that were carried out, and not answered from the record."""

    def __init__(self) -> None:
        self.names = set[str]()

    def emit(self, event: Event) -> None:
        """Note the end of a step that ran; one with words says something else."""
        if isinstance(event, Finished) and event == Finished(event.name):
            self.names.add(event.name)
