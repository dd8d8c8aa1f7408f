"""The operators, a few lines each; importing this fills the table.

elementwise.py, shapes.py, indexing.py (gather, scatter, resize), matmul.py (with convolutions, pooling, recurrent
layers), normalization.py (with reductions), attention.py (with shapes as numbers), quantize.py

Arguments are the inputs and attributes of ONNX's operator of that name, in its order and with its defaults
(https://onnx.ai/onnx/operators). Beside them `xp` is the array library, `lookups` checks indices and divisors
(`table.Lookups`), `opset` is the model's, and `outputs` is how many results are asked for.
"""

from builders.onnx_ops.operators import attention, elementwise, indexing, matmul, normalization, quantize, shapes

__all__ = ["attention", "elementwise", "indexing", "matmul", "normalization", "quantize", "shapes"]
