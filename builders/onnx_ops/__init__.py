"""ONNX operators as array programs, for compilers that take those: PyTorch's and JAX's.

reading.py the file   table.py the operators and their values   graph.py runs a graph node by node
library.py   an array library under one set of names; its adapters are builders/onnx_torch and builders/onnx_jax
sizes.py (shapes as numbers), elementwise.py, reductions.py, shapes.py, matmul.py, windows.py (convolutions, pooling),
normalization.py, indexing.py, quantize.py, resize.py, attention.py: a few lines per operator

Why it is our own: docs/decisions/0007; why one table for both: docs/decisions/0013.
"""

from builders.onnx_ops import (  # noqa: F401 - each registers its operators
    attention,
    elementwise,
    indexing,
    matmul,
    normalization,
    quantize,
    reductions,
    resize,
    shapes,
    sizes,
    windows,
)
from builders.onnx_ops.graph import Program
from builders.onnx_ops.library import Array, Library
from builders.onnx_ops.reading import Body, read, read_model
from builders.onnx_ops.table import OPERATORS, Lookups

__all__ = ["Array", "Body", "Library", "Lookups", "Program", "operators", "read", "read_model"]


def operators(xp: Library) -> frozenset[str]:
    """Names of the ONNX operators that are known, `If` included."""
    return frozenset(OPERATORS) - xp.lacks | {"If"}
