"""Seeded shapes and values for an engine, against the graph it was built from: what golden data alone does not try."""
