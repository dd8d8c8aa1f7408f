"""One run of a spec of either kind: of a model, or of an ensemble, whose graphs are models of their own."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from builders.execution.workdir import workdir
from enginesmith.core.hardware.targets import match_targets
from enginesmith.core.types import Precision, Target
from enginesmith.registry.store.base import open_store
from pipeline.compile.composition import StepRunner
from pipeline.compile.ensembles.assembly import Assembly, CompiledGraph
from pipeline.compile.plan import Selection
from pipeline.compile.steps.exports import export
from pipeline.intake.places import Found, spec_at
from pipeline.orchestration.run import (
    Compiled,
    Executors,
    RunOptions,
    compile_locked,
    compile_once,
    ensemble_registry,
    open_context,
    open_loaded,
    split_names,
    start_executors,
)
from pipeline.progress import Progress, by_model
from pipeline.progress.events import RunConcluded
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import LoadedEnsemble, load_ensemble
from pipeline.spec.model import ModelSpec


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
    options = replace(options, registry=ensemble_registry(loaded.spec, options))
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
    with open_loaded(quiet, own, progress, executors) as run:
        outcome = compile_locked(run, own, runner)
        exported = export(run.spec, run.context)
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
