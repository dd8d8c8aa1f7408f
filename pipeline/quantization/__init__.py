"""Precision of a graph: fp16 and bf16 by casting, int8 by calibrated ranges and explicit Q/DQ nodes.

::

    graph.py      reading and tidying ONNX graphs (names, types, order)
    sites.py      which nodes int8 can take, and which tensors must be measured for them
    calibrate.py  one streaming pass over samples -> ranges.Ranges
    qdq.py        ranges + a backend's scheme -> graph with Q/DQ
    halves.py     fp16 and bf16 as number formats
    overflow.py   which tensors do not fit them
    sharing.py    keeps Q/DQ away from other readers of the same tensor
    schemas.py    which inputs and results of an operator may be fp16 or bf16
    cast.py       fp32 graph -> fp16 or bf16 graph;  emulate.py: the same arithmetic on a CPU that lacks it
    notes.py      what was done, what was left in float, and why

Public functions take and return `onnx.ModelProto`, leave their argument alone, and give equal bytes for equal input.
"""
