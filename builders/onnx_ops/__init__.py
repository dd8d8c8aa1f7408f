"""ONNX operators as array programs, for the compilers of PyTorch and JAX.

reading.py the file   operators/ the operators, a few lines each   graph.py runs a graph node by node
table.py the operators' table and their values   torch_arrays.py numpy to torch and back
Array libraries under one set of names: builders/onnx_torch/arrays.py, backends/xla/jax_arrays.py

Why it is our own: docs/decisions/0007; why one table for both: docs/decisions/0015.
"""
