"""Reads every byte of blobs again, and compares digests."""

from enginesmith.registry.store.files import new_blake3_hasher
from enginesmith.registry.verification.findings import Findings
from enginesmith.registry.versions.lookup import MISSING


def check_blobs(found: Findings, digests: list[str]) -> None:
    """Add what is wrong with these blobs: missing, of other bytes, or of another BLAKE3 than manifests claim."""
    for digest in digests:
        affects = tuple(found.needed.get(digest, ()))
        if not found.store.has(digest):
            found.add(MISSING.kind, digest, MISSING.detail, affects)
            continue
        found.progress(digest)
        found.blobs += 1
        found.size_bytes += found.store.size(digest)
        actual = found.store.rehash(digest)
        if actual.digest != digest:
            found.add("corrupt", digest, f"its bytes have digest {actual.digest}", affects)
        elif actual.blake3 is not None:
            # A manifest may be wrong about a sound blob: a pull that verifies it by BLAKE3 then fails.
            for reference, claimed in found.blake3.get(digest, {}).items():
                if claimed != actual.blake3:
                    detail = f"says {claimed} of blob {digest}, whose BLAKE3 is {actual.blake3}"
                    found.add("blake3", reference, detail, affects)
    if found.blake3 and new_blake3_hasher() is None:
        found.add("unchecked", "blake3", "the library is not installed, and pulls verify by it; pip install blake3")
