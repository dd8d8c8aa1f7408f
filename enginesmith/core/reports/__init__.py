"""Reports as plain values: proof of an engine, latency, quantization, paired benchmarks."""
