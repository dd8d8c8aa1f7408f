"""Reading from a bucket: whole documents; blobs as streams, digested on the way; and ranges of blobs.

A body that breaks off is resumed at that byte, and the pauses between attempts start anew whenever bytes arrived, so
that a bad network does not end a download that makes progress.
"""

import hashlib
import time
from contextlib import closing, suppress
from typing import BinaryIO

from enginesmith.core.errors import CHUNK_BYTES, IntegrityError, UnavailableError
from enginesmith.registry.store.files import new_blake3_hasher
from enginesmith.registry.store.layout import MAX_BLOB_BYTES, MAX_DOCUMENT_BYTES, check_size
from enginesmith.registry.store.objects import api

# The documents that were read last, with their tags: at most `_REMEMBERED`, each of at most `_REMEMBERED_BYTES`.
_LAST_READ: dict[tuple[api.BucketApi, str], tuple[bytes, str]] = {}
_REMEMBERED = 64
_REMEMBERED_BYTES = 1 << 20
_READ_BYTES = 1 << 20


def head(bucket: api.BucketApi, key: str) -> api.ObjectFacts | None:
    """An object's metadata; None if it is absent. Raises UnavailableError; IntegrityError for an impossible size."""
    try:
        attributes = api.ask(bucket, f"looking at {key}", lambda: bucket.head(key))
    except api.Declined as refusal:
        _check_absent(bucket, key, refusal)
        return None
    check_size(attributes.size, bucket.place.locator(key))
    return attributes


def read_document(bucket: api.BucketApi, key: str, attempts: int | None = None) -> tuple[bytes, str] | None:
    """A document and its tag; None if absent. Raises IntegrityError for a document over 64 MiB."""
    content, tag = read_changed(bucket, key, "", attempts)
    _LAST_READ.pop((bucket, key), None)
    if content is None:
        return None
    if len(content) <= _REMEMBERED_BYTES:
        _LAST_READ[bucket, key] = content, tag
    with suppress(KeyError, StopIteration, RuntimeError):  # other threads change it too
        while len(_LAST_READ) > _REMEMBERED:
            del _LAST_READ[next(iter(_LAST_READ))]
    return content, tag


def _check_absent(bucket: api.BucketApi, key: str, refusal: api.Declined) -> None:
    """Raise UnavailableError unless the refusal means that the object is absent."""
    if refusal.status != api.ABSENT:
        location = bucket.place.locator(key)
        raise UnavailableError(f"{location}: the server refuses with {refusal}; look at the object") from refusal


def tag_of(bucket: api.BucketApi, key: str, content: bytes) -> str | None:
    """The tag with which a document has this content; None if it has another content now, or is absent.

    A document that was just read is not read again: the write's condition makes the server check the tag.
    """
    document = _LAST_READ.get((bucket, key))
    if document is None or document[0] != content:
        document = read_document(bucket, key)
    return document[1] if document is not None and document[0] == content else None


def read_changed(bucket: api.BucketApi, key: str, tag: str, attempts: int | None = None) -> tuple[bytes | None, str]:
    """A document and its tag; (None, `tag`) if it still has that one, (None, '') if absent.

    tag: '' for a document that was not read before. Raises IntegrityError for a document over 64 MiB.
    """
    try:
        return api.ask(bucket, f"reading {key}", lambda: bucket.get(key, tag, MAX_DOCUMENT_BYTES), attempts)
    except api.Declined as refusal:
        if refusal.status == api.UNCHANGED:
            return None, tag
        if refusal.status == api.TOO_LARGE:
            location = bucket.place.locator(key)
            raise IntegrityError(f"{location} is over the limit of {MAX_DOCUMENT_BYTES} bytes") from refusal
        _check_absent(bucket, key, refusal)
        return None, ""


def stream_blob(
    bucket: api.BucketApi, key: str, sink: "BinaryIO | HashingSink", max_bytes: int = MAX_BLOB_BYTES
) -> str:
    """Write an object's bytes to `sink` and return their SHA-256. max_bytes: the maximum number of bytes.

    Raises Declined (404) if it is absent, IntegrityError for more bytes, UnavailableError, and the sink's OSError.
    """
    sink_offset, furthest_bytes, next_pauses = sink.tell(), 0, api.pauses(bucket.place.attempts)
    hasher, tag, buffer = hashlib.sha256(), "", memoryview(bytearray(CHUNK_BYTES))
    while True:
        written_bytes = sink.tell() - sink_offset
        try:
            tag, body = bucket.open_from(key, written_bytes, tag if written_bytes else "")
            with closing(body):
                while count := body.readinto(buffer):
                    if sink.tell() - sink_offset + count > max_bytes:
                        raise IntegrityError(f"{bucket.place.locator(key)} is over the limit of {max_bytes} bytes")
                    sink.write(buffer[:count])
                    hasher.update(buffer[:count])
            return hasher.hexdigest()
        except api.Declined as refusal:
            if not written_bytes or refusal.status == api.ABSENT:
                raise
            # Another object by now (412), or a server without ranges (416): from the beginning.
            cause: api.Declined | api.Failed = refusal
            sink.seek(sink_offset)
            sink.truncate()
            hasher, tag = hashlib.sha256(), ""
        except api.Failed as failure:
            cause = failure
        if (total_bytes := sink.tell() - sink_offset) > furthest_bytes:
            furthest_bytes, next_pauses = total_bytes, api.pauses(bucket.place.attempts)
        wait(bucket, key, cause, next(next_pauses))


class HashingSink:
    """A sink that stores no bytes: it counts them, and computes their BLAKE3."""

    def __init__(self) -> None:
        self._size, self._hasher = 0, new_blake3_hasher()

    @property
    def blake3(self) -> str:
        """The BLAKE3 of the written bytes."""
        return self._hasher.hexdigest()

    def write(self, data: bytes | memoryview, /) -> int:
        """Digest and count the bytes."""
        self._hasher.update(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """The number of bytes that were written."""
        return self._size

    def seek(self, offset: int, /) -> int:
        """Start again from the beginning, the only position that is supported."""
        self._size, self._hasher = offset, new_blake3_hasher()
        return offset

    def truncate(self) -> int:
        """Do nothing: no bytes are stored."""
        return self._size


def wait(bucket: api.BucketApi, key: str, broken: api.Declined | api.Failed, pause: float | None) -> None:
    """Wait `pause` seconds before another attempt to read. Raises UnavailableError after the last attempt (pause:
    None), and as `refuse` if another attempt cannot succeed."""
    if isinstance(broken, api.Failed):
        api.refuse(bucket, f"reading {key}", broken, last=pause is None)
    elif pause is None:
        raise UnavailableError(f"{bucket.place.locator(key)} keeps changing while it is read; run again")
    time.sleep(pause or 0)


class Range:
    """`size` bytes of an object from `start` on, in order; not verified, since the digest covers the whole object."""

    def __init__(self, bucket: api.BucketApi, key: str, offset: int, size: int) -> None:
        self._bucket, self._key = bucket, key
        self._at, self._end = offset, offset + size
        self._body: api.Body | None = None
        self._furthest, self._waiting = offset, api.pauses(bucket.place.attempts)

    def fill(self, into: memoryview) -> None:
        """Fill `into` with the next bytes. Raises Declined (404 absent, 416 the object ends earlier, or the server has
        no ranges) and UnavailableError."""
        filled_bytes = 0
        while filled_bytes < len(into):
            try:
                if self._body is None:
                    self._body = self._bucket.open_range(self._key, self._at, self._end - self._at)
                count = self._body.readinto(into[filled_bytes : filled_bytes + _READ_BYTES])
                if not count:
                    raise api.Failed("no complete answer; run again later", passing=True)
            except api.Failed as failure:
                self.close()
                if self._at > self._furthest:
                    self._furthest, self._waiting = self._at, api.pauses(self._bucket.place.attempts)
                wait(self._bucket, self._key, failure, next(self._waiting))
            else:
                filled_bytes += count
                self._at += count

    def close(self) -> None:
        """Release the connection, for reuse if the whole range was read."""
        if self._body is not None:
            self._body.close()
            self._body = None
