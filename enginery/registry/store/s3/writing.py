"""Writing to a bucket: conditional writes of objects, and uploads of blobs.

**Conditional writes.** A write requires that the object is absent, or still the one that was read. Its response can be
lost after the server did it; sent again, it meets its own object and is refused (412). So every write carries a token
in the object's metadata, by which the writer knows its own object. Some servers answer 200 to `If-None-Match: *` and
overwrite, so that of two publishers of one version both succeed, and one version is lost. So before the first write of
a process `require_conditional_writes` writes the marker again, with the bytes that it has and a condition that does not
hold: the content stays the same whatever the server does.

**Blobs.** Small ones are one object; large ones are uploaded in parts of 16 MiB (larger above 156 GiB: S3 takes at most
10,000), all of one size but the last, so that a reader can ask for ranges that are parts. No object exists before its
upload is completed, which happens only when the bytes that were sent have the blob's digest. A sound blob is never
overwritten.
"""

import base64
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

from botocore import exceptions as aws

from enginery.core.errors import EngineryError, InputError, IntegrityError, UnavailableError, UndecidedError
from enginery.core.parsing import read
from enginery.registry.store.files import BlobDigest
from enginery.registry.store.layout import MARKER, blob_key
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.reading import HashingSink, ObjectFacts, head, read_document, stream_blob
from enginery.registry.store.s3.requests import (
    FAILURES,
    Declined,
    ask,
    client,
    code_of,
    pauses,
    raise_if_declined,
    refuse,
    whole,
)

PART_BYTES = 16 << 20
MAX_PARTS = 10_000
# Parts that are uploaded at the same time; they and one more are in memory.
AT_ONCE = 4

TOKEN = "enginery-write"  # noqa: S105 - the name of a header
ABSENT = {"IfNoneMatch": "*"}
# The ETag of an MD5 of zeros, which no object has.
_IMPOSSIBLE_ETAG = f'"{"0" * 32}"'


def match_etag(etag: str) -> dict[str, str]:
    """The condition that an object still is the one with this ETag."""
    return {"IfMatch": etag}


def md5_of(data: bytes) -> str:
    """MD5 in base64, for the header Content-MD5: the server refuses other bytes (BadDigest)."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def write(place: S3Location, key: str, data: bytes, condition: dict[str, str]) -> bool:
    """Put an object if the condition holds, and return whether this call did.

    Raises UnavailableError, and UndecidedError when the response was lost and another object is there by now.
    """
    token, unsure = secrets.token_hex(16), False
    for pause in pauses():
        try:
            put_once(place, key, data, condition, token)
            return True
        except Declined as declined:
            if declined.status != 409:  # 409: this write was not done because of a concurrent one
                return unsure and _was_done(place, key, token)
            if pause is None:
                return False
        except FAILURES as error:
            refuse(place, f"writing {key}", error, last=pause is None)
            unsure = True
        time.sleep(pause or 0)
    raise AssertionError("unreachable")


def put_once(place: S3Location, key: str, data: bytes, condition: dict[str, str], token: str = "") -> None:
    """One PUT, not repeated. Raises Declined and botocore's errors."""
    try:
        client(place).put_object(
            Bucket=place.bucket,
            Key=place.key(key),
            Body=data,
            ContentMD5=md5_of(data),
            Metadata={TOKEN: token} if token else {},
            **place.encryption(),
            **condition,
        )
    except aws.ClientError as error:
        raise_if_declined(error)
        raise


def _was_done(place: S3Location, key: str, token: str) -> bool:
    """True if the stored object has this token. Raises UndecidedError."""
    found = head(place, key)
    if found is not None and found.metadata.get(TOKEN) == token:
        return True
    raise UndecidedError(
        f"writing {key} in {place.locator('')}: the answer was lost, and somebody else's is there by now; "
        "look at it, then run again"
    )


@lru_cache(maxsize=64)
def require_conditional_writes(place: S3Location) -> None:
    """Raise InputError for a server that ignores conditional writes; asked once per process and place.

    Raises UnavailableError when there is no registry, or it cannot be written.
    """
    marker = read_document(place, MARKER)
    if marker is None:
        raise UnavailableError(f"there is no registry at {place.locator('')}; `enginery build` makes one")
    for header, condition in (("If-None-Match: *", ABSENT), ("If-Match", match_etag(_IMPOSSIBLE_ETAG))):
        if not _honours_condition(place, marker[0], condition):
            raise InputError(
                f"the S3 server of {place.locator('')} ignores conditional writes: it took a PUT with {header} that it "
                "had to refuse, so two publishers could overwrite each other. It can be read and not published to; "
                "use Amazon S3, a server with conditional writes (docs/concepts/registry.md), or a file:// registry"
            )


def _honours_condition(place: S3Location, marker: bytes, condition: dict[str, str]) -> bool:
    for pause in pauses():
        try:
            put_once(place, MARKER, marker, condition)
            return False
        except Declined as declined:
            if declined.status != 409 or pause is None:
                return True
        except FAILURES as error:
            if code_of(error) == "NotImplemented":
                return False
            refuse(place, "asking for conditional writes", error, last=pause is None)
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class UploadSource:
    """Bytes to put: a seekable stream from its beginning, their size and their digests."""

    stream: BinaryIO
    size: int
    blob: BlobDigest

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
    """Upload a blob unless it is stored and sound. Raises UnavailableError, and IntegrityError when the source changes
    meanwhile."""
    key = blob_key(source.blob.digest)
    for pause in pauses():
        found = head(place, key)
        if found is not None and _is_sound(place, key, found, source):
            return
        try:
            _send(place, key, source, ABSENT if found is None else match_etag(found.etag))
            return
        except Declined:
            # Another writer put it or aborted this upload, or the response to this upload was lost: look again.
            if pause is None:
                raise UnavailableError(f"{place.locator(key)} keeps changing while it is written; run again") from None
        except FAILURES as error:
            refuse(place, f"writing {key}", error, last=pause is None)
        time.sleep(pause or 0)


def _is_sound(place: S3Location, key: str, found: ObjectFacts, source: UploadSource) -> bool:
    """Whether the object has the source's bytes: by its ETag, if it was put as this module does, else by reading it."""
    if found.size != source.size:
        return False
    if found.etag == source.etag():
        return True
    if "-" not in found.etag and not found.encryption.startswith("aws:kms"):
        return False  # the MD5 of other bytes
    with suppress(Declined):
        return stream_blob(place, key, HashingSink()) == source.blob.digest
    return False


def _send(place: S3Location, key: str, source: UploadSource, condition: dict[str, str]) -> None:
    if source.size > source.part_bytes:
        _send_parts(place, key, source, condition)
        return
    source.stream.seek(0)
    data = source.stream.read()
    hasher = source.blob.hasher()
    hasher.update(data)
    _check(source, hasher.hexdigest())
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
        request = {**upload, "MultipartUpload": {"Parts": parts}, **condition}
        # Sent twice it does no harm: a completed upload is gone, which the server declines (404).
        ask(place, f"completing {key}", lambda: whole(client(place).complete_multipart_upload(**request), "ETag"))
    except BaseException:
        # After an interrupt too. An upload that cannot be aborted now is found by `listing.list_abandoned` later.
        with suppress(EngineryError, Declined):
            ask(place, f"aborting {key}", lambda: client(place).abort_multipart_upload(**upload), attempts=3)
        raise


def _upload_parts(place: S3Location, upload: dict[str, str], source: UploadSource) -> list[dict[str, str | int]]:
    hasher = source.blob.hasher()
    running: deque[Future[str]] = deque()
    etags: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for number, part in enumerate(source.parts(), 1):
                hasher.update(part)
                running.append(pool.submit(_upload_part, place, upload, number, part))
                if len(running) == AT_ONCE:
                    etags.append(running.popleft().result())
            etags.extend(future.result() for future in running)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _check(source, hasher.hexdigest())
    return [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]


def _upload_part(place: S3Location, upload: dict[str, str], number: int, data: bytes) -> str:
    def send() -> str:
        part = {**upload, "PartNumber": number, "Body": data, "ContentMD5": md5_of(data)}
        return read(whole(client(place).upload_part(**part), "ETag"), "ETag", str)

    return ask(place, f"writing part {number} of {upload.get('Key')}", send)


def _check(source: UploadSource, found: str) -> None:
    if found != source.blob.expected:
        raise IntegrityError(
            f"blob {source.blob.digest} changed while it was uploaded (its {source.blob.algorithm} is another now); "
            "nothing was stored: run again"
        )
