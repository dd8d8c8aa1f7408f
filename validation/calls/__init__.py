"""Calls of an engine beyond its golden set: sizes that the set lacks, and repeated calls."""
