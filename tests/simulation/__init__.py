"""Simulation of a registry: real writers and readers in one thread, whose order, faults and clocks a seed decides.

`python -m tests.simulation` runs seeds. `rules` has what must hold at each step, `mutants` the planted bugs that it
must find.
"""
