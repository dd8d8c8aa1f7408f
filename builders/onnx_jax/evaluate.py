"""Runs a graph's nodes in order, and folds what depends on constants alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from builders.onnx_jax.arrays import sizes
from builders.onnx_jax.nodes import OPERATORS, Graph, Node, Value
from enginery.core.errors import ModelError

# What a graph may still ask of a value while it is traced (shapes, axes, pads, scalars) is small.
LARGEST_CONSTANT_BYTES = 256


def evaluate(graph: Graph, given: Mapping[str, Value]) -> tuple[Value, ...]:
    """The graph's outputs. given: values of its inputs, of constants that were taken out, and of outer graphs.

    Raises ModelError naming the node that cannot be evaluated.
    """
    values: dict[str, Value] = {**given, **graph.constants}
    for node in graph.nodes:
        values |= _outcome(node, values)
    return tuple(values[name] for name in graph.outputs)


def fold(graph: Graph) -> Graph:
    """The same graph with every node that depends on constants alone replaced by its result."""
    known: dict[str, Value] = dict(graph.constants)
    rest = []
    for node in graph.nodes:
        if all(name in known for name in node.inputs if name) and not _has_graphs(node):
            known |= {name: np.asarray(value) for name, value in _outcome(node, known).items()}
        else:
            rest.append(node)
    needed = {name for node in rest for name in node.inputs} | set(graph.outputs) | set().union(*map(_captured, rest))
    return replace(graph, nodes=tuple(rest), constants={k: v for k, v in known.items() if k in needed})


def split_weights(graph: Graph) -> tuple[Graph, dict[str, np.ndarray[Any, Any]]]:
    """The graph without its large constants, and these: arguments of the compiled function instead of parts of it."""
    large = {name: array for name, array in graph.constants.items() if array.nbytes > LARGEST_CONSTANT_BYTES}
    small = {name: array for name, array in graph.constants.items() if name not in large}
    return replace(graph, constants=small), large


def _outcome(node: Node, values: Mapping[str, Value]) -> dict[str, Value]:
    taken = [values[name] if name else None for name in node.inputs]
    arguments = {"scope": values} if _has_graphs(node) else {}
    try:
        with np.errstate(all="ignore"):
            made = OPERATORS[node.op](node, *taken, **arguments)
    except ModelError:
        raise
    except Exception as error:  # JAX and numpy raise classes of many kinds for one reason: this node
        raise node.refused(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    outputs = made if isinstance(made, tuple | list) else (made,)
    return {name: _value(value) for name, value in zip(node.outputs, outputs, strict=False) if name}


def _value(made: Any) -> Value:
    """What numpy gives instead of an array without axes: a scalar of its own, or the symbolic size itself."""
    if made is None or isinstance(made, np.ndarray | jax.Array):
        return made
    return np.asarray(made) if isinstance(made, np.generic) else sizes(made).reshape(())


def _has_graphs(node: Node) -> bool:
    return any(isinstance(value, Graph) for value in node.attributes.values())


def _captured(node: Node) -> set[str]:
    """Names that the graphs inside a node may take from outside."""
    found: set[str] = set()
    for value in node.attributes.values():
        if isinstance(value, Graph):
            found |= set(value.outputs) | {name for inner in value.nodes for name in inner.inputs}
            found |= set().union(*map(_captured, value.nodes))
    return found
