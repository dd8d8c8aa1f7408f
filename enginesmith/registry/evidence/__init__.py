"""Documents about a version beside its manifest: attestations, latencies, canary verdicts, quantization records."""
