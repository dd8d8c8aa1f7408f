"""Reads a version or a whole registry again, and finds what is missing, corrupt, edited, or referred to by nothing.

Problems are data. A *fault* means that something published cannot be served as it was; any other problem wastes space
or repeats work, and harms nothing.
"""

from enginesmith.registry.verification.verify import Problem, Repairs, Verification, repair, verify

__all__ = ["Problem", "Repairs", "Verification", "repair", "verify"]
