"""What requests ask of a server and how it would answer them: traces, times of a run by size, a simulated batcher."""
