"""Who vouches for a version, and whether that is enough for this client.

Signatures are OpenSSF model signatures (Sigstore bundles) that lie beside a version; a policy on the client says whose
are needed. What pulls, runs or promotes an engine asks `require` first, before a byte of it is fetched.
"""

from enginery.registry.trust.requirement import Vouched, require

__all__ = ["Vouched", "require"]
