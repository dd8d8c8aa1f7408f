"""ONNX operators as array programs, for compilers that take those: PyTorch's and JAX's.

reading.py the file   table.py the operators' table and their values   operators/ the operators, a few lines each
graph.py runs a graph node by node   torch_arrays.py numpy to torch and back
library.py an array library under one set of names; adapters: builders/onnx_torch/arrays.py, backends/xla/jax_arrays.py

Why it is our own: docs/decisions/0007; why one table for both: docs/decisions/0015.
"""
