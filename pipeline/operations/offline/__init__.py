"""Proofs from GPU machines that reach no registry: the folder of engines to take there (bundle.py), and judging what
comes back (imports.py)."""
