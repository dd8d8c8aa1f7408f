"""The signatures that a version needs before a client loads it.

Signatures are OpenSSF model signatures (Sigstore bundles) stored beside a version; a policy on the client names the
signers. Code that pulls, runs or promotes an engine calls `require` before it reads a byte of it.
"""

from enginesmith.registry.trust.policy import Vouched, require

__all__ = ["Vouched", "require"]
