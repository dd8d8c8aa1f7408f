"""ONNX operators as array programs, for compilers that take those."""
