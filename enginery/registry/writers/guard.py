"""What a writer does so that no collection takes from under it what it counts on.

In this order: take a lease; `secure` the names; look whether they are there; write what refers to them; release.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from enginery.core.errors import ConflictError, IntegrityError, UnavailableError
from enginery.registry.manifest import Manifest, parse
from enginery.registry.store.base import Store
from enginery.registry.store.keys import manifest_key, version_prefix
from enginery.registry.writers import clock, leases, tombstones
from enginery.registry.writers.leases import PUBLISHING, Lease
from enginery.registry.writers.tombstones import Condemned

_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class Guard:
    """A writer's lease on a store."""

    store: Store
    lease: Lease

    def secure(self, names: Iterable[str]) -> None:
        """Take names (digests, `model@version`) off the list of condemned ones. Only then look whether they exist.

        Raises ConflictError when one is being deleted this very moment, or the lease is over.
        """
        wanted = frozenset(names)
        if clock.now() > self.lease.expires - clock.SKEW:
            raise ConflictError(
                f"{self.lease.what} took longer than its lease, until {clock.stamp(self.lease.expires)}; run again"
            )
        tombstones.update(self.store, lambda known: _without(known, wanted))


@contextmanager
def writing(store: Store, what: str, lasts: timedelta = PUBLISHING) -> Iterator[Guard]:
    """Hold a lease on a store while something is written that refers to what is there."""
    lease = leases.take(store, what, lasts)
    try:
        yield Guard(store, lease)
    finally:
        with suppress(UnavailableError):  # it ends by itself
            leases.release(store, lease)


def secure_version(guard: Guard, manifest: Manifest) -> None:
    """Make sure that a version that is there stays, blobs and all, while the guard's holder refers to it.

    Raises ConflictError, and IntegrityError when it was deleted.
    """
    model, version = manifest.model, manifest.version
    keys = list(guard.store.list(version_prefix(model, version)))
    documents = (guard.store.read(key) for key in keys if key.endswith(".json"))
    named = (digest for data in (*documents, "\n".join(keys).encode()) if data for digest in digests_in(data))
    guard.secure([version_name(model, version), *named])
    data = guard.store.read(manifest_key(model, version))
    if data is None or parse(data, model=model, version=version).digest != manifest.digest:
        raise IntegrityError(f"{model}@{version} was deleted or replaced while it was looked at; run again")


def digests_in(data: bytes) -> Iterator[str]:
    """Whatever in a document may be a digest."""
    return (found.decode() for found in _DIGEST.findall(data))


def version_name(model: str, version: str) -> str:
    """How the list of condemned names calls a version."""
    return f"{model}@{version}"


def _without(known: Condemned, names: frozenset[str]) -> Condemned:
    if going := sorted(names & known.going.keys()):
        raise ConflictError(
            f"{going[0]} is being deleted this moment by `enginery gc` ({known.sweeper.by if known.sweeper else '?'}); "
            "run again when that is done (`enginery gc --delete` also ends one that was killed)"
        )
    if names.isdisjoint(known.waiting):
        return known
    return replace(known, waiting={name: item for name, item in known.waiting.items() if name not in names})
