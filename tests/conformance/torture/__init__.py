"""Small graphs that compilers trip over, each with inputs; ONNX's own reference evaluator says what is right."""

from tests.conformance.torture import control, io, names, operators, opsets, shapes, weights  # noqa: F401 - they add their graphs
from tests.conformance.torture.graph import GRAPHS, Graph

__all__ = ["GRAPHS", "Graph"]
