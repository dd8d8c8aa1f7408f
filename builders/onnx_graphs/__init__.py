"""Rewrites ONNX graphs for compilers: inner graphs, plain names, constant shapes, safe divisions, equal structure."""
