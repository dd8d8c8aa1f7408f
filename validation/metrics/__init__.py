"""Metrics of the distance between outputs, whose parts merge."""
