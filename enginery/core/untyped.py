"""The one name of what its library gives no types for: TensorRT's, TVM's, IREE's, JAX's, ONNX Runtime's and Ray's
objects, functions of C libraries, and values of ONNX attributes, whose type follows from the operator."""

from typing import Any

# mypy checks nothing that is done with it.
Untyped = Any
