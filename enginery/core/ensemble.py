"""Ensembles: several graphs, each a version of a model of its own, that make one. Standard library only.

What gives an input of a graph is written as a source: 'GRAPH.OUTPUT' of a graph before it, or the name of an input of
the whole, which is 'GRAPH.INPUT' where a spec gives it none.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

# The backend of an ensemble's engines: a document that names an engine of each graph.
ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class PinnedGraph:
    """A graph of an ensemble. model, version, manifest: the version that it is, and the digest of its manifest.

    sources: what gives each of its inputs.
    """

    name: str
    model: str
    version: str
    manifest: str
    sources: Mapping[str, str]

    @property
    def reference(self) -> str:
        """'model@version'."""
        return f"{self.model}@{self.version}"


def split_source(source: str, before: Container[str]) -> tuple[str, str] | None:
    """(graph, output) where a source is an output of a graph; None for an input of the whole. before: names of the
    graphs before the one that takes it."""
    graph, dot, output = source.partition(".")
    return (graph, output) if dot and graph in before else None


def list_inputs(wiring: Mapping[str, Mapping[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """The inputs of the whole, in order, each with the (graph, input) that take it. wiring: of the graphs in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    before: list[str] = []
    for graph, inputs in wiring.items():
        for name, source in inputs.items():
            if split_source(source, before) is None:
                found.setdefault(source, []).append((graph, name))
        before.append(graph)
    return found
