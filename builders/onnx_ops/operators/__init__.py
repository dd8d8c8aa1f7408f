"""The operators, a few lines each; importing this fills the table.

sizes.py (shapes as numbers), elementwise.py, reductions.py, shapes.py, matmul.py, windows.py (convolutions, pooling),
normalization.py, indexing.py, quantize.py, recurrent.py, resize.py, attention.py
"""

from builders.onnx_ops.operators import (  # noqa: F401
    attention,
    elementwise,
    indexing,
    matmul,
    normalization,
    quantize,
    recurrent,
    reductions,
    resize,
    shapes,
    sizes,
    windows,
)
