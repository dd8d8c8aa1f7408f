"""ONNX graphs as compilers want them: inner graphs, plain names, settled shapes, safe divisions, equal structure."""
