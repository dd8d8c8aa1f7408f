"""What a build of a spec of either kind would do; what is not on record is exported and quantized, where that is
wanted."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from builders.execution.workdir import workdir
from pipeline.compile.composition import InProcess, prepare
from pipeline.compile.ensembles.assembly import Assembly
from pipeline.compile.ensembles.forecast import EnsembleForecast, ForecastGraph
from pipeline.compile.forecast import Forecast, OnRecord, foresee, on_record, open_records
from pipeline.compile.plan import find_unserved
from pipeline.intake.places import Found, spec_at
from pipeline.orchestration.ensembles import own_options, wanted_of
from pipeline.orchestration.run import (
    Executors,
    RunOptions,
    ensemble_registry,
    open_context,
    open_loaded,
    select,
    start_executors,
    store_named,
    store_of,
)
from pipeline.progress import Progress, together
from pipeline.progress.events import Event, Finished
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import LoadedEnsemble, load_ensemble
from pipeline.spec.model import ModelSpec

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
    uri = ensemble_registry(loaded.spec, options)
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
    context = open_records(store_of(spec, options))
    known = OnRecord(missing=(lacking,)) if lacking else on_record(spec, selection, context)
    if known.missing and not no_export:
        tell(
            f"not on record: {', '.join(known.missing)}; that is done first, and what follows from it, so that "
            "every build key is complete (--no-export answers from what is on record)"
        )
    steps = _StepsMade()
    if not no_export:
        with open_loaded(spec, options, together(progress, steps), executors, keep_state=False) as run:
            ready = prepare(run.spec, run.selection, run.context, InProcess())
        known = OnRecord(ready.exported, ready.graphs)
    return ForecastGraph(foresee(spec, selection, known, context, steps.names), known.exported, ((), ()))


class _StepsMade(Progress):
    """Notes the steps that were carried out, and not answered from the record."""

    def __init__(self) -> None:
        self.names = set[str]()

    def emit(self, event: Event) -> None:
        """Note the end of a step that ran; one with words says something else."""
        if isinstance(event, Finished) and event == Finished(event.name):
            self.names.add(event.name)
