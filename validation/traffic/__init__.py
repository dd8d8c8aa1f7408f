"""Traffic of requests: recorded traces, run times by size, and a simulated batcher."""
