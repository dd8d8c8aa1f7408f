"""ONNX graphs as PyTorch programs, for the compilers that want one.

The ONNX model stays what every backend compiles; this package turns it into a `torch.nn.Module` and, with the dynamic
dimensions of a build request, into a `torch.export.ExportedProgram`. Importing it imports torch. Why it is our own:
docs/decisions/0007.

program.py the module and its export   arrays.py torch under the names that the operators (onnx_ops) use
"""

from pathlib import Path

import torch

from builders.onnx_ops.graph import known_operators
from builders.onnx_torch.arrays import TORCH
from builders.onnx_torch.program import OnnxModule, order_as_requested, program_of, read
from enginesmith.core.types import BuildRequest

__all__ = ["operators", "to_guarded_program", "to_module", "to_program"]


def to_module(model: Path) -> torch.nn.Module:
    """The model as a module, on the CPU, in eval mode.

    `forward` takes one tensor for each input of the graph, in their order, and gives the tuple of its outputs. Raises
    ModelError, naming node and operator, for what the conversion does not know. For `torch.compile` take
    `to_program(...).module()`: this module's loop over nodes is plain Python, which torch.compile follows badly.
    """
    return OnnxModule(read(model)).eval()


def to_program(model: Path, request: BuildRequest) -> torch.export.ExportedProgram:
    """The model exported with the request's inputs, outputs and dynamic dims, in the request's order.

    There is one symbol for each named dim, from the least to the greatest size that any of the profiles allows. Raises
    ModelError for what the conversion does not know, and where an operator fixes the size of a dynamic dim.

    An index out of range, or a division of integers by zero, is whatever the compiler makes of it; see
    `to_guarded_program`.
    """
    return program_of(OnnxModule(order_as_requested(read(model), request)).eval(), request)


def to_guarded_program(model: Path, request: BuildRequest) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """The same for compilers whose code ends the process, or reads elsewhere, at an index out of range or at an integer
    division by zero.

    Indices that come from data are brought into range, divisors of zero become 1. Where there are any, the program has
    one more output, bool [n], false for each fault that there was, and then the outputs mean nothing. What the faults
    are comes second, in words that name the node.
    """
    module = OnnxModule(order_as_requested(read(model), request), clamped=True).eval()
    program = program_of(module, request)
    return program, module.faults


def operators() -> frozenset[str]:
    """Names of the ONNX operators that are known, `If` included."""
    return known_operators(TORCH)
