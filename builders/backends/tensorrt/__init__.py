"""TensorRT and TensorRT for RTX: one API, two backends.

`tensorrt-rtx` builds ahead of time for any generation on a host without a GPU (kernels are compiled when the engine is
loaded). `tensorrt` tunes on the GPU it builds for, and therefore builds only where that GPU is; 10.16 and 11.x are
served by the same calls, which tests check by name against the bindings of each.

Precision lives in the graph: networks are strongly typed, int8 comes as Q/DQ nodes and fp16 as casts. What cannot work
is refused before any compiler is imported; what the compiler refuses is raised with its own words and a remedy.
INT8 and convolution engines are not byte-reproducible (generated names differ), so nothing may depend on equal digests.
"""

from builders.backends.tensorrt.editions import TensorRT, TensorRTRTX

__all__ = ["TensorRT", "TensorRTRTX"]
