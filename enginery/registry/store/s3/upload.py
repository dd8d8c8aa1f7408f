"""Putting blobs: whole ones as one object, large ones in parts, complete or not at all, and never over a sound one.

Parts are 16 MiB (more above 156 GiB: S3 takes at most 10,000), all of one size but the last, so that a reader can ask
for ranges that are parts. Nothing is there before the upload is completed, and it is completed only when the bytes that
were sent have the digest that is their name.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from enginery.core.codec import JsonObject
from enginery.core.documents import read
from enginery.core.errors import EngineryError, IntegrityError, UnavailableError
from enginery.registry.store.keys import blob_key
from enginery.registry.store.s3.client import client
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.reading import CountingSink, ObjectFacts, head, stream_blob
from enginery.registry.store.s3.retries import FAILURES, Declined, ask, pauses, refuse, whole
from enginery.registry.store.s3.writing import ABSENT, match_etag, md5_of, put_once

PART_BYTES = 16 << 20
MAX_PARTS = 10_000
# Parts on their way at once; the memory for it is this many parts and one.
AT_ONCE = 4


@dataclass(frozen=True)
class UploadSource:
    """Bytes to put: a seekable stream from its beginning, their size and their digest."""

    stream: BinaryIO
    size: int
    digest: str

    @property
    def part_bytes(self) -> int:
        """Size of the parts."""
        size = PART_BYTES
        while size * MAX_PARTS < self.size:
            size *= 2
        return size

    def parts(self) -> Iterator[bytes]:
        """All parts, in order."""
        self.stream.seek(0)
        while part := self.stream.read(self.part_bytes):
            yield part

    def etag(self) -> str:
        """The ETag that S3 gives to an object of these bytes, put as `put` does, unless it is encrypted with KMS."""
        if self.size <= self.part_bytes:
            self.stream.seek(0)
            return f'"{hashlib.md5(self.stream.read(), usedforsecurity=False).hexdigest()}"'
        sums = [hashlib.md5(part, usedforsecurity=False).digest() for part in self.parts()]
        return f'"{hashlib.md5(b"".join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"'


def put(place: S3Location, source: UploadSource) -> None:
    """Make sure that the blob is there and sound; nothing is sent if it is. Raises UnavailableError, and IntegrityError
    when the source changes meanwhile."""
    key = blob_key(source.digest)
    for pause in pauses():
        found = head(place, key)
        if found is not None and _is_sound(place, key, found, source):
            return
        try:
            _send(place, key, source, ABSENT if found is None else match_etag(found.etag))
            return
        except Declined:
            # Somebody else put it, or swept this upload away, or the answer to this very upload was lost: look again.
            if pause is None:
                raise UnavailableError(f"{place.locator(key)} keeps changing while it is written; run again") from None
        except FAILURES as error:
            refuse(place, f"writing {key}", error, last=pause is None)
        time.sleep(pause or 0)


def _is_sound(place: S3Location, key: str, found: ObjectFacts, source: UploadSource) -> bool:
    """Whether the object there has these bytes. Its ETag tells, if it was put as this module does; else it is read."""
    if found.size != source.size:
        return False
    if found.etag == source.etag():
        return True
    if "-" not in found.etag and not found.encryption.startswith("aws:kms"):
        return False  # the MD5 of other bytes
    with suppress(Declined):
        return stream_blob(place, key, CountingSink()) == source.digest
    return False


def _send(place: S3Location, key: str, source: UploadSource, condition: dict[str, str]) -> None:
    if source.size > source.part_bytes:
        _send_parts(place, key, source, condition)
        return
    source.stream.seek(0)
    data = source.stream.read()
    _check(source, hashlib.sha256(data).hexdigest())
    put_once(place, key, data, condition)


def _send_parts(place: S3Location, key: str, source: UploadSource, condition: dict[str, str]) -> None:
    """A multipart upload, which is aborted unless it is completed. Raises Declined."""
    where = {"Bucket": place.bucket, "Key": place.key(key)}
    begun = ask(
        place,
        f"writing {key}",
        lambda: whole(client(place).create_multipart_upload(**where, **place.encryption()), "UploadId"),
    )
    upload = {**where, "UploadId": read(begun, "UploadId", str)}
    try:
        parts = _upload_parts(place, upload, source)
        _complete(place, key, {**upload, "MultipartUpload": {"Parts": parts}, **condition})
    except BaseException:
        # Whatever ended it; what cannot be aborted now is found by `strays` later.
        with suppress(EngineryError, Declined):
            ask(place, f"aborting {key}", lambda: client(place).abort_multipart_upload(**upload), attempts=3)
        raise


def _upload_parts(place: S3Location, upload: dict[str, str], source: UploadSource) -> list[dict[str, str | int]]:
    sha = hashlib.sha256()
    running: deque[Future[str]] = deque()
    etags: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for number, part in enumerate(source.parts(), 1):
                sha.update(part)
                running.append(pool.submit(_upload_part, place, upload, number, part))
                if len(running) == AT_ONCE:
                    etags.append(running.popleft().result())
            etags.extend(future.result() for future in running)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _check(source, sha.hexdigest())
    return [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]


def _upload_part(place: S3Location, upload: dict[str, str], number: int, data: bytes) -> str:
    def send() -> str:
        part = {**upload, "PartNumber": number, "Body": data, "ContentMD5": md5_of(data)}
        return read(whole(client(place).upload_part(**part), "ETag"), "ETag", str)

    return ask(place, f"writing part {number} of {upload.get('Key')}", send)


def _complete(place: S3Location, key: str, request: JsonObject) -> None:
    """Sending it twice is safe: an upload that was completed is gone, which the server declines (404)."""
    ask(place, f"completing {key}", lambda: whole(client(place).complete_multipart_upload(**request), "ETag"))


def _check(source: UploadSource, found: str) -> None:
    if found != source.digest:
        raise IntegrityError(
            f"blob {source.digest} changed while it was uploaded (its digest is {found} now); nothing was stored: "
            "run again"
        )
