"""Sources of models: a torch source, a .pt2 program or an ONNX file becomes canonical ONNX."""
