"""Timing on a GPU: clocks, peak rates, peer compilers."""
