"""ONNX Runtime: the CPU backend (`cpu`) and its sessions, on which reference graphs run too; GPU providers (`gpu`)."""

from builders.backends.onnxruntime.cpu import OnnxRuntime
from builders.backends.onnxruntime.session import OrtSession

__all__ = ["OnnxRuntime", "OrtSession"]
