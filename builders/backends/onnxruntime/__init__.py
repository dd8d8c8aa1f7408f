"""ONNX Runtime: the CPU engine and the interpreter of reference graphs (`cpu`), and its GPU providers (`gpu`)."""

from builders.backends.onnxruntime.cpu import OnnxRuntime, OrtSession

__all__ = ["OnnxRuntime", "OrtSession"]
