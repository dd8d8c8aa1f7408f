"""Proofs from GPU machines that reach no registry: the folder of engines to take there (bundle.py, of an ensemble
ensemble_bundle.py), and judging what comes back (imports.py)."""
