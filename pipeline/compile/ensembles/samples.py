"""The step that computes the samples of a graph: what the exported graphs before it give for the data of the whole."""

import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from builders.execution.jobs import Job, ProcessLimits, WorkerContext
from enginery.core.codec import encode
from enginery.core.ensemble import split_source
from enginery.core.errors import DataError
from enginery.core.types import Dim, Session, TensorSpec
from enginery.registry.store.base import Store, open_store
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch_graph
from pipeline.compile.steps.keys import HOST_MEMORY_MIB, code_key
from pipeline.values import Json

if TYPE_CHECKING:
    from enginery.arrays import Array
    from enginery.core.types import Tensors
    from enginery.ensembles import Ensemble
    from validation.data.samples import Samples

LIMITS = ProcessLimits(3600, HOST_MEMORY_MIB, "give fewer samples", "run it on a machine with more memory")


@dataclass(frozen=True)
class WholeData:
    """Data of the whole. path: its file.  digest: of that.  inputs, dims: of the whole."""

    path: Path
    digest: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]

    @property
    def key(self) -> Json:
        """What the key of a step holds of it: wherever it lies."""
        return {"digest": self.digest, "inputs": encode(self.inputs), "dims": encode(self.dims)}

    def open(self) -> "Samples":
        """The samples. Raises DataError where they do not suit the inputs."""
        from validation.data.samples import Samples

        return Samples.open(self.path, self.inputs, self.dims)


@dataclass(frozen=True)
class ChainedGraph:
    """A graph of a chain. model: digest of its exported model.  inputs, outputs: its tensors.  sources: what gives each
    of the inputs."""

    name: str
    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputedSamples:
    """Samples of one graph. data: blob, an .npz.  count: how many."""

    data: str
    count: int


@dataclass(frozen=True)
class ComputeSamples:
    """Run the graphs before one over the data of the whole, and keep what it takes. inputs, sources: of that graph."""

    whole: WholeData
    before: tuple[ChainedGraph, ...]
    inputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str]

    def run(self, context: WorkerContext) -> ComputedSamples:
        """Its samples, streamed. Raises DataError for outputs that cannot be divided into samples."""
        place, names = open_store(context.store), [graph.name for graph in self.before]
        wanted = {source for source in self.sources.values() if split_source(source, names)}
        outputs = [spec for spec in tensors_of(self.before) if spec.name in wanted]
        samples = self.whole.open()
        with open_chain(place, self.before, self.whole.inputs, outputs, context.workdir) as chain:
            runs = ((inputs, chain.run(inputs)) for inputs in samples.batches())
            rows = ({name: {**given, **held}[source] for name, source in self.sources.items()} for given, held in runs)
            path = write_samples(rows, samples.count, samples.complete, context.workdir)
        return ComputedSamples(place.put_file(path), samples.count)


def tensors_of(graphs: Sequence[ChainedGraph]) -> tuple[TensorSpec, ...]:
    """The outputs of all graphs as 'GRAPH.OUTPUT'."""
    found = ((graph.name, spec) for graph in graphs for spec in graph.outputs)
    return tuple(TensorSpec(f"{name}.{spec.name}", spec.dtype, spec.shape) for name, spec in found)


@contextmanager
def open_chain(
    place: Store,
    graphs: Sequence[ChainedGraph],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    workdir: Path,
    engines: "Mapping[str, Session] | None" = None,
) -> "Iterator[Ensemble]":
    """Exported graphs as one session. inputs, outputs: of the whole.  engines: sessions that take the place of graphs,
    by name. Raises as `ReferenceSession`."""
    from builders.reference import ReferenceSession
    from enginery.ensembles import Ensemble, EnsembleGraph

    with ExitStack() as stack:
        opened = dict[str, EnsembleGraph]()
        for graph in graphs:
            session: Session | None = (engines or {}).get(graph.name)
            if session is None:
                folder = stack.enter_context(TemporaryDirectory(dir=workdir))
                path = fetch_graph(place, graph.model, Path(folder) / "graph.onnx")
                session = stack.enter_context(ReferenceSession(path, name=f"graph {graph.name!r}"))
            opened[graph.name] = EnsembleGraph(session.run, session.inputs, graph.sources)
        yield Ensemble(opened, inputs, outputs)


def write_samples(rows: "Iterator[Tensors]", count: int, complete: bool, workdir: Path) -> Path:
    """An .npz of the samples of runs, one after the other; equal samples give equal bytes.

    complete: whether each run is one sample that fills an entry of axis 0.  Raises DataError for an array that differs
    in shape from run to run, or does not have a row for each sample.
    """
    import numpy as np

    arrays: dict[str, np.memmap] = {}
    start = stop = 0
    for inputs in rows:
        size = 1 if complete else max((len(array) for array in inputs.values() if array.ndim), default=0)
        start, stop = stop, stop + size
        for name, array in inputs.items():
            entry = array[None] if complete else array
            if name not in arrays:
                file = workdir / f"samples{len(arrays)}.npy"
                shape = (count, *entry.shape[1:])
                arrays[name] = np.lib.format.open_memmap(file, "w+", entry.dtype, shape)
            _check_row(name, entry, arrays[name], size)
            arrays[name][start:stop] = entry
    path = workdir / "samples.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            array.flush()
            # A ZipInfo of a fixed time, so that equal samples give equal bytes.
            info = zipfile.ZipInfo(f"{name}.npy")
            with Path(str(array.filename)).open("rb") as stored, archive.open(info, "w", force_zip64=True) as out:
                shutil.copyfileobj(stored, out)
    return path


def _check_row(name: str, entry: "Array", array: "Array", size: int) -> None:
    if not entry.ndim or len(entry) != size:
        many = entry.shape[0] if entry.ndim else "no axis of"
        raise DataError(
            f"input {name!r} gets {many} rows for {size} samples; store one complete input per entry of a new axis 0 "
            "in the data of the whole"
        )
    if entry.shape[1:] != array.shape[1:]:
        raise DataError(
            f"input {name!r} is {list(entry.shape[1:])} for one sample and {list(array.shape[1:])} for another; "
            "samples of one graph have one shape: give data of the whole for which it is the same"
        )


def compute_samples(
    name: str,
    section: str,
    whole: WholeData,
    before: Sequence[ChainedGraph],
    inputs: tuple[TensorSpec, ...],
    sources: Mapping[str, str],
    context: RunContext,
    folder: Path,
) -> Path:
    """The samples of graph `name` as a file of `folder`, named by its content. section: golden or calibration."""
    needed = tuple(before) if any(split_source(source, [g.name for g in before]) for source in sources.values()) else ()
    request = ComputeSamples(whole, needed, inputs, sources)
    key = {**encode(request), "whole": whole.key, **code_key(ComputeSamples)}
    job = Job(f"{section} data of {name}", request, context.store.uri, LIMITS)
    found = context.once("ensemble-samples", job.name, key, job, lambda value: [value.data])
    path = folder / f"{section}-{found.data[:32]}.npz"
    if not path.exists():
        context.store.fetch(found.data, path)
    return path
