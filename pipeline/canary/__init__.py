"""Canaries of published engines: run, judged, and what a verdict does to a channel. Statistics are in validation."""
