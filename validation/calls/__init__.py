"""Calls of an engine beside its golden set: sizes that the set lacks, and repeated calls."""
