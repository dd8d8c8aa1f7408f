"""Local functions of an ONNX model put in where they are called.

A model of a few kilobytes can stand for more nodes than fit into any memory (each function calls the one before it
twice), or call itself: what comes out is measured first. onnx's own inliner does the work, since onnx_ir's takes time
that grows with the square of the nodes (10,000: 37 s, against 0.03 s).
"""

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import onnx
from onnx import inliner

from builders.onnx_graphs.bodies import list_bodies
from enginery.core.errors import ModelError
from pipeline.sources.walk import nodes_in

MOST_NODES = 1_000_000
# Protobuf reads 100 messages inside each other, and a graph inside a node is three deeper.
DEEPEST = 30

_Name = tuple[str, str, str]


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without local functions; the same object where it has none.

    Raises ModelError for functions that call themselves, are defined twice, or stand for too much.
    """
    functions = {_name(function.domain, function.name, function.overload): function for function in model.functions}
    if len(functions) < len(model.functions):
        raise ModelError("the model defines a function twice; export it again")
    sizes: dict[_Name, tuple[int, int]] = {}
    for name in _callees_first(functions):
        sizes[name] = _size(functions[name].node, sizes)
    nodes, depth = _size(model.graph.node, sizes)
    if nodes > MOST_NODES or depth > DEEPEST:
        raise ModelError(
            f"the model has {min(nodes, 10**18)} nodes or more in graphs {depth} deep, its functions put in; at most "
            f"{MOST_NODES} and {DEEPEST} can be built: export it with fewer"
        )
    return inliner.inline_local_functions(model) if functions else model


def _callees_first(functions: Mapping[_Name, onnx.FunctionProto]) -> Iterable[_Name]:
    calls = {
        name: {called for node in nodes_in(function.node) if (called := _find_called(node)) in functions}
        for name, function in functions.items()
    }
    try:
        return tuple(TopologicalSorter(calls).static_order())
    except CycleError as error:
        circle = " -> ".join(f"{domain}::{name}"[:80] for domain, name, _ in error.args[1][:5])
        raise ModelError(f"the model's functions call themselves: {circle}; export it again") from error


def _size(nodes: Iterable[onnx.NodeProto], known: Mapping[_Name, tuple[int, int]]) -> tuple[int, int]:
    """How many nodes these stand for, and how deep their graphs go."""
    count = depth = 0
    for node in nodes:
        own, deep = known.get(_find_called(node), (1, 0))
        for graph in list_bodies(node):
            more, deeper = _size(graph.node, known)
            own, deep = own + more, max(deep, deeper + 1)
        count, depth = count + own, max(depth, deep)
    return count, depth


def _find_called(node: onnx.NodeProto) -> _Name:
    return _name(node.domain, node.op_type, node.overload)


def _name(domain: str, name: str, overload: str) -> _Name:
    return ("" if domain == "ai.onnx" else domain, name, overload)
