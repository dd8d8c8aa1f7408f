"""Contracts of an engine beside small drift: equal bits, and the form and distribution of its outputs."""
