"""Records of steps: the result of a step, by the digest of everything that it read.

Records are a cache: a lost one costs a repeated step. So a record that cannot be read, or whose blobs are gone, counts
as absent, and a new one replaces it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.constraints import JsonObject
from enginesmith.core.digest import Digest, canonical_json
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.registry.store.base import Store, change
from enginesmith.registry.store.layout import record_key

MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Record(Excerpt):
    """A step's recorded result: its value, a JSON object, and the digests of the blobs that the value refers to."""

    value: JsonObject
    blobs: tuple[Digest, ...]


class RecordSource(Protocol):
    """Where records are read: a store, or copies of what it holds."""

    def read_record(self, kind: str, key: str) -> Record | None:
        """The record of a step; None where there is none that can be read."""
        ...

    def stored_size(self, digest: str) -> int | None:
        """Size of a blob in bytes; None where it is missing."""
        ...


@dataclass(frozen=True)
class StoredRecords:
    """The records of a store, read one by one."""

    store: Store

    def read_record(self, kind: str, key: str) -> Record | None:
        """See `RecordSource.read_record`."""
        return read_record(self.store.read(record_key(kind, key)))

    def stored_size(self, digest: str) -> int | None:
        """See `RecordSource.stored_size`."""
        return self.store.stored_size(digest)


def recall(
    store: Store, kind: str, key: str, sizes: Callable[[dict[str, object]], Mapping[str, int]] | None = None
) -> dict[str, object] | None:
    """`recall_from` the records of a store."""
    return recall_from(StoredRecords(store), kind, key, sizes)


def recall_from(
    records: RecordSource, kind: str, key: str, sizes: Callable[[dict[str, object]], Mapping[str, int]] | None = None
) -> dict[str, object] | None:
    """The recorded value of a step, or None without a record or where a blob that it refers to is gone.

    Reads no blob. sizes: gives the blobs' sizes in bytes by digest, from the value; a truncated blob counts as gone.
    """
    record = records.read_record(kind, key)
    if record is None:
        return None
    known = sizes(dict(record.value)) if sizes else {}
    found = ((digest, records.stored_size(digest)) for digest in record.blobs)
    sound = all(size is not None and size == known.get(digest, size) for digest, size in found)
    return dict(record.value) if sound else None


def remember(store: Store, kind: str, key: str, value: Mapping[str, object], blobs: Sequence[str] = ()) -> None:
    """Record a step's value (a JSON object) and the blobs that it refers to. Of two writers the last one wins.

    Raises ValueError for NaN in the value, InputError for a bad kind, key or digest.
    """
    where = record_key(kind, key)
    data = canonical_json({"blobs": sorted(set(blobs)), "value": dict(value)})
    change(store, where, lambda _: data)


def read_record(data: bytes | None) -> Record | None:
    """Parse a record; None for no bytes, and for anything that is no record."""
    try:
        return as_record(parse_json(data or b"", MAX_BYTES))
    except Malformed:
        return None


def as_record(document: object) -> Record | None:
    """The record that a JSON value is; None where it is none."""
    try:
        return decode(document, Record)
    except Malformed:
        return None
