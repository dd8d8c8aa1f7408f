"""The toy compiler: an ONNX graph becomes a list of numpy calls and its weights, in one file."""

from toy_compiler.backend import Toy

__all__ = ["Toy"]
