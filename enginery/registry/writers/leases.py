"""Leases: documents that say "I am writing". A collection deletes nothing that their holders may count on.

A lease says which generation of the list of condemned names its holder had seen. What was condemned later stays as long
as the lease is held; what was condemned before, the holder looks up (`guard.Guard.secure`) before it counts on it.
"""

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.registry.store.base import Store
from enginery.registry.store.keys import LEASES, lease_key
from enginery.registry.writers import clock, tombstones
from enginery.registry.writers.clock import read_stamp, stamp

MAX_BYTES = 1 << 16
# Of one publication: far longer than its requests take; a killed one holds collections up for so long.
PUBLISHING = timedelta(hours=1)
# Of a whole build, in which compilers run for hours.
BUILDING = timedelta(hours=24)


@dataclass(frozen=True)
class Lease:
    """Who does what, from when until when at the longest. seen: generation of the list of condemned names."""

    id: str
    what: str
    holder: str
    at: datetime
    expires: datetime
    seen: int

    def held(self, now: datetime) -> bool:
        """Whether its holder may still count on it, by the clock of whoever asks."""
        return now < self.expires + clock.SKEW


def take(store: Store, what: str, lasts: timedelta = PUBLISHING) -> Lease:
    """Write a lease. First the generation is read, then the lease written: a lower one than true is safe."""
    seen, now = tombstones.read(store).generation, clock.now()
    holder = f"{socket.gethostname()} {os.getpid()}"
    lease = Lease(secrets.token_hex(16), what, holder, now, now + lasts, seen)
    document = {**vars(lease), "at": stamp(lease.at), "expires": stamp(lease.expires)}
    store.create(lease_key(lease.id), canonical_json(document))
    return lease


def release(store: Store, lease: Lease) -> None:
    """Delete a lease."""
    store.remove(lease_key(lease.id))


def leases(store: Store) -> list[Lease]:
    """Every lease, held or not. Raises IntegrityError for one that cannot be read: it may forbid anything."""
    found = ((key, store.read(key)) for key in store.list(LEASES))
    return [_parse(key, data) for key, data in found if data is not None]


def _parse(key: str, data: bytes) -> Lease:
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        return Lease(
            key.removeprefix(LEASES).removesuffix(".json"),
            parsing.field(document, "what", parsing.text),
            parsing.field(document, "holder", parsing.text),
            parsing.field(document, "at", read_stamp),
            parsing.field(document, "expires", read_stamp),
            parsing.field(document, "seen", parsing.count),
        )
    except Malformed as error:
        raise IntegrityError(f"{key}: {error}; delete it when nobody publishes") from error
