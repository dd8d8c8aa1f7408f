"""Reads a version or a whole registry again, in the order of its parts."""

from collections.abc import Callable

from enginesmith.core.digest import is_digest
from enginesmith.core.names import Reference
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import BLOBS, blob_key
from enginesmith.registry.verification.blobs import check_blobs
from enginesmith.registry.verification.findings import Findings, Verification
from enginesmith.registry.verification.leftovers import check_documents, check_leases, check_litter, check_series
from enginesmith.registry.verification.served import check_model, take_registered, take_version
from enginesmith.registry.versions import lookup


def verify(
    store: Store, reference: Reference | None = None, progress: Callable[[str], None] = lambda _: None
) -> Verification:
    """Read every byte of a version, or of the whole registry, and compare digests. progress: called with each blob.

    Raises UnknownNameError for an unknown reference; damage is in the result and raises nothing.
    """
    found = Findings(store, progress)
    if reference is not None:
        take_version(found, lookup.locate(store, reference).manifest)
        check_blobs(found, sorted(found.needed))
        return found.close()
    for model in lookup.models(store):
        check_model(found, model)
    take_registered(found)
    stored = []
    for key in store.list(BLOBS):
        digest = key.rpartition("/")[2]
        if is_digest(digest) and key == blob_key(digest):
            stored.append(digest)
        else:
            found.add("stray", key, "not the name of a blob")
    stored.sort()
    check_blobs(found, sorted({*stored, *found.needed}))
    check_litter(found, stored)
    check_documents(found)
    check_leases(found)
    check_series(found)
    return found.close()
