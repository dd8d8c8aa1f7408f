"""Leases: nothing that a writer to a registry refers to is deleted by garbage collection meanwhile.

A lease is a document of a running writer. It records the generation of the garbage marks (`registry.marks`) when the
writer began: what was marked later is kept while the lease is held, and of what was marked before the writer removes
the marks. So a writer does this, in this order: `hold_lease`; `Guard.secure` the names; check that they exist; write
what refers to them. One that needs a name that is going must run again later. docs/guides/retention.md ("Why a
collection never hurts a publication") has the argument why this is enough.

The times in a lease, as all that one machine writes and another judges, are of the store's clock (`Store.now`). Its
holder measures what is left of it by a clock of its own machine that nobody sets, from before it asked the store for
the time, and stops `MARGIN` early.
"""

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import Event, Thread

from enginesmith.core import moments, parsing
from enginesmith.core.digest import canonical_json, digests_in
from enginesmith.core.errors import ConflictError, EnginesmithError, IntegrityError, UnavailableError
from enginesmith.core.moments import read_stamp as read_stamp
from enginesmith.core.moments import stamp as stamp
from enginesmith.core.parsing import Malformed
from enginesmith.registry.ensembles import load_pinned
from enginesmith.registry.manifest import Manifest, parse
from enginesmith.registry.marks import read_state, unmark
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import LEASES, lease_key, manifest_key, version_prefix
from enginesmith.registry.store.parallel import side_by_side

LEASE_MAX_BYTES = 1 << 16
# Duration of a publication's lease: far longer than its requests take; a killed one delays collections for so long.
PUBLISHING = timedelta(hours=1)
# Of a whole build's lease, in which compilers run for hours.
BUILDING = timedelta(hours=24)
# A holder stops so much early: a store's clock counts whole seconds, and two clocks differ in their rates and a store's
# servers in their times by less.
MARGIN = timedelta(minutes=1)


@dataclass(frozen=True)
class Lease:
    """A writer's lease. what: the work, for messages.  holder: host and process number.  at, expires: its time, by the
    store's clock.

    seen: the generation of the garbage marks that was read before.  changes: models whose versions or channels the
    holder may change (`versions.index`).
    """

    id: str
    what: str
    holder: str
    at: datetime
    expires: datetime
    seen: int
    changes: tuple[str, ...] = ()

    def is_held(self, now: datetime) -> bool:
        """Whether its holder may still rely on it. now: by the store's clock."""
        return now < self.expires


def take_lease(store: Store, what: str, lasts: timedelta = PUBLISHING, changes: tuple[str, ...] = ()) -> Lease:
    """Write a lease and return it. The generation is read first: one that is too low is safe, one too high is not."""
    seen, began = read_state(store).generation, store.now()
    holder = f"{socket.gethostname()} {os.getpid()}"
    lease = Lease(secrets.token_hex(16), what, holder, began, began + lasts, seen, changes)
    document = {**vars(lease), "at": stamp(lease.at), "expires": stamp(lease.expires)}
    store.create(lease_key(lease.id), canonical_json(document))
    return lease


def list_leases(store: Store) -> list[Lease]:
    """All leases, held or expired. Raises IntegrityError for one that cannot be read, as it may protect anything."""
    found: list[Lease] = []
    for key, data in side_by_side(store.read, list(store.list(LEASES))):
        if data is None:
            continue
        try:
            document = parsing.parse_json(data, LEASE_MAX_BYTES)
            found.append(
                Lease(
                    key.removeprefix(LEASES).removesuffix(".json"),
                    parsing.field(document, "what", parsing.text),
                    parsing.field(document, "holder", parsing.text),
                    parsing.field(document, "at", read_stamp),
                    parsing.field(document, "expires", read_stamp),
                    parsing.field(document, "seen", parsing.count),
                    parsing.field(document, "changes", parsing.many(parsing.name)),
                )
            )
        except Malformed as error:
            raise IntegrityError(f"{key}: {error}; delete it when nobody publishes") from error
    return found


@dataclass(frozen=True)
class Guard:
    """A writer's lease on a store. begun: of `steady_s`, before the lease was taken."""

    store: Store
    lease: Lease
    begun: float

    def secure(self, names: Iterable[str]) -> None:
        """Remove the garbage marks of names (digests, `model@version`); check only afterwards that they exist.

        Raises ConflictError when one is being deleted at this moment, and as `check`.
        """
        self.check()
        unmark(self.store, names)

    def check(self) -> None:
        """Raise ConflictError if the lease is over: what was secured may be deleted. Asked before the write that refers
        to it."""
        if moments.steady_s() > end_of(self.begun, self.lease.expires - self.lease.at):
            raise ConflictError(
                f"{self.lease.what} took longer than its lease, until {stamp(self.lease.expires)}; run again"
            )


def end_of(begun: float, lasts: timedelta) -> float:
    """Until when, by `steady_s`, its writer may rely on what it wrote for a duration. begun: before it asked the store
    for the time."""
    return begun + (lasts - MARGIN).total_seconds()


@contextmanager
def hold_lease(store: Store, what: str, lasts: timedelta = PUBLISHING) -> Iterator[Guard]:
    """Hold a lease on a store while the block writes something that refers to its content."""
    begun = moments.steady_s()
    lease = take_lease(store, what, lasts)
    try:
        yield Guard(store, lease, begun)
    finally:
        with suppress(UnavailableError):  # it expires by itself
            store.remove(lease_key(lease.id))


@contextmanager
def keep_renewing(renew: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `renew` in a thread every `every_s` seconds while the block runs; what the registry refuses is left to the
    next time."""
    stop = Event()

    def work() -> None:
        while not stop.wait(every_s):
            with suppress(EnginesmithError):
                renew()

    thread = Thread(target=work, name="enginesmith-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def secure_version(guard: Guard, manifest: Manifest) -> None:
    """Keep an existing version and its blobs, and those of its graphs, from being deleted while the guard's lease is
    held.

    Raises ConflictError as `Guard.secure`, and IntegrityError if the version was deleted or replaced.
    """
    model, version = manifest.model, manifest.version
    keys = list(guard.store.list(version_prefix(model, version)))
    documents = (data for _, data in side_by_side(guard.store.read, [key for key in keys if key.endswith(".json")]))
    named = (digest for data in (*documents, "\n".join(keys).encode()) if data for digest in digests_in(data))
    guard.secure([version_name(model, version), *named])
    data = guard.store.read(manifest_key(model, version))
    if data is None or parse(data, model=model, version=version).digest != manifest.digest:
        raise IntegrityError(f"{model}@{version} was deleted or replaced while it was looked at; run again")
    secure_graphs(guard, manifest)


def secure_graphs(guard: Guard, manifest: Manifest) -> None:
    """`secure_version` of each version that an ensemble pins; nothing of another version."""
    for graph in manifest.graphs:
        secure_version(guard, load_pinned(guard.store, graph))


def version_name(model: str, version: str) -> str:
    """The name of a version among the garbage marks: 'model@version'."""
    return f"{model}@{version}"
