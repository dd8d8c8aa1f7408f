"""Reads a version or a whole registry again, and finds missing, corrupt, edited and unreferenced content.

Problems are data. A *fault* means that published content cannot be served unchanged; any other problem wastes space or
repeats work, and harms nothing.
"""

from enginesmith.registry.verification.verify import Problem, Repairs, Verification, repair, verify

__all__ = ["Problem", "Repairs", "Verification", "repair", "verify"]
