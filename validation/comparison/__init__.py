"""Two sessions on the same inputs: their drift as checks."""
