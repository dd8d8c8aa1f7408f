"""ONNX graphs as PyTorch programs, for the compilers that want one.

The ONNX model stays what every backend compiles; this package turns it into a `torch.nn.Module` and, with the dynamic
dimensions of a build request, into a `torch.export.ExportedProgram`. Importing it imports torch. Why it is our own:
docs/decisions/0007.
"""

from builders.onnx_torch.program import to_guarded_program, to_program

__all__ = ["to_guarded_program", "to_program"]
