"""An engine of an ensemble on one side of a canary: its graphs' engines and functions, opened as a server does."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import discovery
from builders.backends.compatibility import open_engine
from enginesmith.core.ensemble import EnsembleFunction, order_nodes
from enginesmith.core.types import Engine, Target, TensorSpec
from enginesmith.registry.ensembles import functions_of, pinned_engines
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.store.base import Store
from pipeline.compile.steps.blobs import fetch_engine
from pipeline.values import EngineBlob

if TYPE_CHECKING:
    from enginesmith.ensembles import Ensemble


@dataclass(frozen=True)
class FetchedEnsemble:
    """An ensemble's engine as files, which may be sent to another process. engines: of its graphs, by name.

    sources: what gives each input of a graph.  functions: each with the folder of its files.  inputs, outputs: of the
    whole.  thread_safe: whether several threads may run it at once, which of functions nobody knows.
    """

    engines: Mapping[str, Engine]
    sources: Mapping[str, Mapping[str, str]]
    functions: tuple[tuple[EnsembleFunction, Path], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    thread_safe: bool

    @contextmanager
    def open(self) -> "Iterator[Ensemble]":
        """The whole as one session; its functions run in this process. Raises what the backends raise, and ModelError
        for a function that cannot be imported."""
        from enginesmith.ensembles import Ensemble, EnsembleGraph, call_rows, function_node
        from enginesmith.user_code.calling import load_function

        found = dict[str, EnsembleGraph]()
        with ExitStack() as stack:
            for name, engine in self.engines.items():
                own, request = stack.enter_context(open_engine(engine)), engine.request
                rows = call_rows(own.inputs, own.outputs, request.profiles)
                found[name] = EnsembleGraph(own.run, own.inputs, self.sources[name], own.outputs, rows)
            for item, folder in self.functions:
                run = load_function(folder, item.file, item.function, item.files)
                found[item.name] = function_node(item.name, run, item.inputs, item.outputs, item.sources)
            order = order_nodes(self.sources, {item.name: item.sources for item, _ in self.functions})
            yield Ensemble({name: found[name] for name in order}, self.inputs, self.outputs)


def fetch_ensemble(store: Store, manifest: Manifest, entry: EngineEntry, folder: Path) -> FetchedEnsemble:
    """The engines of an ensemble's engine and its functions, fetched into `folder` and verified. Raises as `fetch`, and
    IntegrityError for a graph's version that is gone."""
    engines, sources, safe = dict[str, Engine](), dict[str, Mapping[str, str]](), list[bool]()
    for graph, _, engine in pinned_engines(store, manifest, entry):
        own = folder / graph.name
        own.mkdir()
        blob = EngineBlob(request_of(engine), str(engine.digest), str(engine.suffix))
        engines[graph.name] = fetch_engine(store, blob, own)
        sources[graph.name] = graph.sources
        safe.append(discovery.capabilities_of(engine.backend).thread_safe)
    functions = list[tuple[EnsembleFunction, Path]]()
    for item in functions_of(manifest):
        for name, digest in item.files.items():
            path = folder / item.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(digest, path)
        functions.append((item, folder / item.name))
    return FetchedEnsemble(
        engines, sources, tuple(functions), tuple(entry.inputs), tuple(entry.outputs), all(safe) and not functions
    )


def why_graph_not_here(store: Store, manifest: Manifest, entry: EngineEntry, target: Target) -> str | None:
    """Why an engine of a graph cannot be run here for a target; None where all can."""
    for graph, _, engine in pinned_engines(store, manifest, entry):
        if reason := discovery.configure(engine.backend, dict(engine.options)).runs(target):
            return f"graph {graph.name!r}: {reason}"
    return None
