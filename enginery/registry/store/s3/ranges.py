"""Reading a range of an object into memory that the caller has: what a download by many connections is made of."""

import re
from http.client import HTTPException, HTTPResponse
from typing import Any

from botocore import exceptions as aws
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from enginery.core.documents import find, read
from enginery.registry.store.s3.client import client
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.reading import wait
from enginery.registry.store.s3.retries import FAILURES, Declined, pauses, raise_if_declined

_PARTIAL = 206
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/")
_READ_BYTES = 1 << 20


class Range:
    """`size` bytes of an object from `start` on, in order. A body that breaks off is resumed at that byte.

    The pauses start anew whenever it came further. Not verified: that needs the whole object.
    """

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
        """Let go of the connection: for others to use, if all came."""
        if self._body is not None:
            if self._at == self._end:
                self._body.release_conn()
            self._body.close()
            self._body = None


def _some(body: Any, into: memoryview) -> int:
    """Read into `into`; how many bytes came, which are fewer only where the body ends.

    From the response below urllib3's, whose `readinto` makes a copy of everything: a sixth of a download's CPU time.
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
    try:
        answer = client(place).get_object(**asked)
    except aws.ClientError as error:
        raise_if_declined(error)
        raise
    # All of a small object, from a server that has no ranges, is that range too.
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
    # What was cut off among the headers is another range, or none; it is worth another attempt.
    raise aws.IncompleteReadError(actual_bytes=0, expected_bytes=length)


def _beneath(body: Any) -> Any:
    """urllib3's response, which botocore gives out so."""
    return body.__enter__()
