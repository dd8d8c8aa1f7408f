"""ONNX graphs as compilers want them: inner graphs, plain names, safe divisions, equal structure."""
