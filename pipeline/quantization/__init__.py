"""Graphs in other precisions: fp16 and bf16 by casts; int8 and fp8 by calibrated ranges and explicit Q/DQ nodes; int8
with scales that are computed at run time; weights in blocks.

Public functions take and return `onnx.ModelProto`, do not change it, and return equal bytes for equal input.
"""
