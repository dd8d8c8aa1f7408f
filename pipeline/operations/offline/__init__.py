"""Proofs from machines that reach no registry: carry.py takes engines there in a folder, returned.py judges what came
of them."""
