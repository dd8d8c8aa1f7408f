"""Copies of the records that planning a model read, in one document; and listings of what a store holds.

A plan of many models would read each record and ask for each blob by a request of its own. A copy is found by the same
key as its record, the digest of everything that the step read, and counts only while the store lists that record; what
is not copied or not listed is asked for by itself. So copies decide how fast an answer is, and never which. Records
whose key says nothing of what was read ('latest-...') are not copied.
"""

from collections import defaultdict
from collections.abc import Mapping
from threading import Lock

from enginesmith.core.digest import canonical_json, digest_of
from enginesmith.registry.builds.records import Record, StoredRecords, as_record, remember
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, record_key

KIND = "copies"
# Larger documents are not written: reading them would take longer than asking for what is needed.
MOST_BYTES = 8 << 20
_CHANGING = "latest-"


class StoreListing:
    """Which keys a store holds, with their sizes in bytes; each folder is listed once, when it is first asked for.

    Several threads may ask at once. What is stored after its folder was listed is not found.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folders: dict[str, Mapping[str, int]] = {}
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)

    def size(self, key: str) -> int | None:
        """Size of a document or a blob in bytes; None where it is not listed."""
        folder = key[: key.rindex("/") + 1]
        if folder not in self._folders:
            with self._locks[folder]:
                if folder not in self._folders:
                    self._folders[folder] = dict(self.store.sizes(folder))
        return self._folders[folder].get(key)


class RecordCopies:
    """The records of one model, as `RecordSource`: from its copies where there are some. `save` renews these."""

    def __init__(self, listing: StoreListing, model: str) -> None:
        self._listing, self._stored = listing, StoredRecords(listing.store)
        self._key = digest_of({"model": model})
        found = self._stored.read_record(KIND, self._key)
        copies = found.value.get("records") if found else None
        self._copies: Mapping[str, object] = copies if isinstance(copies, dict) else {}
        self._read: dict[str, Record] = {}

    def read_record(self, kind: str, key: str) -> Record | None:
        """See `RecordSource.read_record`."""
        if kind.startswith(_CHANGING):
            return self._stored.read_record(kind, key)
        where = record_key(kind, key)
        copied = where in self._copies and self._listing.size(where) is not None
        found = as_record(self._copies[where]) if copied else None
        if found := found or self._stored.read_record(kind, key):
            self._read[where] = found
        return found

    def stored_size(self, digest: str) -> int | None:
        """See `RecordSource.stored_size`."""
        listed = self._listing.size(blob_key(digest))
        return self._stored.stored_size(digest) if listed is None else listed

    def save(self) -> None:
        """Write the copies of what was read, unless they held all of it."""
        if self._read.keys() <= self._copies.keys():
            return
        copies = {where: {"blobs": list(record.blobs), "value": record.value} for where, record in self._read.items()}
        if len(canonical_json(copies)) <= MOST_BYTES:
            remember(self._listing.store, KIND, self._key, {"records": copies})
