"""ONNX graphs as values: reading, tidying, operator schemas, grids of numbers."""
