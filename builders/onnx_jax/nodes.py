"""Nodes and graphs as values, and the table of operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginery.core.errors import ModelError

# A numpy array (known while tracing; of objects where a size is symbolic) or a JAX array; None: an input left out.
Value = Any
Operator = Callable[..., Any]
OPERATORS: dict[str, Operator] = {}


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph. attributes: as Python values, tensors as numpy arrays, graphs as `Graph`.

    opset: the version of ONNX's operators that the model was written for.
    """

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default where the node has none."""
        return self.attributes.get(name, default)

    def refused(self, why: str) -> ModelError:
        """The error that this node cannot be compiled: names it and its operator."""
        label = self.name or ", ".join(self.outputs)
        return ModelError(f"xla cannot compile {self.op} (node {label!r}): {why}; use onnxruntime, or leave it out")


@dataclass(frozen=True)
class Graph:
    """A graph ready for evaluation. inputs, outputs: names, in order.  constants: name -> array."""

    nodes: tuple[Node, ...]
    constants: dict[str, np.ndarray[Any, Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def op(*names: str) -> Callable[[Operator], Operator]:
    """Enter a function into the table. It gets the node and a value for each input, and gives a value or a tuple."""

    def enter(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return enter
