"""Precision of a graph: fp16 and bf16 by casting, int8 and fp8 by calibrated ranges and explicit Q/DQ nodes, int8 with
scales made at run time, weights in blocks.

::

    graph.py             ONNX graphs: tidying, element types, opsets
    insertion_points.py  where Q/DQ goes, and which tensors must therefore be measured
    ranges.py            calibrated ranges, as a file
    statistics/          what the tensors of a model hold, measured over samples in one streaming pass
      observe.py           the samples, the session that measures, the pass
      observations.py      what was measured, mergeable      histogram.py  over a float's bits; what rounding costs
      methods.py           where to clip
    schemes/             writing a graph in another precision
      write.py             a model, a precision, a backend's scheme -> a graph and notes
      qdq.py               int8 and fp8: ranges -> Q/DQ      insertion.py  the nodes themselves, and their grids
      first_convolutions.py  a strided RGB convolution, rewritten for integer kernels
      block_floats.py      NVFP4 and MXFP8: arithmetic, graphs, and graphs that ONNX Runtime runs
      cast.py              fp32 -> fp16 or bf16, and the same arithmetic on a CPU that lacks it
      half_floats.py       the formats, and which nodes and tensors do not fit them
      overrides.py         precision by hand, per node
    settings/            how a group of nodes is quantized: smoothing, clipping, rounding
      groups.py            nodes that int8 takes together, and statistics of what they read
      fit.py               strength, clipping, rounding and biases of each group
      smooth.py            outliers moved into weights
      moments.py           patches of convolutions           runs.py       samples in runs, and sessions
    search/              mixed precision: what to quantize, found by trial
      search.py            the most compute in int8 that keeps a quality floor
      sensitivity.py       what one group costs at the outputs
      latency.py           what int8 does not make faster, measured with a backend's engines
      quality.py           the quality floor                 trial.py      one trial, and the choice
      sections.py          a model in sections               graph_limits.py  the limits of the quantization stage
      pareto.py            the front of quality and latency  costs.py         modelled costs, by peak rates (rates.py)
      repair.py            overrides that repair a failed check
    record.py            what quantizing did, tensor by tensor, as JSON
    shares.py            the share of the multiplications with weights that is narrow

Public functions take and return `onnx.ModelProto`, leave their argument alone, and give equal bytes for equal input.
"""
