"""JAX for the ONNX operators (builders/onnx_ops): what the XLA backend traces. arrays.py is all there is.

Importing it imports JAX.
"""
