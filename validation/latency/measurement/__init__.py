"""Timing sessions: warm-up, repeated runs, confidence intervals, paired comparison."""
