"""Settings of each quantized group: ranges, smoothing, rounding, bias correction."""
