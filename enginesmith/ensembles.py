"""Runs several graphs that form one model, also with state between calls."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith import descriptions
from enginesmith.arrays import Array
from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.errors import DataError, Digest, IntegrityError
from enginesmith.core.names import FilePath, Name, NodeName
from enginesmith.core.state import (
    EnsembleFunction,
    State,
    name_dims,
    name_states,
    order_nodes,
    parts_folder,
    split_source,
)
from enginesmith.core.types import Session, ShapeProfile, Tensors, TensorSpec
from enginesmith.streams import Streams
from enginesmith.user_code.channel import load_function

# Outputs of each graph, by name.
Answers = dict[str, Tensors]


class EnsembleStreams(Streams):
    """`Streams` of an ensemble, whose inputs and states are named 'GRAPH.NAME'.

    Inputs that are equal in all steps of a sequence, such as an encoder's, are given once (`hold`). A graph without
    state that uses only these then runs only in the first step.

    step: runs the ensemble (`Ensemble.step`). The others are as in `Streams`.
    """

    def __init__(
        self,
        step: Callable[[Tensors, Collection[str], Answers], tuple[dict[str, Array], Answers]],
        inputs: Sequence[TensorSpec],
        states: Sequence[State],
        ends: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(lambda step_inputs: step(step_inputs, (), {})[0], inputs, states, ends)
        self._step, self._answers = step, Answers()
        self._same = dict[str, Array]()

    def hold(self, inputs: Tensors) -> None:
        """Use these inputs in every step from now on, until `reset` or another `hold`; steps give the other inputs.
        Raises DataError for an unknown input."""
        input_names = [spec.name for spec in self.inputs]
        if unknown_names := sorted(inputs.keys() - set(input_names)):
            raise DataError(f"input {unknown_names[0]!r} is unknown; the inputs of a step are {', '.join(input_names)}")
        # Copies: a caller may write the next sequence into the same arrays.
        self._same, self._answers = {name: np.array(array) for name, array in inputs.items()}, {}

    def run(self, inputs: Tensors) -> Tensors:
        """All outputs of the next step of every stream. Raises as `complete`, and errors of the graphs; the states then
        stay as before."""
        answer, answers = self._step(self.complete(inputs), self._same.keys(), self._answers)
        self.take(answer)
        self._answers = answers
        return answer

    def complete(self, inputs: Tensors) -> dict[str, Array]:
        """The inputs of the next step, with those that are held, and with the states. Raises DataError for an input
        that is missing, unknown or held, or has another number of rows than the others, and as `Streams.complete`."""
        step_tensors, input_names = {**self._same, **inputs}, [spec.name for spec in self.inputs]
        if wrong_names := sorted(step_tensors.keys() ^ set(input_names)) or sorted(self._same.keys() & inputs.keys()):
            name = wrong_names[0]
            problem = (
                "is held already" if name in self._same else "is unknown" if name in step_tensors else "is missing"
            )
            raise DataError(
                f"input {name!r} {problem}; a step needs each of {', '.join(input_names)}, without the inputs of hold()"
            )
        self._check_alike(step_tensors)
        return super().complete(step_tensors)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """As `Streams.reset`. All held inputs are dropped, also for the other rows."""
        super().reset(rows)
        self._same, self._answers = {}, {}

    def keep(self, rows: Sequence[int]) -> None:
        """As `Streams.keep`, also for held inputs; graphs that use only these are run once more."""
        super().keep(rows)
        self._answers = {}
        self._same = {
            name: np.take(array, list(rows), 0) if array.ndim else array for name, array in self._same.items()
        }

    def _check_alike(self, step_inputs: Tensors) -> None:
        """Raise DataError for inputs with different numbers of rows, if all have a row for each stream."""
        if not self._batch:
            return
        row_counts = {name: len(array) for name, array in step_inputs.items() if np.ndim(array)}
        if len(set(row_counts.values())) > 1:
            count_text = ", ".join(f"{name} {count}" for name, count in row_counts.items())
            raise DataError(
                f"the inputs of a step have different numbers of rows ({count_text}); give a row for each stream"
            )


# Runs several graphs that form one model, each with the outputs of the graphs and functions before it.

# The maximum number of rows that a graph without profiles gets at once.
MOST_ROWS = 32
_ALLOW = "allow it with functions=enginesmith.user_code.load_function, once you trust who published it"


@dataclass(frozen=True)
class _NamedGraph(Excerpt):
    """A graph in an ensemble's JSON. description: its own file.  digest: of its engine.  sources: of its inputs."""

    name: NodeName
    description: FilePath
    digest: Digest
    sources: Mapping[str, str]


@dataclass(frozen=True)
class _DescribedEnsemble(Excerpt):
    """The JSON of an ensemble."""

    model: Name
    version: Name
    graphs: tuple[_NamedGraph, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    functions: tuple[EnsembleFunction, ...] = ()


@dataclass(frozen=True)
class EnsembleGraph:
    """A graph or a function of an ensemble. run: runs it once on all of its inputs, by name: `Session.run`, or the call
    of a server's own runtime.  inputs: its tensors, with its dtypes.  sources: of each input (`core.state`).  outputs:
    its tensors; () if unknown. rows: the numbers of rows that a call takes, None if they are unlimited or it has no
    such axis."""

    run: Callable[[Tensors], Tensors]
    inputs: Sequence[TensorSpec]
    sources: Mapping[str, str]
    outputs: Sequence[TensorSpec] = ()
    rows: range | None = None

    def answer(self, inputs: Tensors) -> Tensors:
        """The outputs. Rows beyond the maximum of a call run in further calls; without rows, the outputs are empty."""
        row_counts = {len(array) for array in inputs.values() if array.ndim}
        if len(row_counts) != 1 or self.rows is None:
            return self.run(inputs)
        (count,) = row_counts
        if count == 0:
            shapes = {spec: [dim if isinstance(dim, int) else 0 for dim in spec.shape[1:]] for spec in self.outputs}
            return {spec.name: np.zeros((0, *shape), spec.dtype) for spec, shape in shapes.items()}
        if count <= self.rows[-1]:
            return self.run(inputs)
        chunks = [self._run_part(inputs, count, start, self.rows) for start in range(0, count, self.rows[-1])]
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _run_part(self, inputs: Tensors, count: int, begin: int, rows: range) -> Tensors:
        """The outputs for the rows from `begin`, up to the maximum of a call. If fewer rows remain than a call needs,
        earlier rows are run again with them. Raises DataError for an output without one row per input row."""
        row_count = min(count - begin, rows[-1])
        call_size = next(call_size for call_size in rows if call_size >= row_count)
        first_row = begin + row_count - call_size
        outputs = self.run({name: array[first_row : first_row + call_size] for name, array in inputs.items()})
        if wrong_outputs := [name for name in outputs if len(outputs[name]) != call_size]:
            raise DataError(
                f"the graph takes {rows[-1]} rows per call and gets {count}, but its output {wrong_outputs[0]!r} "
                "does not have one row per input row; build it for more rows, or let the function return fewer"
            )
        return {name: array[call_size - row_count :] for name, array in outputs.items()}


def call_rows(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], profiles: Sequence[ShapeProfile] = ()
) -> range | None:
    """The numbers of rows that one call of a graph takes: 1 if axis 0 of all inputs and outputs has size 1, else those
    of the profiles; without profiles, up to `MOST_ROWS`. None unless axis 0 is the same dim in all inputs and has no
    fixed size in an output."""
    leading_sizes = {spec.shape[0] if spec.shape else 0 for spec in inputs}
    if outputs and leading_sizes | {spec.shape[0] if spec.shape else 0 for spec in outputs} == {1}:
        return range(1, 2)
    is_fixed = not outputs or any(not spec.shape or isinstance(spec.shape[0], int) for spec in outputs)
    if len(leading_sizes) != 1 or is_fixed or isinstance(next(iter(leading_sizes)), int):
        return None
    row_ranges = [(low[0], high[0]) for profile in profiles for _, low, _, high in profile.inputs]
    row_multiples = [multiple[0] for profile in profiles for _, multiple in profile.multiples]
    low, high = min(row_ranges, default=(1, 0))[0], max((high for _, high in row_ranges), default=MOST_ROWS)
    return range(low, high + 1, max(row_multiples, default=1))


def function_node(
    name: str,
    function: Callable[[Tensors], Tensors],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    sources: Mapping[str, str],
) -> EnsembleGraph:
    """A function between graphs, with checked outputs: DataError for an output that is missing, unknown, or of another
    dtype or shape than declared.

    function: arrays by input name -> arrays by output name.
    sources: of each of its inputs: 'GRAPH.OUTPUT', or an input of the ensemble.
    """

    def run(arguments: Tensors) -> Tensors:
        answer = function(arguments)
        if wrong_names := sorted(answer.keys() ^ {spec.name for spec in outputs}):
            name_list = ", ".join(spec.name for spec in outputs)
            raise DataError(
                f"function {name!r} gave {', '.join(answer) or 'nothing'}; {wrong_names[0]!r} is wrong: {name_list}"
            )
        for spec in outputs:
            array = np.asarray(answer[spec.name])
            size_pairs = zip(spec.shape[1:], array.shape[1:], strict=False)
            is_fitting = all(
                isinstance(declared_size, str) or declared_size == size for declared_size, size in size_pairs
            )
            if array.dtype.name != spec.dtype or array.ndim != len(spec.shape) or not is_fitting:
                raise DataError(
                    f"function {name!r} gave {spec.name!r} as {array.dtype.name} {list(array.shape)}; the spec says "
                    f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"
                )
        return answer

    return EnsembleGraph(run, inputs, sources, outputs)


class Ensemble(Session):
    """Several graphs as one session.

    graphs: in the order of the data flow, functions among them.  inputs, outputs: of the ensemble; outputs are named
    'GRAPH.OUTPUT'. A tensor between graphs of different float types is converted (such as for an fp16 engine with
    float16 inputs). If a function returns more rows than a graph takes at once, the graph runs several times; if it
    returns none, the graph's outputs have none.

    states: inputs of the ensemble that take its outputs of the previous call; `run` takes them like other inputs, and
    `streams` carries them.  ends: as in `Streams`.
    """

    def __init__(
        self,
        graphs: Mapping[str, EnsembleGraph],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        states: Sequence[State] = (),
        ends: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.inputs, self.outputs, self._graphs = inputs, outputs, graphs
        self.states, self.ends = states, ends or {}
        self._wanted = {source for graph in graphs.values() for source in graph.sources.values()}
        self._wanted |= {spec.name for spec in outputs}

    @property
    def graphs(self) -> Mapping[str, EnsembleGraph]:
        """Its graphs and functions by name, in their order, for a server that runs one of them more often than another,
        such as an encoder once and a decoder for each token."""
        return self._graphs

    @classmethod
    def described(
        cls,
        opens: Callable[[Path], Callable[[Tensors], Tensors]],
        description: Path | str,
        functions: Callable[[Path, str, str, Mapping[str, str]], Callable[[Tensors], Tensors]] | None = None,
    ) -> "Ensemble":
        """The ensemble that was pulled. opens: returns, for an engine's file with a checked digest, a function that
        runs it.  description: the JSON of the ensemble.  functions: returns the function between graphs for a folder, a
        Python file in it, a name and the digests of its files, as `enginesmith.user_code.load_function` does, which
        runs the version's own code in this process.

        Raises DataError if the file is no such JSON, or for functions without `functions`, IntegrityError for engines
        with other bytes than were published, and errors of `opens` and `functions`.
        """
        path, nodes, stateful_engines = Path(description), dict[str, EnsembleGraph](), dict[str, Mapping[str, object]]()
        document = descriptions.read_description(path)
        try:
            ensemble = decode(document, _DescribedEnsemble, "")
            if ensemble.functions and functions is None:
                function_list = ", ".join(f"{function.file}:{function.function}" for function in ensemble.functions)
                raise DataError(f"{path.name} runs Python code of its own ({function_list}); {_ALLOW}")
            for graph in ensemble.graphs:
                file = descriptions.find_file(path.parent, graph.description)
                engine_document = descriptions.read_description(file)
                if engine_document.get("digest") != graph.digest:
                    raise DataError(f"{file} describes another engine than {path.name} is made of; pull it again")
                spec = decode(engine_document, descriptions.DescribedGraph, "")
                run = opens(descriptions.check_engine(file, engine_document))
                rows = call_rows(spec.inputs, spec.outputs, spec.profiles)
                nodes[graph.name] = EnsembleGraph(run, spec.inputs, graph.sources, spec.outputs, rows)
                stateful_engines |= {graph.name: engine_document} if "state" in engine_document else {}
            graphs = {name: node.sources for name, node in nodes.items()}
            loader = functions or load_function
            parts_path = path.parent / parts_folder(ensemble.model, ensemble.version)
            for function in ensemble.functions:
                run = loader(parts_path / function.name, function.file, function.function, function.files)
                nodes[function.name] = function_node(
                    function.name, run, function.inputs, function.outputs, function.sources
                )
            order = order_nodes(graphs, {function.name: function.sources for function in ensemble.functions})
            inputs, states, ends = _join_states(stateful_engines, nodes, ensemble.inputs)
            return cls({name: nodes[name] for name in order}, inputs, ensemble.outputs, states, ends)
        except descriptions.OtherBytesError:
            raise
        except IntegrityError as error:
            raise DataError(f"{description} describes no ensemble: {error}") from error

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of the ensemble. Raises DataError for missing or unknown inputs, and for a graph that lacks an
        output; and errors of the graphs."""
        input_names = {spec.name for spec in self.inputs}
        if wrong_names := sorted(input_names ^ inputs.keys()):
            name_list = ", ".join(spec.name for spec in self.inputs)
            raise DataError(f"input {wrong_names[0]!r} is missing or unknown; the ensemble's inputs are {name_list}")
        return self.step(inputs, (), {})[0]

    def streams(self) -> EnsembleStreams:
        """New streams over the ensemble."""
        return EnsembleStreams(self.step, self.inputs, self.states, self.ends)

    def step(self, inputs: Tensors, same: Collection[str], answers: Answers) -> tuple[dict[str, Array], Answers]:
        """The outputs of the ensemble, and the outputs of each of its graphs. same: inputs that are unchanged since the
        last call.  answers: the graphs' outputs in it, reused for a graph with unchanged inputs. Raises as `run`, and
        DataError for an output of the ensemble that no graph gave."""
        source_arrays: dict[str, Array] = {}
        step_answers, new_sources = Answers(), set(inputs) - set(same)
        for name, graph in self._graphs.items():
            is_same = name in answers and not new_sources.intersection(graph.sources.values())
            answer = (
                answers[name]
                if is_same
                else _answer(name, graph, feed(graph, inputs, source_arrays, list(step_answers)))
            )
            node_outputs = {f"{name}.{output}": value for output, value in answer.items()}
            source_arrays |= {
                source: np.asarray(value) for source, value in node_outputs.items() if source in self._wanted
            }
            step_answers[name] = answer
            new_sources |= set() if is_same else node_outputs.keys()
        if missing_outputs := [spec.name for spec in self.outputs if spec.name not in source_arrays]:
            raise DataError(f"no graph or function returned the ensemble's output {missing_outputs[0]!r}")
        return {spec.name: source_arrays[spec.name] for spec in self.outputs}, step_answers


def _join_states(
    engines: Mapping[str, Mapping[str, object]], nodes: Mapping[str, EnsembleGraph], inputs: Sequence[TensorSpec]
) -> tuple[list[TensorSpec], tuple[State, ...], dict[str, tuple[int, int]]]:
    """The inputs of an ensemble, states among them in the dtypes of their engines; its states; and the sizes of their
    dims. engines: the JSON of those that have states."""
    states, ends, input_names = list[State](), dict[str, tuple[int, int]](), [spec.name for spec in inputs]
    dtypes = dict[str, str]()
    for name, engine_document in engines.items():
        node, engine_states = nodes[name], decode(engine_document, descriptions.DescribedStates, name)
        dims = name_dims(node.inputs, node.sources, inputs)
        ends |= {dims.get(dim, dim): size_range for dim, size_range in engine_states.ends.items()}
        states += name_states(name, engine_states.state, node.sources, dims, input_names)
        dtypes |= {f"{name}.{spec.name}": spec.dtype for spec in node.inputs}
    state_inputs = {state.input for state in states}
    specs = [replace(spec, dtype=dtypes[spec.name]) if spec.name in state_inputs else spec for spec in inputs]
    return specs, tuple(states), ends


def _answer(name: str, graph: EnsembleGraph, inputs: Tensors) -> Tensors:
    """The outputs of a graph. Raises DataError with the graph's name."""
    try:
        return graph.answer(inputs)
    except DataError as error:
        if repr(name) in str(error):
            raise
        raise DataError(f"{name!r}: {error}") from error


def feed(graph: EnsembleGraph, inputs: Tensors, graph_answers: Tensors, before: Sequence[str]) -> dict[str, Array]:
    """The inputs of a graph. graph_answers: of the graphs before it (`before`). Raises DataError for a missing one."""
    graph_inputs: dict[str, Array] = {}
    for spec in graph.inputs:
        source = graph.sources[spec.name]
        source_arrays = graph_answers if split_source(source, before) else inputs
        if source not in source_arrays:
            raise DataError(f"there is no {source!r}, which input {spec.name!r} reads")
        array = source_arrays[source]
        # TensorSpec has numpy's names, and 'bfloat16', which numpy lacks and no session takes.
        is_cast = array.dtype.kind == "f" and spec.dtype.startswith("float") and array.dtype.name != spec.dtype
        graph_inputs[spec.name] = array.astype(spec.dtype) if is_cast else array
    return graph_inputs
