"""An ensemble as a whole: its samples, and the chain that its proof runs."""

import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from builders.execution.jobs import Job, ProcessLimits, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError
from enginesmith.core.state import EnsembleFunction, State, name_dims, split_source, step_inputs
from enginesmith.core.types import Dim, Session, TensorSpec
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch_graph
from pipeline.compile.steps.keys import HOST_MEMORY_MIB, code_key
from pipeline.values import Json

if TYPE_CHECKING:
    from enginesmith.arrays import Array
    from enginesmith.core.types import Tensors
    from enginesmith.ensembles import Ensemble, EnsembleGraph
    from pipeline.spec.model import ComputedData, ModelSpec
    from validation.data.joined import Steps
    from validation.data.samples import Samples


@dataclass(frozen=True)
class ChainedGraph:
    """A graph or a function of a chain. model: digest of the exported model; '' of a function.  inputs, outputs: its
    tensors.  sources: what gives each of the inputs.  name: in the ensemble.  function: None of a graph."""

    name: str
    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    function: EnsembleFunction | None = None

    @classmethod
    def of_function(cls, function: EnsembleFunction) -> "ChainedGraph":
        """A function of a chain."""
        return cls(function.name, "", function.inputs, function.outputs, function.sources, function)


def tensors_of(graphs: Sequence[ChainedGraph]) -> tuple[TensorSpec, ...]:
    """The outputs of all graphs as 'GRAPH.OUTPUT'."""
    graph_outputs = ((graph.name, spec) for graph in graphs for spec in graph.outputs)
    return tuple(TensorSpec(f"{name}.{spec.name}", spec.dtype, spec.shape) for name, spec in graph_outputs)


@contextmanager
def open_chain(
    store: Store,
    graphs: Sequence[ChainedGraph],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    workdir: Path,
    engines: "Mapping[str, tuple[Session, range | None]] | None" = None,
) -> "Iterator[Ensemble]":
    """One session of exported graphs, and of functions, one process for each. inputs, outputs: of the ensemble.
    engines: graph name -> session that replaces the graph, and the numbers of rows that it accepts in a call.

    graphs: in the order in which they run. Raises as `ReferenceSession` does, and ModelError for a function that cannot
    be imported."""
    from builders.reference import ReferenceSession
    from enginesmith.ensembles import Ensemble, EnsembleGraph, call_rows

    with ExitStack() as resources:
        nodes = dict[str, EnsembleGraph]()
        for graph in graphs:
            if graph.name in (engines or {}):
                session, rows = (engines or {})[graph.name]
                nodes[graph.name] = EnsembleGraph(session.run, session.inputs, graph.sources, session.outputs, rows)
                continue
            folder = Path(resources.enter_context(TemporaryDirectory(dir=workdir)))
            if graph.function:
                nodes[graph.name] = resources.enter_context(_open_function(store, graph.function, folder))
                continue
            path = fetch_graph(store, graph.model, folder / "graph.onnx")
            reference = resources.enter_context(ReferenceSession(path, name=f"graph {graph.name!r}"))
            rows = call_rows(reference.inputs, reference.outputs)
            nodes[graph.name] = EnsembleGraph(reference.run, reference.inputs, graph.sources, reference.outputs, rows)
        yield Ensemble(nodes, inputs, outputs)


@contextmanager
def _open_function(store: Store, function: EnsembleFunction, folder: Path) -> "Iterator[EnsembleGraph]":
    """A function in a process of its own. folder: for its files. Raises ModelError where it cannot be imported."""
    from enginesmith.ensembles import function_node
    from enginesmith.user_code.channel import ArraysOnly, CallFunction
    from enginesmith.user_code.task import Task
    from pipeline.sources.user_process import start_user_process

    for name, digest in function.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(digest, path)
    task = Task(CallFunction(folder, function.file, function.function, function.name))
    with start_user_process(task) as process:
        process.ask(task, ArraysOnly)

        def run(inputs: "Tensors") -> "Tensors":
            return process.ask(ArraysOnly(), ArraysOnly, dict(inputs))[1]

        yield function_node(function.name, run, function.inputs, function.outputs, function.sources)


@dataclass(frozen=True)
class WholeData:
    """Data of the whole. path: its file.  digest: of that.  inputs, dims: of the whole.  labels: name of the array of
    right answers; '' without one.

    states: of all graphs, under the names of the whole; they are among its inputs, and not in data.  sequence: name of
    the array that says which sequence each sample is a step of; '' where all are of one.  steps: as in `read_steps`.
    """

    path: Path
    digest: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    labels: str = ""
    states: tuple[State, ...] = ()
    sequence: str = ""
    steps: tuple[str, str] | None = None

    @property
    def key(self) -> Json:
        """Its part of a step's key, independent of its location."""
        labels = {"labels": self.labels} if self.labels else {}
        key_fields = {"digest": self.digest, "inputs": encode(self.inputs), "dims": encode(self.dims), **labels}
        if not self.states:
            return key_fields
        return {**key_fields, "states": encode(self.states), "sequence": self.sequence, "steps": list(self.steps or ())}

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest size of each dim."""
        return {dim.name: (dim.min, dim.max) for dim in self.dims}

    def open(self) -> "Samples":
        """The samples. Raises DataError where they do not suit the inputs."""
        from validation.data.samples import Samples

        extra_names = [name for name in (self.labels, self.sequence, self.steps and self.steps[1]) if name]
        return Samples.open(self.path, step_inputs(self.inputs, self.states), self.dims, extra_names)

    def open_steps(self) -> "tuple[Samples, Array | None, Steps | None]":
        """The samples, for each which sequence it is a step of, and which of them are one step. Raises as `open`,
        `read_order` and `read_steps`."""
        from validation.data.joined import read_order, read_steps

        samples = self.open()
        order = read_order(samples, self.sequence or None)
        return samples, order, read_steps(samples, self.steps, order, self.dims)


# Arrays of computed samples: the sequence and the step that each is of. No input has such a name.
SEQUENCE, STEP = "sequence number", "step number"


@dataclass(frozen=True)
class GraphSteps:
    """How the samples of a graph form steps. state: whether the graph has state; if not, samples equal to the previous
    step's are left out.  dim: dim of its inputs along which several samples of the ensemble are one step; '' if each
    step is one sample of the graph."""

    state: bool
    dim: str

    @property
    def arrays(self) -> tuple[str | None, dict[str, str] | None]:
        """`sequence` and `steps` of the graph's data."""
        return (SEQUENCE if self.state else None), ({self.dim: STEP} if self.state and self.dim else None)


@dataclass(frozen=True)
class RolledStep:
    """A step of the ensemble. numbers: of its sequence, and of the step. samples: number of its samples.

    tensors: the inputs of the step, without results of earlier steps, and the outputs of its graphs.
    """

    numbers: tuple[int, int]
    samples: int
    tensors: "Tensors"


def find_graph_steps(
    data: WholeData, state: bool, inputs: Sequence[TensorSpec], sources: Mapping[str, str]
) -> GraphSteps:
    """The `GraphSteps` of a graph. state: whether it has state.  inputs: without states.  sources: of these inputs."""
    step_name = data.steps[0] if data.steps else ""
    step_dim = next((dim for dim, name in name_dims(inputs, sources, data.inputs).items() if name == step_name), "")
    return GraphSteps(state, step_dim)


def roll_steps(chain: Session, data: WholeData, states: Sequence[State]) -> Iterator[RolledStep]:
    """All steps of the sequences of the whole, run by a chain that carries its states. states: of the chain. Raises
    DataError for data that are no steps."""
    import numpy as np

    from enginesmith.streams import Streams
    from validation.data.joined import GrownInputs, JoinedSteps, split

    samples, order, steps = data.open_steps()
    first_rows = steps.firsts if steps else np.arange(samples.count)
    counts = np.diff(np.append(first_rows, samples.count)).tolist()
    source = JoinedSteps(samples, steps) if steps else samples
    streams = Streams(chain.run, tuple(chain.inputs), states, data.ends)
    for sequence_index, sequence in enumerate(split(source, None if order is None else order[first_rows])):
        streams.reset()
        grown_inputs = GrownInputs(streams.inputs)
        for end, step_tensors in sequence:
            outputs = streams.run(grown_inputs.take(step_tensors))
            yield RolledStep((sequence_index, end - 1), counts[end - 1], {**step_tensors, **outputs})


def list_rows(
    rolled_steps: Iterator[RolledStep],
    steps: GraphSteps,
    inputs: Sequence[TensorSpec],
    sources: Mapping[str, str],
    complete: bool,
) -> "Iterator[dict[str, Array]]":
    """The samples of a graph, one after the other. inputs, sources: of the graph, without its states.  complete: as in
    `write_samples`. Raises DataError for what cannot be cut into the samples of a step."""
    import numpy as np

    last_sample: Tensors = {}
    numbers = -1, -1
    for step in rolled_steps:
        row_tensors = {name: step.tensors[source] for name, source in sources.items()}
        samples = _cut(row_tensors, steps.dim, step.samples, inputs) if steps.dim else [row_tensors]
        for sample in samples:
            if steps.state:
                indices = (
                    {SEQUENCE: step.numbers[0], STEP: step.numbers[1]} if steps.dim else {SEQUENCE: step.numbers[0]}
                )
                yield sample | {
                    name: np.array(step_index if complete else [step_index]) for name, step_index in indices.items()
                }
            elif numbers[0] != step.numbers[0] or not all(
                np.array_equal(sample[name], last_sample[name]) for name in sample
            ):
                yield sample
            last_sample, numbers = sample, step.numbers


def _cut(step: "Tensors", dim: str, count: int, inputs: Sequence[TensorSpec]) -> "list[dict[str, Array]]":
    """The samples that a step was joined of: inputs with the dim in equal parts, the others in each."""
    import numpy as np

    samples = [dict(step) for _ in range(count)]
    for spec in (spec for spec in inputs if dim in spec.shape):
        axis = spec.shape.index(dim)
        size = step[spec.name].shape[axis]
        if size % count:
            raise DataError(
                f"input {spec.name!r} gets {size} along {dim!r} in a step of {count} samples, which is not a multiple "
                f"of {count}; if its values are not per sample, give this dim of it another name"
            )
        for sample, values in zip(samples, np.split(step[spec.name], count, axis), strict=True):
            sample[spec.name] = values
    return samples


LIMITS = ProcessLimits(3600, HOST_MEMORY_MIB, "give fewer samples", "run it on a machine with more memory")


@dataclass(frozen=True)
class ComputedSamples:
    """Samples of one graph. data: blob, an .npz.  count: how many."""

    data: str
    count: int


@dataclass(frozen=True)
class ComputeSamples:
    """Run the graphs before a graph over the ensemble's data, and keep its inputs.

    inputs, sources: of that graph, without its states.  steps: of a graph in an ensemble with state, how its samples
    are steps; None else.
    """

    whole: WholeData
    before: tuple[ChainedGraph, ...]
    inputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str]
    steps: GraphSteps | None = None

    def run(self, context: WorkerContext) -> ComputedSamples:
        """Its samples, streamed. Raises DataError for outputs that cannot be divided into samples."""
        store, names = open_store(context.store), [graph.name for graph in self.before]
        samples = self.whole.open()
        # A function may give any number of rows, each of which is a sample then.
        is_complete = samples.complete and not _behind_functions(self.sources, self.before)
        states = [state for state in self.whole.states if split_source(state.input, names)]
        read_names = {source for source in self.sources.values() if split_source(source, names)}
        read_names |= {state.output for state in states}
        outputs = [spec for spec in tensors_of(self.before) if spec.name in read_names]
        other_states = {state.input for state in self.whole.states}.difference(state.input for state in states)
        outer_inputs = [spec for spec in self.whole.inputs if spec.name not in other_states]
        with open_chain(store, self.before, outer_inputs, outputs, context.workdir) as chain:
            rows: Iterator[dict[str, Array]]
            if self.steps is not None:
                rolled_steps = roll_steps(chain, self.whole, states)
                rows = list_rows(rolled_steps, self.steps, self.inputs, self.sources, is_complete)
            else:
                runs = ({**inputs, **chain.run(inputs)} for inputs in samples.batches())
                rows = ({name: tensors[source] for name, source in self.sources.items()} for tensors in runs)
            path, count = write_samples(rows, is_complete, context.workdir)
        return ComputedSamples(store.put_file(path), count)


def _behind_functions(sources: Mapping[str, str], before: Sequence[ChainedGraph]) -> bool:
    """Whether these sources depend on a function."""
    graph_indices = {graph.name: index for index, graph in enumerate(before)}
    source_indices = {
        graph_indices[source_parts[0]]
        for source in sources.values()
        if (source_parts := split_source(source, graph_indices))
    }
    # What a graph names of itself is an input of the whole, so each takes from those before it alone.
    return any(
        before[index].function or _behind_functions(before[index].sources, before[:index]) for index in source_indices
    )


def write_samples(rows: "Iterator[Tensors]", complete: bool, workdir: Path) -> tuple[Path, int]:
    """An .npz of the samples of runs, one after the other, and how many there are; equal samples give equal bytes.

    complete: whether each run is one sample that fills an entry of axis 0.  Raises DataError for an array that differs
    in shape from run to run, or does not have a row for each sample, and where there is no sample.
    """
    import numpy as np

    arrays, count = dict[str, np.ndarray](), 0  # of each the first, whose dtype and shape all have
    with ExitStack() as resources:
        files = dict[str, IO[bytes]]()
        for inputs in rows:
            sample_count = 1 if complete else max((len(array) for array in inputs.values() if array.ndim), default=0)
            count += sample_count
            for name, array in inputs.items():
                entry = array[None] if complete else array
                if name not in arrays:
                    arrays[name] = entry
                    files[name] = resources.enter_context((workdir / f"samples{len(files)}").open("w+b"))
                _check_row(name, entry, arrays[name], sample_count)
                files[name].write(np.ascontiguousarray(entry, arrays[name].dtype).data)
        if not count:
            raise DataError("the ensemble's data gives no sample: functions before the graph returned no row for any")
        path = workdir / "samples.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                # A ZipInfo of a fixed time, so that equal samples give equal bytes.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member_file:
                    shape, dtype_text = (count, *array.shape[1:]), np.lib.format.dtype_to_descr(array.dtype)
                    header = {"descr": dtype_text, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member_file, header)
                    files[name].seek(0)
                    shutil.copyfileobj(files[name], member_file)
    return path, count


def _check_row(name: str, entry: "Array", array: "Array", size: int) -> None:
    if not entry.ndim or len(entry) != size:
        count = entry.shape[0] if entry.ndim else "no axis of"
        raise DataError(
            f"input {name!r} gets {count} rows for {size} samples; store one complete input per entry of a new axis 0 "
            "in the ensemble's data"
        )
    if entry.shape[1:] != array.shape[1:]:
        raise DataError(
            f"input {name!r} is {list(entry.shape[1:])} for one sample and {list(array.shape[1:])} for another; "
            "all samples of a graph must have one shape: change the ensemble's data"
        )


def request_samples(
    data: WholeData, before: Sequence[ChainedGraph], spec: "ModelSpec", sources: Mapping[str, str]
) -> ComputeSamples:
    """What computes the samples of a graph. before: the graphs before it.  spec, sources: of the graph.  data: the
    data that the samples are computed from."""
    inputs = step_inputs(spec.tensors(), spec.states())
    taken_sources = {tensor.name: sources[tensor.name] for tensor in inputs}
    steps = find_graph_steps(data, bool(spec.state), inputs, taken_sources) if data.states else None
    needed_graphs = (
        tuple(before)
        if any(split_source(source, [graph.name for graph in before]) for source in taken_sources.values())
        else ()
    )
    return ComputeSamples(data, needed_graphs, inputs, taken_sources, steps)


def compute_samples(
    name: str, section: str, request: ComputeSamples, context: RunContext, folder: Path
) -> "ComputedData":
    """The samples of graph `name` as a file of `folder`, named by its content. section: golden or calibration."""
    from pipeline.spec.model import ComputedData

    key = {**encode(request), "whole": request.whole.key, **code_key(ComputeSamples)}
    job = Job(f"{section} data of {name}", request, context.store.uri, LIMITS)
    sample_data = context.once("ensemble-samples", job.name, key, job, lambda value: [value.data])
    path = folder / f"{section}-{sample_data.data[:32]}.npz"
    if not path.exists():
        context.store.fetch(sample_data.data, path)
    return ComputedData(path, *(request.steps.arrays if request.steps else ()))
