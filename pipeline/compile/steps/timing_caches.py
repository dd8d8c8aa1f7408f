"""Timing caches in the registry: fetched before a build, merged into what is there after it; never a reason to fail.

Kept per product of GPU or CPU, driver and compiler version (`timing_caches`), as a blob that one document names.
"""

from pathlib import Path

from builders.backends.optional_methods import GIVEN, GROWN, timing_cached
from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import EngineryError
from enginery.core.hardware.machine import driver_version
from enginery.core.text import now
from enginery.core.types import Backend
from enginery.registry.store.base import Store, change
from enginery.registry.store.layout import timing_key

MAX_BYTES = 256 << 20
_DOCUMENT_BYTES = 1 << 16


class TimingCache:
    """The cache that suits a backend on this machine; nothing at all for a backend without one."""

    def __init__(self, store: Store, backend: Backend, workdir: Path) -> None:
        self._store, self._workdir = store, workdir
        self._backend = timing_cached(backend)
        place = self._backend.timing_place() if self._backend else None
        self._key = timing_key(place[0], driver_version() or "unknown", place[1]) if place else None
        self._given: str | None = None
        self.notes: list[str] = []

    def fetch(self) -> None:
        """Put it into the folder of the build."""
        if self._key is None:
            return
        try:
            self._given = _read_digest(self._store.read(self._key))
            if self._given:
                self._store.fetch(self._given, self._workdir / GIVEN)
        except (EngineryError, OSError) as error:
            (self._workdir / GIVEN).unlink(missing_ok=True)
            self.notes.append(f"no timing cache was used: {error}")

    def keep(self) -> None:
        """Put what the build knows now beside what others learnt meanwhile."""
        grown = self._workdir / GROWN
        if self._key is None or not grown.is_file():
            return
        try:
            data = grown.read_bytes()
            if len(data) > MAX_BYTES:
                raise EngineryError(f"it is {len(data)} bytes long; the limit is {MAX_BYTES}")
            change(self._store, self._key, lambda before: self._document(before, data))
        except (EngineryError, OSError) as error:
            self.notes.append(f"the timing cache was not kept: {error}")

    def _document(self, before: bytes | None, data: bytes) -> bytes | None:
        there = _read_digest(before)
        whole = data if there in (None, self._given) else self._merged(str(there), data)
        digest = self._store.put_bytes(whole)
        if digest == there:
            return None
        return canonical_json({"format": 1, "cache": digest, "size_bytes": len(whole), "at": now()})

    def _merged(self, there: str, data: bytes) -> bytes:
        """What is there is damaged or of another kind: then ours replaces it."""
        try:
            assert self._backend is not None  # noqa: S101 - there is no key without one
            return self._backend.merge_timing(self._store.read_blob(there), data)
        except EngineryError as error:
            self.notes.append(f"the timing cache of others was replaced: {error}")
            return data


def _read_digest(document: bytes | None) -> str | None:
    """The digest that the document names; None where it is absent or damaged."""
    if document is None:
        return None
    try:
        return parsing.field(parsing.parse_json(document, _DOCUMENT_BYTES), "cache", parsing.digest)
    except parsing.Malformed:
        return None
