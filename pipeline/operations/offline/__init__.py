"""Offline proofs, from machines that reach no registry: bundle.py writes a folder of engines to take there, results.py
judges the results that come back."""
