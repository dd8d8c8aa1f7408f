"""The order in which an ensemble is built: each graph's data, then the graph as a model of its own; last the whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginesmith.core.digest import digest_of_path
from enginesmith.core.errors import DataError
from enginesmith.core.types import Precision, Target, TensorSpec
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.versions.lookup import load
from pipeline.compile.ensembles.chain import ChainedGraph
from pipeline.compile.ensembles.connections import check_connections, read_data, whole_outputs
from pipeline.compile.ensembles.forecast import EnsembleForecast, ForecastEnsemble, ForecastGraph
from pipeline.compile.ensembles.publication import BuiltEnsemble, current_engines, publish_ensemble
from pipeline.compile.ensembles.samples import compute_samples
from pipeline.compile.ensembles.units import list_units
from pipeline.compile.ensembles.whole import WholeData
from pipeline.compile.preflight import check_files
from pipeline.compile.publication.pages import draw_page
from pipeline.compile.run_context import NotOnRecord, RunContext
from pipeline.outcome import Outcome
from pipeline.spec.ensembles.model import EnsembleData, LoadedEnsemble
from pipeline.spec.model import ComputedData, ModelSpec, with_data
from pipeline.values import Exported


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that was exported, built and published as a model of its own. wanted: what of its spec was asked for."""

    outcome: Outcome
    exported: Exported
    wanted: tuple[Sequence[Target], Sequence[Precision]]


# Exports, builds and publishes a graph by its spec, without moving a channel.
CompileGraph = Callable[[ModelSpec], CompiledGraph]
# What a build would do to a graph; of one whose data is not on record with the step that lacks.
ForeseeGraph = Callable[[ModelSpec, str | None], ForecastGraph]


@dataclass
class Assembly:
    """An ensemble while it is built. folder: for data, kept as long as the run."""

    loaded: LoadedEnsemble
    context: RunContext
    folder: Path
    chain: list[ChainedGraph] = field(default_factory=list)

    def run(self, compile_graph: CompileGraph) -> Outcome:
        """Build the graphs in order and publish the whole, unless one has no version. Raises what a step raises,
        DataError with the name of the graph that its data does not suit, and SpecError for connections between tensors
        that cannot meet."""
        done = dict[str, CompiledGraph]()
        golden, calibration = self._open()
        self._store_functions()
        for name, spec in self._graphs():
            given = self._with_samples(name, spec, golden, calibration)
            try:
                done[name] = compile_graph(given)
            except DataError as error:
                raise DataError(f"graph {name!r}: {error}") from error
            self._extend(name, done[name].exported)
        graphs = {name: item.outcome for name, item in done.items()}
        lacking = [name for name, outcome in graphs.items() if outcome.version is None]
        if lacking:
            return Outcome(self.loaded.spec.model, None, False, (), {}, graphs=graphs, lacking=lacking[0])
        return self._publish(golden, done)

    def plan(self, foresee_graph: ForeseeGraph, records: RunContext) -> EnsembleForecast:
        """What `run` would do. Where the data of a graph is not on record, and this context runs nothing, it and those
        after it are unknown.  records: of `open_records`. Raises as `run`."""
        found, lacking = dict[str, ForecastGraph](), None
        golden, calibration = self._open()
        if self.context is not records:
            self._store_functions()
        for name, spec in self._graphs():
            try:
                given = spec if lacking else self._with_samples(name, spec, golden, calibration)
            except NotOnRecord as step:
                given, lacking = spec, str(step)
            found[name] = foresee_graph(given, lacking)
            if exported := found[name].exported:
                self._extend(name, exported)
            else:
                lacking = lacking or f"export of {name}"
        outputs = () if lacking else self._outputs()
        parts = self.loaded, found, tuple(self.chain), golden, records, outputs
        return ForecastEnsemble(*parts).foresee()

    def _graphs(self) -> Iterator[tuple[str, ModelSpec]]:
        """The graphs in order; functions before each are in the chain by then."""
        functions = self.loaded.functions()
        for name in self.loaded.wiring():
            if name in functions:
                self.chain.append(ChainedGraph.of_function(functions[name]))
            else:
                yield name, self.loaded.graphs[name]

    def _store_functions(self) -> None:
        for function in self.loaded.functions().values():
            for name in function.files:
                self.context.store.put_file(self.loaded.folder / name)

    def _open(self) -> tuple[WholeData, WholeData | None]:
        """The data of the whole, once everything that files show fits."""
        check_connections(self.loaded)
        for spec in self.loaded.graphs.values():
            check_files(spec)  # all of them before the first is built
        return self._data()

    def _with_samples(self, name: str, spec: ModelSpec, golden: WholeData, calibration: WholeData | None) -> ModelSpec:
        samples = self._samples(name, spec, "golden", golden)
        observed = self._samples(name, spec, "calibration", calibration) if calibration else None
        return with_data(spec, samples, observed)

    def _data(self) -> tuple[WholeData, WholeData | None]:
        spec = self.loaded.spec

        def of(section: EnsembleData, labels: str | None = None) -> WholeData:
            path = spec.file(section.data)
            return read_data(self.loaded, section, (path, digest_of_path(path)), labels)

        return of(spec.golden, spec.golden.labels), of(spec.calibration) if spec.calibration else None

    def _samples(self, name: str, spec: ModelSpec, section: str, whole: WholeData) -> ComputedData:
        sources = self.loaded.wiring()[name]
        return compute_samples(name, section, whole, self.chain, spec, sources, self.context, self.folder)

    def _extend(self, name: str, exported: Exported) -> None:
        model, wiring = exported.model, self.loaded.wiring()[name]
        self.chain.append(ChainedGraph(name, model.digest, model.inputs, model.outputs, wiring))
        check_connections(self.loaded, {graph.name: graph.outputs for graph in self.chain})

    def _outputs(self) -> tuple[TensorSpec, ...]:
        return whole_outputs(self.loaded, {graph.name: graph.outputs for graph in self.chain})

    def _publish(self, golden: WholeData, done: Mapping[str, CompiledGraph]) -> Outcome:
        versions: dict[str, Manifest] = {
            name: load(self.context.store, item.outcome.model, str(item.outcome.version)) for name, item in done.items()
        }
        built = BuiltEnsemble(self.loaded, versions, tuple(self.chain), golden, self._outputs())
        wanted = {name: item.wanted for name, item in done.items()}
        units = list(list_units(self.loaded.graphs, current_engines(versions, self.context), wanted))
        narrowed = next(filter(None, (item.outcome.narrowed for item in done.values())), None)
        found = publish_ensemble(built, units, draw_page, self.context, narrowed)
        return found.with_graphs({name: item.outcome for name, item in done.items()})
