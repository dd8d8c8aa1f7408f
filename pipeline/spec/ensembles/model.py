"""The spec of several graphs that make one model."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from enginesmith.core import state
from enginesmith.core.errors import SpecError, digest_of_file
from enginesmith.core.names import inside
from enginesmith.core.state import grown_axes, order_nodes, split_source, without_states
from enginesmith.core.text import suggest
from enginesmith.core.types import Dim, Precision, TensorSpec
from enginesmith.user_code.entry_point import source_files, why_no_function
from pipeline.spec.document import Kind, is_ensemble, load_document, locate
from pipeline.spec.model import ModelSpec, load_spec
from pipeline.spec.quantization import EnsembleArrays
from pipeline.spec.sections import MeasuredData, Publication, SpecFile, SpecSections
from pipeline.spec.source import (
    DimName,
    DimRange,
    File,
    GraphKey,
    GraphName,
    Input,
    Loc,
    Mistakes,
    ModelName,
    SpecPart,
    VersionName,
)
from pipeline.spec.validation import Canary, EnsembleLimits

# Sizes of a dim that a function does not bound.
_ANY = DimRange(min=1, opt=1, max=1 << 16)


class EnsembleFunction(SpecPart):
    """Python code that is run between graphs, on numpy arrays by name."""

    omitted: ClassVar[frozenset[str]] = frozenset({"dims"})

    function: str = Field(
        description="'file.py:function'; called with an array for each input, by name; returns a dict with one for "
        "each output"
    )
    inputs: dict[GraphName, Input] = Field(min_length=1)
    outputs: dict[GraphName, Input] = Field(
        min_length=1, description="axis 0 may have any number of rows, also none, whatever the inputs have"
    )
    dims: dict[DimName, DimRange] = Field(
        {}, description="sizes of named axes of inputs that a caller gives; default: any"
    )

    @field_validator("function")
    @classmethod
    def _entry_point(cls, text: str) -> str:
        file, _, name = text.partition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise ValueError("must look like 'ocr.py:crop', a file and a function in it")
        return f"{inside(file)}:{name}"

    def at(self, name: str, folder: Path, sources: Mapping[str, str]) -> state.EnsembleFunction:
        """A copy with digests of its files. name: in the spec.  folder: of the spec.  sources: of its inputs.
        Raises ModelError for a file that cannot be read."""
        digests = {
            str(path.relative_to(folder)): digest_of_file(path) for path in source_files(folder, folder / self.file)
        }
        return state.EnsembleFunction(name, self.file, self.name, self.tensors(), self.gives(), sources, digests)

    @property
    def file(self) -> str:
        """The Python file, relative to the spec."""
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The name of the function in the file."""
        return self.function.partition(":")[2]

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs of the function."""
        return _tensors(self.inputs)

    def gives(self) -> tuple[TensorSpec, ...]:
        """The outputs of the function."""
        return _tensors(self.outputs)

    def named_dims(self) -> tuple[Dim, ...]:
        """The named dims of its inputs."""
        names = dict.fromkeys(dim for tensor in self.inputs.values() for dim in tensor.shape if isinstance(dim, str))
        return tuple(self.dims.get(name, _ANY).to_dim(name) for name in names)


def _tensors(items: dict[str, Input]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items.items())


def find_state_mistakes(
    graphs: Mapping[str, SpecSections],
    connections: Mapping[str, str],
    functions: Collection[str],
    data: Mapping[str, EnsembleArrays],
) -> Iterator[tuple[Loc, str]]:
    """Mistakes on graphs with state: (key, message). functions: names of those between graphs.  data: by section."""
    stateful_graphs = [name for name, graph_spec in graphs.items() if graph_spec.state]
    for key, source in connections.items():
        graph, _, name = key.partition(".")
        if graph in stateful_graphs:
            yield from _wrong_connection(key, source, name, graphs[graph])
    for function in functions if stateful_graphs else ():
        text = f"{stateful_graphs[0]!r} has state, and functions are not run along sequences; export it as a graph"
        yield ("functions", function), f"{text}, or call it before the ensemble"
    for section, data_spec in data.items():
        yield from _wrong_arrays(section, data_spec, graphs, connections)


def _wrong_connection(key: str, source: str, name: str, graph_spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    if name in graph_spec.state:
        output = graph_spec.state[name].output
        text = f"{name!r} is a state of {graph_spec.model}, which takes its own {output!r} of the call before"
        yield ("connections", key), f"{text}; remove the connection, or the state from its spec"
    grown_names = {
        input_name for input_name, _ in grown_axes(without_states(graph_spec.tensors(), graph_spec.states()))
    }
    if name in grown_names and "." in source:
        text = f"{name!r} covers the steps in the states too, but {source!r} gives only one step"
        yield ("connections", key), f"{text}; make it an input of the ensemble"


def _wrong_arrays(
    section: str, arrays: EnsembleArrays, graphs: Mapping[str, SpecSections], connections: Mapping[str, str]
) -> Iterator[tuple[Loc, str]]:
    if arrays.orders and not any(graph_spec.state for graph_spec in graphs.values()):
        key = "sequence" if arrays.sequence else "steps"
        yield (section, key), f"{section}.{key} is for ensembles with state, and no graph has one; remove it"
        return
    source_names = {
        f"{graph}.{input_name}" for graph, graph_spec in graphs.items() for input_name in graph_spec.inputs
    } | {*connections.values()}
    for name in (name for name in arrays.orders if name in source_names):
        key = "sequence" if name == arrays.sequence else "steps"
        yield (section, key), f"array {name!r} is an input of the ensemble; give the array of numbers a name of its own"
    if arrays.joined:
        yield from _wrong_steps((section, "steps"), arrays.joined[0], graphs, connections)


def _wrong_steps(
    place: Loc, dim: str, graphs: Mapping[str, SpecSections], connections: Mapping[str, str]
) -> Iterator[tuple[Loc, str]]:
    """A dim along which the samples of a step cannot be joined: (key, message)."""
    step_dims = []
    for graph, graph_spec in graphs.items():
        state_axes = {
            axis for name in graph_spec.state if name in graph_spec.inputs for axis in graph_spec.inputs[name].shape
        }
        plain_inputs = (tensor for name, tensor in graph_spec.inputs.items() if name not in graph_spec.state)
        free_inputs = [
            tensor for name, tensor in graph_spec.inputs.items() if "." not in connections.get(f"{graph}.{name}", "")
        ]
        leading_dims = {tensor.shape[0] for tensor in plain_inputs if tensor.shape}
        axes = {
            axis for tensor in free_inputs for axis in tensor.shape if isinstance(axis, str) and axis.isidentifier()
        }
        step_dims += (
            [f"{graph}.{axis}" for axis in sorted(axes - state_axes - leading_dims)] if graph_spec.state else []
        )
    if dim not in step_dims:
        text = f"samples of a step are joined along a dim of the ensemble's inputs to a graph with state, and {dim!r}"
        yield place, f"{text} is none; {suggest(dim, step_dims)}"


# Each graph has its own spec, and is a separate model in the registry; an ensemble pins a version of each graph.

_INPUT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
HELP = "docs/guides/ensembles.md has an example"


class EnsembleData(EnsembleArrays):
    """Real inputs of the whole; the earlier graphs compute the inputs of the later ones. If graphs have state, each
    sample is a step, in the order of the sequences."""

    data: File = Field(description="an .npz or .safetensors with an array for each input of the whole")


class EnsembleGolden(EnsembleData, MeasuredData):
    """Real inputs of the whole, right answers, and task metrics of its outputs."""

    omitted: ClassVar[frozenset[str]] = frozenset({"labels", "metric", "sequence", "steps"})


class EnsembleSpec(SpecFile):
    """Several graphs as one model: their specs in the order of the data flow, their connections, data of the whole."""

    omitted: ClassVar[frozenset[str]] = frozenset({"outputs", "limits", "functions", "canary"})

    model: ModelName = Field(description="name of the whole in the registry")
    version: VersionName | None = Field(None, description="a version name of your own; default: the next number")
    graphs: dict[GraphKey, File] = Field(min_length=2, description="spec of each graph, in the order of the data flow")
    functions: dict[GraphKey, EnsembleFunction] = Field(
        {}, description="Python code between graphs, each right before the first graph that takes what it gives"
    )
    connections: dict[str, str] = Field(
        description="GRAPH.INPUT: what gives it: GRAPH.OUTPUT of a graph before it, or a name of your own for an input "
        "of the whole, which may go to several; inputs that are not named are inputs of the whole, as GRAPH.INPUT"
    )
    outputs: tuple[str, ...] | None = Field(
        None, min_length=1, description="as GRAPH.OUTPUT; default: every output that no connection takes"
    )
    golden: EnsembleGolden = Field(description="real inputs with which the whole and each of its graphs is proven")
    calibration: EnsembleData | None = Field(
        None, description="real inputs of the whole, for ranges; without them each graph has the data of its own spec"
    )
    limits: dict[Precision, EnsembleLimits] = Field({}, description="of the drift of the whole, by stage")
    canary: Canary = Canary()
    publication: Publication = Publication()

    @field_validator("connections", mode="before")
    @classmethod
    def _filled_in(cls, connections: object) -> object:
        if connections is None:
            lines_text = "write a line for each input of a graph that takes another's output"
            raise ValueError(f"is empty; {lines_text}, or write {{}} if no graph takes one")
        return connections

    def named_files(self) -> Iterator[tuple[Loc, str]]:
        """(key, path relative to the folder) of each file that the spec names."""
        yield from ((("graphs", name), file) for name, file in self.graphs.items())
        yield from ((("functions", name, "function"), function.file) for name, function in self.functions.items())
        yield ("golden", "data"), self.golden.data
        if self.calibration:
            yield ("calibration", "data"), self.calibration.data

    @model_validator(mode="after")
    def _consistent(self) -> "EnsembleSpec":
        if mistakes := [(loc, f"{'.'.join(map(str, loc))}: {text}") for loc, text in self._find_mistakes()]:
            raise Mistakes(mistakes)
        return self

    def _find_mistakes(self) -> Iterator[tuple[Loc, str]]:
        order = self.order()
        yield from self._wrong_connections(order)
        for index, name in enumerate(self.outputs or ()):
            if name.partition(".")[0] not in order or "." not in name:
                yield ("outputs", index), f"{name!r} is not GRAPH.OUTPUT; {suggest(name.partition('.')[0], order)}"
            elif name in (self.outputs or ())[:index]:
                yield ("outputs", index), f"{name!r} is named twice; keep one"
        yield from self._wrong_metrics(order)
        graph_names = {text.partition(".")[0] for pair in self.connections.items() for text in pair}
        named_graphs = {output.partition(".")[0] for output in self.outputs or ()} & self.graphs.keys()
        for name in order:
            if name not in graph_names | named_graphs:
                remedy = "add its connections, name an output of it in outputs, or remove it"
                yield self._loc(name), f"{self._kind(name)} is connected to no other; {remedy}"
            elif self.outputs and name not in self._contributing():
                text = f"no output of the ensemble is computed from {self._kind(name)}"
                yield self._loc(name), f"{text}; name one of its outputs in outputs, or remove it"
        for name in self.functions.keys() & self.graphs.keys():
            yield ("functions", name), f"{name!r} is a graph too; give the function another name"

    def _wrong_metrics(self, order: list[str]) -> Iterator[tuple[Loc, str]]:
        for loc, name in self.golden.outputs():
            graph, dot, _ = name.partition(".")
            if not dot or graph not in order:
                yield ("golden", *loc), f"{name!r} is not GRAPH.OUTPUT; {suggest(graph, order)}"
            elif self.outputs and name not in self.outputs:
                yield ("golden", *loc), f"{name!r} is not an output of the ensemble; {suggest(name, self.outputs)}"
            elif not self.outputs and name in self.connections.values():
                text = f"{name!r} goes to a connection, and is not an output of the ensemble"
                yield ("golden", *loc), f"{text}; name it in outputs too, with the others"

    def named_outputs(self) -> Iterator[tuple[Loc, str]]:
        """(key, GRAPH.OUTPUT) of each output that the spec names: as the ensemble's, or in a task metric."""
        yield from ((("outputs", index), name) for index, name in enumerate(self.outputs or ()))
        yield from ((("golden", *loc), name) for loc, name in self.golden.outputs())

    def _kind(self, name: str) -> str:
        return f"{'graph' if name in self.graphs else 'function'} {name!r}"

    def _loc(self, name: str) -> Loc:
        return ("graphs" if name in self.graphs else "functions", name)

    def order(self) -> list[str]:
        """Names of graphs and functions, in the order of execution."""
        node_sources = {name: dict(self._given(name)) for name in (*self.graphs, *self.functions)}
        graphs = {name: node_sources[name] for name in self.graphs}
        return list(order_nodes(graphs, {name: node_sources[name] for name in self.functions}))

    def _given(self, name: str) -> Iterator[tuple[str, str]]:
        """(input, source) of each connection to a graph or function."""
        for key, source in self.connections.items():
            if key.partition(".")[0] == name:
                yield key.partition(".")[2], source

    def _wrong_connections(self, order: list[str]) -> Iterator[tuple[Loc, str]]:
        for key, source in self.connections.items():
            graph, dot, _ = key.partition(".")
            loc: Loc = ("connections", key)
            if not dot or graph not in order:
                yield loc, f"{key!r} is not GRAPH.INPUT; {suggest(graph, order)}"
                continue
            source_graph, dot, _ = source.partition(".")
            if dot and source_graph not in order:
                yield loc, f"takes {source!r}, which is of no graph; {suggest(source_graph, order)}"
            elif dot and order.index(source_graph) >= order.index(graph):
                yield loc, f"takes {source!r}, and {source_graph!r} does not come before {graph!r}; reorder graphs"
            elif not dot and source in order:
                yield loc, f"takes {source!r}, which is a graph; name an output of it: {source}.OUTPUT"
            elif not dot and not _INPUT_NAME.fullmatch(source):
                yield loc, f"takes {source!r}; the name of an input of the ensemble is 1 to 64 of A-Z a-z 0-9 _ -"

    def _contributing(self) -> set[str]:
        """The graphs that contribute to an output in the spec."""
        contributors = {name.partition(".")[0] for name in self.outputs or ()}
        for name in reversed(self.order()):
            input_sources = (source for _, source in self._given(name) if name in contributors)
            contributors |= {source.partition(".")[0] for source in input_sources if "." in source}
        return contributors


KIND = Kind(EnsembleSpec, "a spec of an ensemble", "model, graphs, connections", HELP)


@dataclass(frozen=True)
class LoadedEnsemble:
    """An ensemble and the specs of its graphs, in order."""

    spec: EnsembleSpec
    graphs: Mapping[str, ModelSpec]

    def wiring(self) -> dict[str, dict[str, str]]:
        """For each graph and function, the source of each input (`enginesmith.core.state`)."""
        connections = self.spec.connections

        def sources(name: str) -> dict[str, str]:
            names = (spec.name for spec in self.tensors(name))
            return {input_name: connections.get(f"{name}.{input_name}", f"{name}.{input_name}") for input_name in names}

        graphs, functions = ({name: sources(name) for name in nodes} for nodes in (self.graphs, self.spec.functions))
        return {name: dict(node_sources) for name, node_sources in order_nodes(graphs, functions).items()}

    def tensors(self, name: str) -> tuple[TensorSpec, ...]:
        """The inputs of a graph or a function."""
        return tuple((self.graphs.get(name) or self.spec.functions[name]).tensors())

    def named_dims(self, name: str) -> tuple[Dim, ...]:
        """The named dims of a graph's or a function's inputs."""
        return (self.graphs.get(name) or self.spec.functions[name]).named_dims()

    def functions(self) -> dict[str, state.EnsembleFunction]:
        """Its functions by name, with digests of their files. Raises ModelError for a file that cannot be read."""
        wiring = self.wiring()
        return {name: function.at(name, self.folder, wiring[name]) for name, function in self.spec.functions.items()}

    @property
    def model(self) -> str:
        """The name of the ensemble in the registry."""
        return self.spec.model

    @property
    def path(self) -> Path:
        """The file of the ensemble's spec."""
        return self.spec.path

    @property
    def folder(self) -> Path:
        """The folder of the ensemble's spec. The specs of its graphs are in this folder or below."""
        return self.spec.folder

    def locate(self, mistakes: "list[tuple[Loc, str]]") -> SpecError:
        """Mistakes, each (key, message), as one error with their lines."""
        _, root = load_document(self.spec.path, KIND)
        return SpecError(locate(self.spec.path, root, mistakes))


def named_graphs(path: Path) -> list[Path]:
    """The spec files of an ensemble's graphs; empty if its own spec has mistakes."""
    try:
        spec, _ = load_document(path, KIND)
    except SpecError:
        return []
    return [path.parent / file for file in spec.graphs.values()]


def load_ensemble(path: Path, address: str = "") -> LoadedEnsemble:
    """Read and check an ensemble and the specs of its graphs. Raises SpecError with one line per mistake."""
    spec, root = load_document(path, KIND)
    spec._path, spec._address = path, address
    if missing_files := list(_missing_files(spec)):
        raise SpecError(locate(path, root, missing_files))
    ensemble = LoadedEnsemble(spec, {name: load_spec(path.parent / file) for name, file in spec.graphs.items()})
    if mistakes := list(_wrong_graphs(ensemble)):
        raise ensemble.locate(mistakes)
    return ensemble


def load_any(path: Path, address: str = "") -> ModelSpec | LoadedEnsemble:
    """Read and check a spec of either kind. Raises SpecError with one line per mistake."""
    return load_ensemble(path, address) if is_ensemble(path) else load_spec(path, address)


def _missing_files(spec: EnsembleSpec) -> Iterator[tuple[Loc, str]]:
    for loc, name in spec.named_files():
        real_path = spec.file(name).resolve()
        if not real_path.is_relative_to(spec.folder):
            yield loc, f"{name!r} leads outside the spec's folder; copy the file into {spec.folder}"
        elif not real_path.is_file():
            yield loc, f"{name!r} is not a file in {spec.folder}; paths are relative to the spec"


def _wrong_graphs(ensemble: LoadedEnsemble) -> Iterator[tuple[Loc, str]]:
    """Mistakes between an ensemble's spec and the specs of its graphs: (key, message)."""
    graphs, spec = ensemble.graphs, ensemble.spec
    for key, source in spec.connections.items():
        graph, _, name = key.partition(".")
        if name not in (input_names := [tensor.name for tensor in ensemble.tensors(graph)]):
            yield ("connections", key), f"{graph!r} has no input {name!r}; {suggest(name, input_names)}"
        if source_pair := split_source(source, (*graphs, *spec.functions)):
            yield from _unknown_output(("connections", key), *source_pair, ensemble)
    for loc, source in spec.named_outputs():
        graph, _, name = source.partition(".")
        yield from _unknown_output(loc, graph, name, ensemble)
    for name, function in spec.functions.items():
        if reason := why_no_function(ensemble.folder, ensemble.folder / function.file, function.name):
            yield ("functions", name, "function"), reason
    precisions = {precision for graph_spec in graphs.values() for precision in graph_spec.precision_list()}
    for precision in spec.limits:
        if precision not in precisions:
            yield ("limits", precision), f"no graph has {precision}; {suggest(precision, precisions)}"
    yield from _unsuitable_graphs(ensemble)
    data_specs = {"golden": spec.golden} | ({"calibration": spec.calibration} if spec.calibration else {})
    yield from find_state_mistakes(graphs, spec.connections, spec.functions, data_specs)


def _unsuitable_graphs(ensemble: LoadedEnsemble) -> Iterator[tuple[Loc, str]]:
    """Graphs whose model's name is taken, or whose labels the data of the whole replaces: (key, message)."""
    graphs, spec = ensemble.graphs, ensemble.spec
    models = [spec.model]
    for name, graph_spec in graphs.items():
        loc: Loc = ("graphs", name)
        if graph_spec.model in models:
            yield loc, f"its model is called {graph_spec.model!r} too; the ensemble and all graphs need different names"
        models.append(graph_spec.model)
        if graph_spec.golden and graph_spec.golden.labels:
            text = f"golden.labels of {graph_spec.model} do not come with the golden data of the ensemble"
            yield loc, f"{text}; give labels to the ensemble"
        if spec.calibration and graph_spec.calibration and graph_spec.calibration.labels:
            text = f"calibration.labels of {graph_spec.model} do not come with the calibration data of the ensemble"
            yield loc, f"{text}; remove them"


def _unknown_output(loc: Loc, graph: str, name: str, ensemble: LoadedEnsemble) -> Iterator[tuple[Loc, str]]:
    output_names = (
        ensemble.graphs[graph].outputs if graph in ensemble.graphs else list(ensemble.spec.functions[graph].outputs)
    )
    if output_names and name not in output_names:
        yield loc, f"{graph!r} has no output {name!r}; {suggest(name, output_names)}"
