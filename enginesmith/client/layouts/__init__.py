"""Layouts of pulled engines on disk: plain, a Triton model repository, or an ONNX Runtime model package."""
