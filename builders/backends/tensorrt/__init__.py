"""TensorRT and TensorRT for RTX: one API, two backends.

`tensorrt-rtx` builds ahead of time for any generation on a host without a GPU (kernels are compiled when the engine is
loaded). `tensorrt` tunes on the GPU it builds for, and therefore builds only where that GPU is; 10.16 and 11.x are
served by the same calls, which tests check by name against the bindings of each.

    flavour.py    what both share: options, refusals, build, open      rtx.py, full.py   what each has of its own
    network.py    from a request to the serialized engine: parser, configuration, profiles
    progress.py   phases of a build, and an early end when it is asked for
    words.py      what TensorRT says, in words with a remedy
    session.py    running an engine                                    profile.py        the time of its layers
    layers.py     what the engine inspector tells of layers and tactics
    plugins.py    shared libraries of operators                        refit.py          new weights for an engine
    timing.py     what the tuner measured, given to the next build

Precision lives in the graph: networks are strongly typed, int8 comes as Q/DQ nodes and fp16 as casts. What cannot work
is refused before any compiler is imported; what the compiler refuses is raised with its own words and a remedy.
INT8 and convolution engines are not byte-reproducible (generated names differ), so nothing may depend on equal digests.
"""

from builders.backends.tensorrt.editions import TensorRT, TensorRTRTX

__all__ = ["TensorRT", "TensorRTRTX"]
