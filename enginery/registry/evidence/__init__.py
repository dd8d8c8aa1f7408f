"""What is known of a version beside its manifest: attestations, latencies, canaries' verdicts, quantization records."""
