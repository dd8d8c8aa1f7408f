"""Memory of steps: what a step gave, by the digest of everything it read.

A record is only a memory: losing one costs a repeated step and never an answer. So a record that cannot be read, or
whose blobs are gone, counts as forgotten, and a new one replaces it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json, is_digest
from enginery.registry.store.base import Store
from enginery.registry.store.documents import change
from enginery.registry.store.keys import record_key

MAX_BYTES = 64 << 20


def recall(
    store: Store, kind: str, key: str, sizes: Callable[[Any], Mapping[str, int]] | None = None
) -> dict[str, Any] | None:
    """The value remembered for a step, if every blob it speaks of is still there. Cheap: blobs are not read.

    sizes: of blobs in bytes by digest, from the value, where it says them; one that was cut counts as gone.
    """
    record = read_record(store.read(record_key(kind, key)))
    if record is None:
        return None
    value: dict[str, Any] = record["value"]
    known = sizes(value) if sizes else {}
    found = ((digest, store.stored_size(digest)) for digest in record["blobs"])
    sound = all(size is not None and size == known.get(digest, size) for digest, size in found)
    return value if sound else None


def remember(store: Store, kind: str, key: str, value: Mapping[str, Any], blobs: Sequence[str] = ()) -> None:
    """Remember a step's value (a JSON object) and the blobs it speaks of. Of two writers the last one stays.

    Raises ValueError for NaN in the value, InputError for a bad kind, key or digest.
    """
    where = record_key(kind, key)
    data = canonical_json({"blobs": sorted(set(blobs)), "value": dict(value)})
    change(store, where, lambda _: data)


def read_record(data: bytes | None) -> dict[str, Any] | None:
    """A well-formed record ('value': object, 'blobs': digests), or None."""
    try:
        record = parsing.parse_json(data, MAX_BYTES) if data is not None else None
    except parsing.Malformed:
        return None
    return record if _is_record(record) else None


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("value"), dict)
        and isinstance(record.get("blobs"), list)
        and all(isinstance(digest, str) and is_digest(digest) for digest in record["blobs"])
    )
