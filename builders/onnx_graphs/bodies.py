"""The graphs inside the nodes of an ONNX graph: the bodies of If, Loop and Scan. Nothing is imported from onnx."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


def list_bodies(node: "NodeProto") -> "list[GraphProto]":
    """The graphs in a node's attributes, in their order."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        found += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    return found


def walk_graphs(graph: "GraphProto") -> "Iterator[GraphProto]":
    """A graph, and after it every graph inside its nodes, however deep."""
    yield graph
    for node in graph.node:
        for body in list_bodies(node):
            yield from walk_graphs(body)


def walk_nodes(graph: "GraphProto") -> "Iterator[NodeProto]":
    """The nodes of a graph and of every graph inside them: each graph's own first, then those of its bodies."""
    for inner in walk_graphs(graph):
        yield from inner.node


def list_reads(node: "NodeProto") -> list[str]:
    """Names that a node reads, each once: its inputs, then those that its bodies read from outside."""
    return list(dict.fromkeys([*(name for name in node.input if name), *list_captured(node)]))


def list_captured(node: "NodeProto") -> list[str]:
    """Names from outside that the bodies of a node read, each once."""
    found: dict[str, None] = {}
    for body in list_bodies(node):
        bound = {item.name for item in (*body.input, *body.initializer)}
        bound |= {name for inner in body.node for name in inner.output}
        found |= dict.fromkeys(name for inner in body.node for name in list_reads(inner) if name not in bound)
    return list(found)
