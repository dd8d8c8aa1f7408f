"""Reading from a bucket: whole documents; blobs as streams, digested on the way; and ranges of blobs.

A body that breaks off is resumed at that byte, and the pauses between attempts start anew whenever bytes came, so that
a bad network ends nothing while bytes move.
"""

import hashlib
import re
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO

from botocore import exceptions as aws
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from enginery.core.digest import CHUNK_BYTES
from enginery.core.errors import IntegrityError, UnavailableError
from enginery.core.parsing import find, read
from enginery.registry.store.files import new_blake3_hasher
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.requests import (
    FAILURES,
    Declined,
    ask,
    client,
    pauses,
    raise_if_declined,
    refuse,
    whole,
)

MAX_DOCUMENT_BYTES = 64 << 20

_FACTS = ("ContentLength", "ETag")
# The documents that were read last, with their ETags: at most `_REMEMBERED`, each of at most `_REMEMBERED_BYTES`.
_LAST_READ: dict[tuple[S3Location, str], tuple[bytes, str]] = {}
_REMEMBERED = 64
_REMEMBERED_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_PARTIAL = 206
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/")


@dataclass(frozen=True)
class ObjectFacts:
    """An object's metadata from a HEAD request. size: in bytes.  encryption: '' for none."""

    size: int
    etag: str
    encryption: str
    metadata: Mapping[str, str]


def head(place: S3Location, key: str) -> ObjectFacts | None:
    """An object's metadata; None if it is absent. Raises UnavailableError."""
    try:
        found = ask(
            place,
            f"looking at {key}",
            lambda: whole(client(place).head_object(Bucket=place.bucket, Key=place.key(key)), *_FACTS),
        )
    except Declined as declined:
        _check_absent(place, key, declined)
        return None
    return ObjectFacts(
        size=read(found, "ContentLength", int),
        etag=read(found, "ETag", str),
        encryption=find(found, "ServerSideEncryption", str, ""),
        metadata=find(found, "Metadata", dict, {}),
    )


def read_document(place: S3Location, key: str, attempts: int | None = None) -> tuple[bytes, str] | None:
    """A document and its ETag; None if absent. Raises IntegrityError for one over 64 MiB."""
    data, etag = read_changed(place, key, "", attempts)
    _LAST_READ.pop((place, key), None)
    if data is None:
        return None
    if len(data) <= _REMEMBERED_BYTES:
        _LAST_READ[place, key] = data, etag
    with suppress(KeyError, StopIteration, RuntimeError):  # other threads change it too
        while len(_LAST_READ) > _REMEMBERED:
            del _LAST_READ[next(iter(_LAST_READ))]
    return data, etag


def _check_absent(place: S3Location, key: str, declined: Declined) -> None:
    """Raise UnavailableError if that is not what the server says."""
    if declined.status != 404:
        where = place.locator(key)
        raise UnavailableError(f"{where}: the server refuses with {declined}; look at the object") from declined


def etag_of(place: S3Location, key: str, content: bytes) -> str | None:
    """The ETag under which a document has had this content; None if it has another content now, or is absent.

    A document that was read just now is not read again: the write's condition makes the server check the ETag.
    """
    found = _LAST_READ.get((place, key))
    if found is None or found[0] != content:
        found = read_document(place, key)
    return found[1] if found is not None and found[0] == content else None


def read_changed(place: S3Location, key: str, etag: str, attempts: int | None = None) -> tuple[bytes | None, str]:
    """A document and its ETag; (None, `etag`) if it still has that one (304), (None, '') if absent.

    etag: '' for a document that was not read before. Raises IntegrityError for a document over 64 MiB.
    """
    unless = {"IfNoneMatch": etag} if etag else {}

    def send() -> tuple[bytes, str]:
        answer = whole(client(place).get_object(Bucket=place.bucket, Key=place.key(key), **unless), *_FACTS)
        with closing(read(answer, "Body", StreamingBody)) as body:
            if read(answer, "ContentLength", int) > MAX_DOCUMENT_BYTES:
                where = place.locator(key)
                raise IntegrityError(f"{where} is over {MAX_DOCUMENT_BYTES} bytes, which no document of a registry is")
            return body.read(), read(answer, "ETag", str)

    try:
        return ask(place, f"reading {key}", send, attempts)
    except Declined as declined:
        if declined.status == 304:
            return None, etag
        _check_absent(place, key, declined)
        return None, ""


def stream_blob(place: S3Location, key: str, sink: "BinaryIO | HashingSink") -> str:
    """Write an object's bytes to `sink` and return their SHA-256.

    Raises Declined (404) when it is absent, UnavailableError, and the sink's OSError.
    """
    start, furthest, waiting = sink.tell(), 0, pauses()
    sha, etag = hashlib.sha256(), ""
    while True:
        have = sink.tell() - start
        try:
            etag, body = _open_from(place, key, have, etag)
            # Not `with body`, which gives the stream beneath: that one does not check the number of bytes.
            with closing(body):
                while block := body.read(CHUNK_BYTES):
                    sink.write(block)
                    sha.update(block)
            return sha.hexdigest()
        except Declined as declined:
            if not have or declined.status == 404:
                raise
            # Another object by now (412), or a server without ranges (416): from the beginning.
            broken: Exception = declined
            sink.seek(start)
            sink.truncate()
            sha, etag = hashlib.sha256(), ""
        except FAILURES as error:
            broken = error
        if (came := sink.tell() - start) > furthest:
            furthest, waiting = came, pauses()
        wait(place, key, broken, next(waiting))


class HashingSink:
    """A sink that keeps no bytes: it counts them and, where the library is installed, digests them by BLAKE3."""

    def __init__(self) -> None:
        self._size, self._hasher = 0, new_blake3_hasher()

    @property
    def blake3(self) -> str | None:
        """The BLAKE3 of what was written; None without the library."""
        return None if self._hasher is None else self._hasher.hexdigest()

    def write(self, data: bytes, /) -> int:
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


def wait(place: S3Location, key: str, broken: Exception, pause: float | None) -> None:
    """Wait `pause` seconds before another attempt to read. Raises where `broken` is not worth one or none is left
    (pause: None)."""
    if not isinstance(broken, Declined):
        refuse(place, f"reading {key}", broken, last=pause is None)
    elif pause is None:
        raise UnavailableError(f"{place.locator(key)} keeps changing while it is read; run again")
    time.sleep(pause or 0)


def _open_from(place: S3Location, key: str, have: int, etag: str) -> tuple[str, StreamingBody]:
    """The object's ETag, and its body from byte `have` on. Raises Declined when it is not the same object any more."""
    wanted = {"Range": f"bytes={have}-", "IfMatch": etag} if have else {}
    try:
        answer = whole(client(place).get_object(Bucket=place.bucket, Key=place.key(key), **wanted), *_FACTS)
    except aws.ClientError as error:
        raise_if_declined(error)
        raise
    body = read(answer, "Body", StreamingBody)
    if have and not find(answer, "ContentRange", str, "").startswith(f"bytes {have}-"):
        body.close()
        raise Declined(416, "no range")
    return read(answer, "ETag", str), body


class Range:
    """`size` bytes of an object from `start` on, in order; not verified, which needs the whole object."""

    def __init__(self, place: S3Location, key: str, start: int, size: int) -> None:
        self._place, self._key = place, key
        self._at, self._end = start, start + size
        self._body: Any = None
        self._furthest, self._waiting = start, pauses()

    def fill(self, into: memoryview) -> None:
        """Fill `into` with the next bytes. Raises Declined (404 absent, 416 it ends before, or this server has no
        ranges) and UnavailableError."""
        have = 0
        while have < len(into):
            try:
                if self._body is None:
                    self._body = _open_range(self._place, self._key, self._at, self._end - self._at)
                count = _some(self._body, into[have : have + _READ_BYTES])
            except FAILURES as error:
                self.close()
                if self._at > self._furthest:
                    self._furthest, self._waiting = self._at, pauses()
                wait(self._place, self._key, error, next(self._waiting))
            else:
                have += count
                self._at += count

    def close(self) -> None:
        """Release the connection, for reuse if the whole range was read."""
        if self._body is not None:
            if self._at == self._end:
                self._body.release_conn()
            self._body.close()
            self._body = None


def _some(body: Any, into: memoryview) -> int:
    """Read into `into`, and return how many bytes were read; fewer only where the body ends.

    From the response below urllib3's, whose `readinto` copies everything once more: a sixth of a download's CPU time.
    """
    plain = getattr(body, "_fp", None)
    try:
        count: int = plain.readinto(into) if isinstance(plain, HTTPResponse) else body.readinto(into)
    except (OSError, HTTPException, HTTPError) as error:
        raise aws.ResponseStreamingError(error=error) from error
    if not count:
        raise aws.IncompleteReadError(actual_bytes=0, expected_bytes=len(into))
    return count


def _open_range(place: S3Location, key: str, start: int, length: int) -> Any:
    """The body of exactly that range. Raises Declined (416) if it ends before, or the server has no ranges."""
    last = start + length - 1
    asked = {"Bucket": place.bucket, "Key": place.key(key), "Range": f"bytes={start}-{last}"}
    answer = client(place).get_object(**asked)
    # From a server without ranges, the whole of a small object may be that range.
    body = read(answer, "Body", StreamingBody)
    if read(answer, "ResponseMetadata.HTTPStatusCode", int) != _PARTIAL:
        if start == 0 and answer.get("ContentLength") == length:
            return _beneath(body)
        body.close()
        raise Declined(416, "no ranges")
    found = _RANGE.match(find(answer, "ContentRange", str, ""))
    if found and (int(found[1]), int(found[2])) == (start, last):
        return _beneath(body)
    body.close()
    if found and int(found[1]) == start and int(found[2]) < last:
        raise Declined(416, "it ends before")
    # Headers that were cut off have another range, or none: worth another attempt.
    raise aws.IncompleteReadError(actual_bytes=0, expected_bytes=length)


def _beneath(body: Any) -> Any:
    """urllib3's response beneath botocore's body."""
    return body.__enter__()
