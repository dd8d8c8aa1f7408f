"""Simulation of a registry: real writers and readers in one thread, whose order, faults and clocks a seed decides.

`python -m tests.simulation` runs seeds; docs/concepts/registry.md ("The protocol") says which rules it holds.
"""
