"""Precision of a graph: fp16 and bf16 by casting, int8 and fp8 by calibrated ranges and explicit Q/DQ nodes, int8 with
scales made at run time, int4 weights in blocks.

::

    ranges.py      the scales artifact, which the folders below read and write
    statistics/    what the tensors of a model hold, measured over samples in one streaming pass
      observe.py       the pass over the samples             taps.py      where in onnxruntime's graph it measures
      observations.py  what was measured, mergeable          histogram.py histograms over a float's bits
      methods.py       where to clip                         sources.py   the data that a spec names
      calibrate.py     observe and choose in one call
    insertion/     where in a graph Q/DQ nodes and casts go
      insertion_points.py    which nodes int8 can take       overflow.py  which tensors fp16 or bf16 cannot hold
      placement.py           where else Q/DQ goes, so that fusions survive (residual Adds, pooling)
      first_convolutions.py  a strided RGB convolution, rewritten for integer kernels
    schemes/       writing a graph in another precision
      write.py         the entry point: a model, a precision, a backend's scheme -> a graph and notes
      qdq.py           int8 and fp8: ranges -> Q/DQ          insertion.py  the nodes themselves
      int4.py          weights in blocks                     dynamic.py    int8 with scales made at run time
      cast.py          fp32 -> fp16 or bf16                  emulate.py    the same arithmetic on a CPU that lacks it
      overrides.py     precision by hand, per node
    settings/      how a group of nodes is quantized: smoothing, clipping, rounding
      groups.py        nodes that int8 takes together        statistics.py   one pass: moments, reach, work
      smooth.py        outliers into weights                 rounding.py     weights whose errors cancel
      patches.py       convolutions as products              moments.py      covariance of what they read
      convolutions.py  their weights and biases              fit.py          strength and clipping of one group
      folding.py       where smoothing factors cost nothing  runs.py         samples to fit and to judge on
      sessions.py      onnxruntime sessions over a model
    search/        mixed precision: what to quantize, found by trial
      search.py        the most compute in int8 that keeps a quality floor
      float_groups.py  which groups a floor leaves in float  sensitivity.py  what one group costs at the outputs
      latency.py       what int8 does not make faster        engine_timing.py  measured with a backend's engines
      floor.py         the quality floor                     attainable.py   floors that nothing misses, or reaches
      chosen.py        the result                            proposal.py     changes that mend a failed check
    record/        what quantizing did, tensor by tensor, read from the graph that was written
      pairs.py         the graph's Q/DQ pairs                levels.py       SQNR and clipping out of a histogram
      work.py          multiplications by node               record.py       all of it as JSON
    notes.py       what was done, what was left in float, and why

Public functions take and return `onnx.ModelProto`, leave their argument alone, and give equal bytes for equal input.
"""
