"""Metrics of the distance between outputs; results of parts merge into the result of the whole."""
