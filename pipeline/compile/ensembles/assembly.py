"""Assembles an ensemble: what goes from one graph to another."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path

from enginesmith.core.errors import DataError, ModelError, digest_of_path
from enginesmith.core.state import ENSEMBLE, State, list_inputs, name_dims, name_states, split_source
from enginesmith.core.text import suggest
from enginesmith.core.types import PLUS, Dim, Precision, Target, TensorSpec, rename_dims
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.versions.lookup import load
from pipeline.compile.ensembles.proof import prove, request_proof
from pipeline.compile.ensembles.publication import (
    BuiltEnsemble,
    current_engines,
    list_targets,
    list_units,
    publish_ensemble,
)
from pipeline.compile.ensembles.whole import ChainedGraph, WholeData, compute_samples, request_samples
from pipeline.compile.forecast import Forecast, UnitForecast
from pipeline.compile.preflight import check_files
from pipeline.compile.run_context import NotOnRecord, RunContext, Work
from pipeline.compile.steps.engines import build
from pipeline.outcome import Outcome
from pipeline.sources.onnx_header import HeaderTensor, can_be_equal, format_shape, read_header
from pipeline.spec.ensembles.model import EnsembleData, LoadedEnsemble
from pipeline.spec.model import ComputedData, ModelSpec, with_data
from pipeline.spec.source import Loc
from pipeline.values import EngineBlob, Exported, Json

Tensor = HeaderTensor | TensorSpec


def check_connections(ensemble: LoadedEnsemble, exported_outputs: Mapping[str, Sequence[Tensor]] | None = None) -> None:
    """Raise SpecError, a line for each connection between tensors that cannot meet.

    exported_outputs: by graph, of the exported graphs; those of the others come from the headers of ONNX files.
    """
    outputs: dict[str, Sequence[Tensor] | None] = {
        **{name: _header_outputs(graph) for name, graph in ensemble.graphs.items()},
        **{name: function.gives() for name, function in ensemble.spec.functions.items()},
        **(exported_outputs or {}),
    }
    if mistakes := [*_wrong_connections(ensemble, outputs), *_wrong_outputs(ensemble, outputs), *_wrong_dims(ensemble)]:
        raise ensemble.locate(mistakes)


def _header_outputs(graph: ModelSpec) -> Sequence[Tensor] | None:
    """The outputs of an ONNX source; None of another, and where the file cannot be read, which its own build
    reports."""
    if graph.source.kind != "onnx":
        return None
    try:
        return read_header(graph.file(graph.source_file)).gives
    except ModelError:
        return None


def _wrong_connections(
    ensemble: LoadedEnsemble, outputs: Mapping[str, Sequence[Tensor] | None]
) -> Iterator[tuple[Loc, str]]:
    inputs = {name: {spec.name: spec for spec in ensemble.tensors(name)} for name in ensemble.wiring()}
    for key, source in ensemble.spec.connections.items():
        graph, _, name = key.partition(".")
        source_pair = split_source(source, inputs)
        if source_pair is None or (source_outputs := outputs[source_pair[0]]) is None:
            continue
        source_tensor = next((tensor for tensor in source_outputs if tensor.name == source_pair[1]), None)
        if source_tensor is None:
            names = [tensor.name for tensor in source_outputs]
            yield (
                ("connections", key),
                f"{source_pair[0]!r} has no output {source_pair[1]!r}; {suggest(source_pair[1], names)}",
            )
        elif mismatch_text := _mismatch(source_tensor, inputs[graph][name]):
            yield ("connections", key), f"{source} is {mismatch_text}"
    for source, pairs in list_inputs(ensemble.wiring()).items():
        first_input, *other_inputs = (inputs[graph][name] for graph, name in pairs)
        for (graph, name), other_input in zip(pairs[1:], other_inputs, strict=True):
            if mismatch_text := _mismatch(first_input, other_input):
                yield ("connections", f"{graph}.{name}"), f"{source} is {mismatch_text}"


def _wrong_outputs(
    ensemble: LoadedEnsemble, outputs: Mapping[str, Sequence[Tensor] | None]
) -> Iterator[tuple[Loc, str]]:
    for loc, source in ensemble.spec.named_outputs():
        graph, _, name = source.partition(".")
        names = [tensor.name for tensor in outputs[graph] or ()]
        if names and name not in names:
            yield loc, f"{graph!r} has no output {name!r}; {suggest(name, names)}"


def _wrong_dims(ensemble: LoadedEnsemble) -> Iterator[tuple[Loc, str]]:
    """Mistakes for dims of axis 0 that several graphs share, but for which no size suits all of these graphs."""
    for dim in _shared_dims(ensemble).values():
        if dim.min > dim.max:
            name = next(
                name
                for name in ensemble.wiring()
                if dim.name in [graph_dim.name for graph_dim in ensemble.named_dims(name)]
            )
            yield (
                ("graphs" if name in ensemble.graphs else "functions", name),
                f"no size of {dim.name} suits all graphs that have it; widen it, or rename one",
            )


def _mismatch(output: Tensor, taken_spec: TensorSpec) -> str | None:
    """The difference, as 'float32 [batch, 4], and the input is float32 [batch, 8]; ...'; None if they can match."""
    shape = output.shape
    if output.dtype == taken_spec.dtype and (shape is None or can_be_equal(shape, taken_spec.shape)):
        return None
    output_text = f"{output.dtype} {format_shape(shape) if shape is not None else 'of any shape'}"
    return f"{output_text}, and the input is {taken_spec.dtype} {format_shape(taken_spec.shape)}; they must be the same"


def read_data(
    ensemble: LoadedEnsemble, section: EnsembleData, file: tuple[Path, str], labels: str | None = None
) -> WholeData:
    """The data that a section of the spec names. file: its path and its digest."""
    inputs, dims = whole_inputs(ensemble)
    states, names = list[State](), [spec.name for spec in inputs]
    for graph, sources in ensemble.wiring().items():
        if graph in ensemble.graphs:
            whole_dims = name_dims(ensemble.tensors(graph), sources, inputs)
            states += name_states(graph, ensemble.graphs[graph].states(), sources, whole_dims, names)
    return WholeData(*file, inputs, dims, labels or "", tuple(states), section.sequence or "", section.joined)


def whole_inputs(ensemble: LoadedEnsemble) -> tuple[tuple[TensorSpec, ...], tuple[Dim, ...]]:
    """The inputs of the ensemble under their names, and their dims.

    A dim of axis 0 keeps its name, so that samples of all inputs are grouped together, in sizes that every graph with
    such a dim takes; others are 'GRAPH.DIM'.
    """
    shared_dims = _shared_dims(ensemble)
    specs, dims = list[TensorSpec](), dict[str, Dim]()
    for source, ((graph, name), *_) in list_inputs(ensemble.wiring()).items():
        input_spec = next(spec for spec in ensemble.tensors(graph) if spec.name == name)
        graph_dims = {dim.name: dim for dim in ensemble.named_dims(graph)}
        used_dims = {dim: shared_dims.get(dim) or replace(graph_dims[dim], name=f"{graph}.{dim}") for dim in graph_dims}
        names = {dim: used_dims[dim].name for dim in used_dims}
        shape = tuple(rename_dims(dim, names) if isinstance(dim, str) else dim for dim in input_spec.shape)
        specs.append(TensorSpec(source, input_spec.dtype, shape))
        dims |= {
            used_dims[dim].name: used_dims[dim]
            for size in input_spec.shape
            for dim in str(size).split(PLUS)
            if dim in used_dims
        }
    return tuple(specs), tuple(dims.values())


def _shared_dims(ensemble: LoadedEnsemble) -> dict[str, Dim]:
    """The dims of axis 0 of all graphs, those of one name with the sizes that all of them take, as far as there are."""
    dims: dict[str, Dim] = {}
    for name in ensemble.wiring():
        states = ensemble.graphs[name].state if name in ensemble.graphs else {}
        first_dims = {spec.shape[0] for spec in ensemble.tensors(name) if spec.shape and spec.name not in states}
        for dim in (dim for dim in ensemble.named_dims(name) if dim.name in first_dims):
            earlier_dim = dims.get(dim.name, dim)
            multiple = lcm(earlier_dim.multiple, dim.multiple)
            low = -(-max(earlier_dim.min, dim.min) // multiple) * multiple
            high = min(earlier_dim.max, dim.max) // multiple * multiple
            opt = min(max(earlier_dim.opt // multiple * multiple, low), high)
            dims[dim.name] = Dim(dim.name, low, opt, high, multiple=multiple)
    return dims


# The ensemble's action is the first action of this list that one of its graphs has.
_DECIDING = ("refused", "failed", "unknown", "build")
# If a graph has several units, the unit whose action is first in this list counts.
_SOONEST = ("cached", "build", "unknown", "failed", "refused")


@dataclass(frozen=True)
class ForecastGraph:
    """Forecast of a graph's build. exported: None if it is not on record.  selection: as of
    `CompiledGraph`."""

    forecast: Forecast
    exported: Exported | None
    selection: tuple[Sequence[Target], Sequence[Precision]]


@dataclass(frozen=True)
class WholeUnit:
    """The plan of an ensemble for a target and a precision. action: 'build' if it would be proven, 'cached', 'refused',
    'failed' or 'unknown'.  reason: why, as text."""

    target: str
    precision: str
    action: str
    reason: str

    def to_json(self) -> Json:
        """The unit's part of `enginesmith plan --json`."""
        return {**vars(self), "backend": ENSEMBLE}


@dataclass(frozen=True)
class EnsembleForecast:
    """Forecast of an ensemble's build. graphs: by name, in order.  units: of the whole."""

    model: str
    graphs: Mapping[str, Forecast]
    units: tuple[WholeUnit, ...]

    def to_json(self) -> Json:
        """The output of `enginesmith plan --json`."""
        graphs = {name: graph_forecast.to_json() for name, graph_forecast in self.graphs.items()}
        return {"model": self.model, "graphs": graphs, "units": [unit.to_json() for unit in self.units]}

    @property
    def counts(self) -> Counter[str]:
        """The number of units of the ensemble and its graphs per action."""
        return sum((forecast.counts for forecast in self.graphs.values()), Counter(unit.action for unit in self.units))


@dataclass(frozen=True)
class CompiledGraph:
    """A graph exported, built and published as a model of its own. selection: what of its spec was asked for."""

    outcome: Outcome
    exported: Exported
    selection: tuple[Sequence[Target], Sequence[Precision]]


# Exports, builds and publishes a graph by its spec, without moving a channel.
CompileGraph = Callable[[ModelSpec], CompiledGraph]
# Forecast of a graph's build, with the missing step if its data is not on record.
ForeseeGraph = Callable[[ModelSpec, str | None], ForecastGraph]


@dataclass
class Assembly:
    """An ensemble while it is built. folder: for data, kept as long as the run.  chain: the graphs exported so far."""

    loaded: LoadedEnsemble
    context: RunContext
    folder: Path
    chain: list[ChainedGraph] = field(default_factory=list)

    def run(self, compile_graph: CompileGraph) -> Outcome:
        """Build the graphs in order and publish the ensemble, unless one has no version. Raises what a step raises,
        DataError with the name of the graph that its data does not suit, and SpecError for connections between tensors
        that cannot meet."""
        compiled_graphs = dict[str, CompiledGraph]()
        golden, calibration = self._open()
        self._store_functions()
        for name, spec in self._graphs():
            graph_spec = self._with_samples(name, spec, golden, calibration)
            try:
                compiled_graphs[name] = compile_graph(graph_spec)
            except DataError as error:
                raise DataError(f"graph {name!r}: {error}") from error
            self._extend(name, compiled_graphs[name].exported)
        outcomes = {name: graph.outcome for name, graph in compiled_graphs.items()}
        lacking_graphs = [name for name, outcome in outcomes.items() if outcome.version is None]
        if lacking_graphs:
            return Outcome(self.loaded.spec.model, None, False, (), {}, graphs=outcomes, lacking=lacking_graphs[0])
        return self._publish(golden, compiled_graphs)

    def plan(self, foresee_graph: ForeseeGraph, records: RunContext) -> EnsembleForecast:
        """A forecast of `run`. If a graph's data is not recorded, and this context runs nothing, this graph and the
        later ones are unknown.  records: of `open_records`. Raises as `run`."""
        graph_forecasts, missing_step = dict[str, ForecastGraph](), None
        golden, calibration = self._open()
        if self.context is not records:
            self._store_functions()
        for name, spec in self._graphs():
            try:
                graph_spec = spec if missing_step else self._with_samples(name, spec, golden, calibration)
            except NotOnRecord as step:
                graph_spec, missing_step = spec, str(step)
            graph_forecasts[name] = foresee_graph(graph_spec, missing_step)
            if export := graph_forecasts[name].exported:
                self._extend(name, export)
            else:
                missing_step = missing_step or f"export of {name}"
        forecasts = {name: graph.forecast for name, graph in graph_forecasts.items()}
        units = tuple(
            WholeUnit(target.name, precision, *self._foresee(target, precision, forecasts, golden, records))
            for target, precision in list_targets([graph.selection for graph in graph_forecasts.values()])
        )
        return EnsembleForecast(self.loaded.spec.model, forecasts, units)

    def _foresee(
        self,
        target: Target,
        precision: Precision,
        forecasts: Mapping[str, Forecast],
        golden: WholeData,
        records: RunContext,
    ) -> tuple[str, str]:
        """The action and the reason of a `WholeUnit`: 'cached' if all engines exist and the ensemble's proof is on
        record."""
        units = dict[str, UnitForecast]()
        for name, spec in self.loaded.graphs.items():
            graph_precision = precision if precision in spec.precision_list() else spec.precision_list()[0]
            pair = (target, graph_precision)
            fitting_units = [
                unit for unit in forecasts[name].units if (unit.candidate.target, unit.candidate.precision) == pair
            ]
            if not fitting_units:
                return "refused", f"graph {name!r} has no engine: its spec has no {target.name} {graph_precision}"
            units[name] = min(fitting_units, key=lambda unit: _SOONEST.index(unit.action))
        for action in _DECIDING:
            for name, unit in units.items():
                if unit.action == action:
                    return action, f"graph {name!r}: {unit.reason}"
        blobs = dict[str, EngineBlob]()
        for name, unit in units.items():
            if unit.proven_again:
                return "build", f"graph {name!r}: {unit.reason}"
            if unit.unit is not None:
                blobs[name] = build(unit.unit, Work(self.loaded.graphs[name], records)).blob
        request = request_proof(self.loaded.spec, precision, blobs, golden, tuple(self.chain), self._outputs())
        try:
            prove(request, f"{target.name} {precision} {ENSEMBLE}", records)
        except NotOnRecord:
            return "build", "its engines exist; the ensemble is proven, because its proof is not recorded"
        return "cached", "engines and proof are in the registry"

    def _graphs(self) -> Iterator[tuple[str, ModelSpec]]:
        """The graphs in order. Before a graph is returned, the functions ahead of it are added to the chain."""
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
        """The ensemble's data, after the checks that need only its files."""
        check_connections(self.loaded)
        for spec in self.loaded.graphs.values():
            check_files(spec)  # all specs, before the first graph is built
        ensemble_spec = self.loaded.spec

        def of(section: EnsembleData, labels: str | None = None) -> WholeData:
            path = ensemble_spec.file(section.data)
            return read_data(self.loaded, section, (path, digest_of_path(path)), labels)

        return of(ensemble_spec.golden, ensemble_spec.golden.labels), of(
            ensemble_spec.calibration
        ) if ensemble_spec.calibration else None

    def _with_samples(self, name: str, spec: ModelSpec, golden: WholeData, calibration: WholeData | None) -> ModelSpec:
        samples = dict[str, ComputedData]()
        for section, data_spec in (("golden", golden), ("calibration", calibration)):
            if data_spec:
                request = request_samples(data_spec, self.chain, spec, self.loaded.wiring()[name])
                samples[section] = compute_samples(name, section, request, self.context, self.folder)
        return with_data(spec, samples["golden"], samples.get("calibration"))

    def _extend(self, name: str, export: Exported) -> None:
        model, wiring = export.model, self.loaded.wiring()[name]
        self.chain.append(ChainedGraph(name, model.digest, model.inputs, model.outputs, wiring))
        check_connections(self.loaded, {graph.name: graph.outputs for graph in self.chain})

    def _outputs(self) -> tuple[TensorSpec, ...]:
        outputs = {graph.name: graph.outputs for graph in self.chain}
        inner_sources = set(self.loaded.spec.connections.values())
        all_outputs = {f"{graph}.{output.name}": output for graph, specs in outputs.items() for output in specs}
        names = self.loaded.spec.outputs or [name for name in all_outputs if name not in inner_sources]
        state_outputs = [
            f"{graph}.{state.output}" for graph, spec in self.loaded.graphs.items() for state in spec.states()
        ]
        return tuple(
            TensorSpec(name, all_outputs[name].dtype, all_outputs[name].shape)
            for name in dict.fromkeys((*names, *state_outputs))
        )

    def _publish(self, golden: WholeData, compiled_graphs: Mapping[str, CompiledGraph]) -> Outcome:
        versions: dict[str, Manifest] = {
            name: load(self.context.store, graph.outcome.model, str(graph.outcome.version))
            for name, graph in compiled_graphs.items()
        }
        built_ensemble = BuiltEnsemble(self.loaded, versions, tuple(self.chain), golden, self._outputs())
        graph_selections = {name: graph.selection for name, graph in compiled_graphs.items()}
        units = list(list_units(self.loaded.graphs, current_engines(versions, self.context), graph_selections))
        narrowed_reason = next(filter(None, (graph.outcome.narrowed for graph in compiled_graphs.values())), None)
        outcome = publish_ensemble(built_ensemble, units, self.context, narrowed_reason)
        outcomes = {name: graph.outcome for name, graph in compiled_graphs.items()}
        is_cached = outcome.cached and all(graph.cached for graph in outcomes.values())
        return replace(outcome, graphs=outcomes, cached=is_cached)
