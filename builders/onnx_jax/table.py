"""Importing this fills the table of operators."""

from builders.onnx_jax import (  # noqa: F401
    control,
    elementwise,
    indexing,
    linear,
    normalization,
    quantize,
    reductions,
    resize,
    shapes,
    windows,
)
