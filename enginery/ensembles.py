"""Runs several graphs that make one model, each with what the graphs before it gave."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginery.arrays import Array
from enginery.core.codec import decode
from enginery.core.ensemble import split_source
from enginery.core.errors import DataError, IntegrityError
from enginery.core.parsing import field, many, mapping, mapping_of, parse_json, text
from enginery.core.types import Session, Tensors, TensorSpec

# Of a description.
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class EnsembleGraph:
    """A graph of an ensemble. run: runs it once on all of its inputs, by name: `Session.run`, or the call of a server's
    own runtime.  inputs: its tensors, in the dtypes that it takes.  sources: what gives each (`core.ensemble`)."""

    run: Callable[[Tensors], Tensors]
    inputs: Sequence[TensorSpec]
    sources: Mapping[str, str]


class Ensemble(Session):
    """Several graphs as one session.

    graphs: in the order of the data flow.  inputs, outputs: of the whole; outputs are called 'GRAPH.OUTPUT'. A tensor
    that goes from one graph to another is converted where the two are of different float types (an fp16 engine that
    takes float16).
    """

    def __init__(
        self, graphs: Mapping[str, EnsembleGraph], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        self.inputs, self.outputs, self._graphs = inputs, outputs, graphs
        self._wanted = {source for graph in graphs.values() for source in graph.sources.values()}
        self._wanted |= {spec.name for spec in outputs}

    @classmethod
    def described(cls, opens: Callable[[Path], Callable[[Tensors], Tensors]], description: Path | str) -> "Ensemble":
        """The ensemble of a pulled one. opens: gives for an engine's file a function that runs it.  description: the
        JSON of the whole. Raises DataError for a file that is none, and what `opens` raises."""
        path, graphs = Path(description), dict[str, EnsembleGraph]()
        try:
            found = parse_json(path.read_bytes(), MOST_BYTES)
            for graph in field(found, "graphs", many(mapping)):
                own = path.parent / field(graph, "description", text)
                engine = parse_json(own.read_bytes(), MOST_BYTES)
                graphs[field(graph, "name", text)] = EnsembleGraph(
                    opens(own.parent / field(engine, "file", text)),
                    _read_tensors(engine, "inputs"),
                    field(graph, "sources", mapping_of(text)),
                )
            return cls(graphs, _read_tensors(found, "inputs"), _read_tensors(found, "outputs"))
        except (FileNotFoundError, IntegrityError) as error:
            raise DataError(f"{description} describes no ensemble: {error}") from error

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of the whole. Raises DataError for inputs that are missing or unknown, and for a graph that lacks
        an output; and what the graphs raise."""
        wanted = {spec.name for spec in self.inputs}
        if wrong := sorted(wanted ^ inputs.keys()):
            known = ", ".join(spec.name for spec in self.inputs)
            raise DataError(f"input {wrong[0]!r} is missing or unknown; the inputs of the whole are {known}")
        held: dict[str, Array] = {}
        before: list[str] = []
        for name, graph in self._graphs.items():
            answer = graph.run(feed(graph, inputs, held, before))
            given = {f"{name}.{output}": value for output, value in answer.items()}
            held |= {source: np.asarray(value) for source, value in given.items() if source in self._wanted}
            before.append(name)
        if lacking := [spec.name for spec in self.outputs if spec.name not in held]:
            raise DataError(f"the graphs gave no {lacking[0]!r}, which is an output of the whole")
        return {spec.name: held[spec.name] for spec in self.outputs}


def feed(graph: EnsembleGraph, inputs: Tensors, held: Tensors, before: Sequence[str]) -> dict[str, Array]:
    """The inputs of a graph. held: what the graphs before it (`before`) gave. Raises DataError for one that is not
    there."""
    found: dict[str, Array] = {}
    for spec in graph.inputs:
        source = graph.sources[spec.name]
        given = held if split_source(source, before) else inputs
        if source not in given:
            raise DataError(f"nothing gives {source!r}, which input {spec.name!r} takes")
        array = given[source]
        # TensorSpec has numpy's names, and 'bfloat16', which numpy lacks and no session takes.
        floats = array.dtype.kind == "f" and spec.dtype.startswith("float") and array.dtype.name != spec.dtype
        found[spec.name] = array.astype(spec.dtype) if floats else array
    return found


def _read_tensors(found: Mapping[str, object], name: str) -> list[TensorSpec]:
    return [decode(item, TensorSpec) for item in field(found, name, many(mapping))]
