"""Precision of a graph: fp16 and bf16 by casting, int8 and fp8 by calibrated ranges and explicit Q/DQ nodes, int8 with
scales made at run time, weights in blocks.

Public functions take and return `onnx.ModelProto`, leave their argument alone, and give equal bytes for equal input.
"""
