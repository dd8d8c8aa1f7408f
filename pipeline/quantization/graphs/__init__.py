"""Reading and tidying ONNX graphs for a change of precision."""
