"""The operators, a few lines each; importing this fills the table.

elementwise.py, shapes.py, indexing.py (gather, scatter, resize), matmul.py (with convolutions, pooling, recurrent
layers), normalization.py (with reductions), attention.py (with shapes as numbers), quantize.py
"""

from builders.onnx_ops.operators import attention, elementwise, indexing, matmul, normalization, quantize, shapes

__all__ = ["attention", "elementwise", "indexing", "matmul", "normalization", "quantize", "shapes"]
