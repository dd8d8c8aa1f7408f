"""The graphs and functions of an ensemble in order, run as one session: exported graphs, or engines in their place."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from enginesmith.core.codec import OMIT_DEFAULT
from enginesmith.core.ensemble import EnsembleFunction
from enginesmith.core.types import Session, TensorSpec
from enginesmith.registry.store.base import Store
from pipeline.compile.steps.blobs import fetch_graph

if TYPE_CHECKING:
    from enginesmith.core.types import Tensors
    from enginesmith.ensembles import Ensemble, EnsembleGraph


@dataclass(frozen=True)
class ChainedGraph:
    """A graph or a function of a chain. model: digest of the exported model; '' of a function.  inputs, outputs: its
    tensors.  sources: what gives each of the inputs."""

    name: str
    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    function: EnsembleFunction | None = field(default=None, metadata=OMIT_DEFAULT)

    @classmethod
    def of_function(cls, function: EnsembleFunction) -> "ChainedGraph":
        """A function of a chain."""
        return cls(function.name, "", function.inputs, function.outputs, function.sources, function)


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
    engines: "Mapping[str, tuple[Session, range | None]] | None" = None,
) -> "Iterator[Ensemble]":
    """Exported graphs, and functions in processes of their own, as one session. inputs, outputs: of the whole.
    engines: sessions that take the place of graphs, by name, each with the numbers of rows that it takes at once.

    Raises as `ReferenceSession`, and ModelError for a function that cannot be imported.
    """
    from builders.reference import ReferenceSession
    from enginesmith.ensembles import Ensemble, EnsembleGraph, call_rows

    with ExitStack() as stack:
        opened = dict[str, EnsembleGraph]()
        for graph in graphs:
            if graph.name in (engines or {}):
                session, rows = (engines or {})[graph.name]
                opened[graph.name] = EnsembleGraph(session.run, session.inputs, graph.sources, session.outputs, rows)
                continue
            folder = Path(stack.enter_context(TemporaryDirectory(dir=workdir)))
            if graph.function:
                opened[graph.name] = stack.enter_context(_open_function(place, graph.function, folder))
                continue
            path = fetch_graph(place, graph.model, folder / "graph.onnx")
            own = stack.enter_context(ReferenceSession(path, name=f"graph {graph.name!r}"))
            rows = call_rows(own.inputs, own.outputs)
            opened[graph.name] = EnsembleGraph(own.run, own.inputs, graph.sources, own.outputs, rows)
        yield Ensemble(opened, inputs, outputs)


@contextmanager
def _open_function(place: Store, function: EnsembleFunction, folder: Path) -> "Iterator[EnsembleGraph]":
    """A function in a process of its own. folder: for its files. Raises ModelError where it cannot be imported."""
    from enginesmith.ensembles import function_node
    from enginesmith.user_code.calling import CallFunction, CallOnce
    from enginesmith.user_code.task import Task
    from pipeline.sources.user_process import start_user_process

    for name, digest in function.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        place.fetch(digest, path)
    task = Task(CallFunction(folder, function.file, function.function, function.name))
    with start_user_process(task) as process:
        process.ask(task, CallOnce)

        def run(inputs: "Tensors") -> "Tensors":
            return process.ask(CallOnce(), CallOnce, dict(inputs))[1]

        yield function_node(function.name, run, function.inputs, function.outputs, function.sources)
