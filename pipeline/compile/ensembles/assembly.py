"""The order in which an ensemble is built: each graph's data, then the graph as a model of its own; last the whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginery.core.digest import digest_of_path
from enginery.core.types import Precision, Target
from enginery.registry.manifest import Manifest
from enginery.registry.versions.lookup import load
from pipeline.compile.ensembles.connections import check_connections, whole_inputs, whole_outputs
from pipeline.compile.ensembles.publication import BuiltEnsemble, current_engines, publish_ensemble
from pipeline.compile.ensembles.samples import ChainedGraph, WholeData, compute_samples
from pipeline.compile.ensembles.units import list_units
from pipeline.compile.preflight import check_files
from pipeline.compile.publication.pages import draw_page
from pipeline.compile.run_context import RunContext
from pipeline.outcome import Outcome
from pipeline.spec.ensemble import LoadedEnsemble
from pipeline.spec.model import ModelSpec, with_data
from pipeline.values import Exported


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that was exported, built and published as a model of its own. wanted: what of its spec was asked for."""

    outcome: Outcome
    exported: Exported
    wanted: tuple[Sequence[Target], Sequence[Precision]]


# Exports, builds and publishes a graph by its spec, without moving a channel.
CompileGraph = Callable[[ModelSpec], CompiledGraph]


@dataclass
class Assembly:
    """An ensemble while it is built. folder: for data, kept as long as the run."""

    loaded: LoadedEnsemble
    context: RunContext
    folder: Path
    chain: list[ChainedGraph] = field(default_factory=list)
    done: dict[str, CompiledGraph] = field(default_factory=dict)

    def run(self, compile_graph: CompileGraph) -> Outcome:
        """Build the graphs in order and publish the whole, unless one has no version. Raises what a step raises, and
        SpecError for connections between tensors that cannot meet."""
        check_connections(self.loaded)
        for spec in self.loaded.graphs.values():
            check_files(spec)  # all of them before the first is built
        golden, calibration = self._data()
        for name, spec in self.loaded.graphs.items():
            samples = self._samples(name, spec, "golden", golden)
            observed = self._samples(name, spec, "calibration", calibration) if calibration else None
            self._take(name, compile_graph(with_data(spec, samples, observed)))
        graphs = {name: item.outcome for name, item in self.done.items()}
        lacking = [name for name, outcome in graphs.items() if outcome.version is None]
        if lacking:
            return Outcome(self.loaded.spec.model, None, False, (), {}, graphs=graphs, lacking=lacking[0])
        return self._publish(golden, graphs)

    def _data(self) -> tuple[WholeData, WholeData | None]:
        spec, shapes = self.loaded.spec, whole_inputs(self.loaded)

        def of(name: str) -> WholeData:
            return WholeData(spec.file(name), digest_of_path(spec.file(name)), *shapes)

        return of(spec.golden.data), of(spec.calibration.data) if spec.calibration else None

    def _samples(self, name: str, spec: ModelSpec, section: str, whole: WholeData) -> Path:
        sources = self.loaded.wiring()[name]
        return compute_samples(name, section, whole, self.chain, spec.tensors(), sources, self.context, self.folder)

    def _take(self, name: str, compiled: CompiledGraph) -> None:
        model = compiled.exported.model
        self.done[name] = compiled
        wiring = self.loaded.wiring()[name]
        self.chain.append(ChainedGraph(name, model.digest, model.inputs, model.outputs, wiring))
        check_connections(self.loaded, {graph.name: graph.outputs for graph in self.chain})

    def _publish(self, golden: WholeData, graphs: Mapping[str, Outcome]) -> Outcome:
        versions: dict[str, Manifest] = {
            name: load(self.context.store, outcome.model, str(outcome.version)) for name, outcome in graphs.items()
        }
        outputs = whole_outputs(self.loaded, {graph.name: graph.outputs for graph in self.chain})
        built = BuiltEnsemble(self.loaded, versions, tuple(self.chain), golden, outputs)
        wanted = {name: item.wanted for name, item in self.done.items()}
        units = list(list_units(self.loaded.graphs, current_engines(versions, self.context), wanted))
        found = publish_ensemble(built, units, draw_page, self.context)
        return found.with_graphs(graphs)
