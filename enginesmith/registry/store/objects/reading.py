"""Reading from a bucket: whole documents; blobs as streams, digested on the way; and ranges of blobs.

A body that breaks off is resumed at that byte, and the pauses between attempts start anew whenever bytes came, so that
a bad network ends nothing while bytes move.
"""

import hashlib
import time
from contextlib import closing, suppress
from typing import BinaryIO

from enginesmith.core.digest import CHUNK_BYTES
from enginesmith.core.errors import IntegrityError, UnavailableError
from enginesmith.registry.store.files import new_blake3_hasher
from enginesmith.registry.store.layout import MAX_BLOB_BYTES, MAX_DOCUMENT_BYTES, check_size
from enginesmith.registry.store.objects.api import (
    ABSENT,
    TOO_LARGE,
    UNCHANGED,
    Body,
    BucketApi,
    Declined,
    Failed,
    ObjectFacts,
)
from enginesmith.registry.store.objects.attempts import ask, pauses, refuse

# The documents that were read last, with their tags: at most `_REMEMBERED`, each of at most `_REMEMBERED_BYTES`.
_LAST_READ: dict[tuple[BucketApi, str], tuple[bytes, str]] = {}
_REMEMBERED = 64
_REMEMBERED_BYTES = 1 << 20
_READ_BYTES = 1 << 20


def head(bucket: BucketApi, key: str) -> ObjectFacts | None:
    """An object's metadata; None if it is absent. Raises UnavailableError, and IntegrityError for a size that no object
    has."""
    try:
        found = ask(bucket, f"looking at {key}", lambda: bucket.head(key))
    except Declined as declined:
        _check_absent(bucket, key, declined)
        return None
    check_size(found.size, bucket.place.locator(key))
    return found


def read_document(bucket: BucketApi, key: str, attempts: int | None = None) -> tuple[bytes, str] | None:
    """A document and its tag; None if absent. Raises IntegrityError for one over 64 MiB."""
    data, tag = read_changed(bucket, key, "", attempts)
    _LAST_READ.pop((bucket, key), None)
    if data is None:
        return None
    if len(data) <= _REMEMBERED_BYTES:
        _LAST_READ[bucket, key] = data, tag
    with suppress(KeyError, StopIteration, RuntimeError):  # other threads change it too
        while len(_LAST_READ) > _REMEMBERED:
            del _LAST_READ[next(iter(_LAST_READ))]
    return data, tag


def _check_absent(bucket: BucketApi, key: str, declined: Declined) -> None:
    """Raise UnavailableError if that is not what the server says."""
    if declined.status != ABSENT:
        where = bucket.place.locator(key)
        raise UnavailableError(f"{where}: the server refuses with {declined}; look at the object") from declined


def tag_of(bucket: BucketApi, key: str, content: bytes) -> str | None:
    """The tag under which a document has had this content; None if it has another content now, or is absent.

    A document that was read just now is not read again: the write's condition makes the server check the tag.
    """
    found = _LAST_READ.get((bucket, key))
    if found is None or found[0] != content:
        found = read_document(bucket, key)
    return found[1] if found is not None and found[0] == content else None


def read_changed(bucket: BucketApi, key: str, tag: str, attempts: int | None = None) -> tuple[bytes | None, str]:
    """A document and its tag; (None, `tag`) if it still has that one, (None, '') if absent.

    tag: '' for a document that was not read before. Raises IntegrityError for a document over 64 MiB.
    """
    try:
        return ask(bucket, f"reading {key}", lambda: bucket.get(key, tag, MAX_DOCUMENT_BYTES), attempts)
    except Declined as declined:
        if declined.status == UNCHANGED:
            return None, tag
        if declined.status == TOO_LARGE:
            where = bucket.place.locator(key)
            raise IntegrityError(
                f"{where} is over {MAX_DOCUMENT_BYTES} bytes, which no document of a registry is"
            ) from declined
        _check_absent(bucket, key, declined)
        return None, ""


def stream_blob(bucket: BucketApi, key: str, sink: "BinaryIO | HashingSink", most: int = MAX_BLOB_BYTES) -> str:
    """Write an object's bytes to `sink` and return their SHA-256. most: bytes that are taken.

    Raises Declined (404) when it is absent, IntegrityError for more bytes, UnavailableError, and the sink's OSError.
    """
    start, furthest, waiting = sink.tell(), 0, pauses()
    sha, tag, buffer = hashlib.sha256(), "", memoryview(bytearray(CHUNK_BYTES))
    while True:
        have = sink.tell() - start
        try:
            tag, body = bucket.open_from(key, have, tag if have else "")
            with closing(body):
                while count := body.readinto(buffer):
                    if sink.tell() - start + count > most:
                        raise IntegrityError(f"{bucket.place.locator(key)} is over {most} bytes, which it cannot be")
                    sink.write(buffer[:count])
                    sha.update(buffer[:count])
            return sha.hexdigest()
        except Declined as declined:
            if not have or declined.status == ABSENT:
                raise
            # Another object by now (412), or a server without ranges (416): from the beginning.
            broken: Declined | Failed = declined
            sink.seek(start)
            sink.truncate()
            sha, tag = hashlib.sha256(), ""
        except Failed as failed:
            broken = failed
        if (came := sink.tell() - start) > furthest:
            furthest, waiting = came, pauses()
        wait(bucket, key, broken, next(waiting))


class HashingSink:
    """A sink that keeps no bytes: it counts them and, where the library is installed, digests them by BLAKE3."""

    def __init__(self) -> None:
        self._size, self._hasher = 0, new_blake3_hasher()

    @property
    def blake3(self) -> str | None:
        """The BLAKE3 of what was written; None without the library."""
        return None if self._hasher is None else self._hasher.hexdigest()

    def write(self, data: bytes | memoryview, /) -> int:
        """Digest and count the bytes."""
        if self._hasher is not None:
            self._hasher.update(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    def seek(self, offset: int, /) -> int:
        """Start again from the beginning, the only position to go back to."""
        self._size, self._hasher = offset, new_blake3_hasher()
        return offset

    def truncate(self) -> int:
        """Does nothing, as there is nothing to cut off."""
        return self._size


def wait(bucket: BucketApi, key: str, broken: Declined | Failed, pause: float | None) -> None:
    """Wait `pause` seconds before another attempt to read. Raises where `broken` is not worth one or none is left
    (pause: None)."""
    if isinstance(broken, Failed):
        refuse(bucket, f"reading {key}", broken, last=pause is None)
    elif pause is None:
        raise UnavailableError(f"{bucket.place.locator(key)} keeps changing while it is read; run again")
    time.sleep(pause or 0)


class Range:
    """`size` bytes of an object from `start` on, in order; not verified, which needs the whole object."""

    def __init__(self, bucket: BucketApi, key: str, start: int, size: int) -> None:
        self._bucket, self._key = bucket, key
        self._at, self._end = start, start + size
        self._body: Body | None = None
        self._furthest, self._waiting = start, pauses()

    def fill(self, into: memoryview) -> None:
        """Fill `into` with the next bytes. Raises Declined (404 absent, 416 it ends before, or this server has no
        ranges) and UnavailableError."""
        have = 0
        while have < len(into):
            try:
                if self._body is None:
                    self._body = self._bucket.open_range(self._key, self._at, self._end - self._at)
                count = self._body.readinto(into[have : have + _READ_BYTES])
            except Failed as failed:
                self.close()
                if self._at > self._furthest:
                    self._furthest, self._waiting = self._at, pauses()
                wait(self._bucket, self._key, failed, next(self._waiting))
            else:
                have += count
                self._at += count

    def close(self) -> None:
        """Release the connection, for reuse if the whole range was read."""
        if self._body is not None:
            self._body.close()
            self._body = None
