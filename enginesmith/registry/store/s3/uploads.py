"""Multipart uploads to S3, and those that were never completed.

Unfinished uploads are left by writers that died; they have no key, and cost money. No server tells whether an upload is
still being written, so one counts as abandoned a day after it began, by the server's clock; a writer that takes longer
finds its upload gone, and begins again. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) does the same.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Protocol

from enginesmith.core.constraints import JsonObject
from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.core.parsing import find, read
from enginesmith.registry.store.layout import BLOBS
from enginesmith.registry.store.objects.api import BucketApi, Declined
from enginesmith.registry.store.objects.attempts import ask
from enginesmith.registry.store.objects.source import UploadSource, md5_of, send_parts
from enginesmith.registry.store.s3.place import S3Location
from enginesmith.registry.store.s3.requests import answers, client, whole

LEFT_AFTER = timedelta(days=1)


class _Bucket(BucketApi, Protocol):
    """A bucket of S3."""

    @property
    def place(self) -> S3Location: ...


def condition_of(expected: str | None) -> dict[str, str]:
    """The condition that an object has this ETag, or (None) is absent."""
    return {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}


def parts_etag(source: UploadSource) -> str:
    """The ETag that S3 gives to an object of these bytes, put as `put` or `send` does, unless it is encrypted with
    KMS."""
    sums = [hashlib.md5(part, usedforsecurity=False).digest() for part in source.parts()]
    if source.small:
        return f'"{(sums or [hashlib.md5(usedforsecurity=False).digest()])[0].hex()}"'
    return f'"{hashlib.md5(b"".join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"'


def send(bucket: _Bucket, key: str, source: UploadSource, expected: str | None) -> None:
    """A multipart upload, which is aborted unless it is completed. Raises Declined."""
    where = {"Bucket": bucket.place.bucket, "Key": bucket.place.key(key)}
    begun = _ask(bucket, f"writing {key}", "create_multipart_upload", "UploadId", where | bucket.place.encryption())
    upload = {**where, "UploadId": read(begun, "UploadId", str)}

    def send_part(number: int, data: bytes) -> dict[str, str | int]:
        part = {**upload, "PartNumber": number, "Body": data, "ContentMD5": md5_of(data)}
        found = _ask(bucket, f"writing part {number} of {where['Key']}", "upload_part", "ETag", part)
        return {"PartNumber": number, "ETag": read(found, "ETag", str)}

    try:
        parts = send_parts(source, send_part)
        request = {**upload, "MultipartUpload": {"Parts": parts}, **condition_of(expected)}
        # Sent twice it does no harm: a completed upload is gone, which the server declines (404).
        _ask(bucket, f"completing {key}", "complete_multipart_upload", "ETag", request)
    except BaseException:
        # After an interrupt too. An upload that cannot be aborted now is found by `list_abandoned` later.
        with suppress(EnginesmithError, Declined):
            _ask(bucket, f"aborting {key}", "abort_multipart_upload", "", upload, attempts=3)
        raise


def _ask(
    bucket: _Bucket, doing: str, request: str, needed: str, asked: Mapping[str, object], attempts: int | None = None
) -> JsonObject:
    """Send a request of boto3's client by its name, whose answer must have the field `needed`, until it is answered."""

    def send() -> JsonObject:
        with answers(bucket.place):
            answer: JsonObject = getattr(client(bucket.place), request)(**asked)
            return whole(answer, *([needed] if needed else []))

    return ask(bucket, doing, send, attempts)


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed: its key in the bucket, and its id."""

    key: str
    upload_id: str

    def __str__(self) -> str:
        return f"unfinished upload of {self.key}"


def list_abandoned(bucket: _Bucket) -> tuple[Upload, ...]:
    """Uploads of blobs that began over a day ago. Raises UnavailableError."""
    return tuple(_find_abandoned(bucket))


def abort_abandoned(bucket: _Bucket) -> int:
    """Abort these uploads, and return how many; 0 where that is not allowed, or the server lacks the request."""
    count = 0
    with suppress(UnavailableError):
        for upload in _find_abandoned(bucket):
            asked = {"Bucket": bucket.place.bucket, "Key": upload.key, "UploadId": upload.upload_id}
            with suppress(Declined):
                _ask(bucket, f"aborting {upload}", "abort_multipart_upload", "", asked)
                count += 1
    return count


def _find_abandoned(bucket: _Bucket) -> Iterator[Upload]:
    asked = {"Bucket": bucket.place.bucket, "Prefix": bucket.place.key(BLOBS)}
    marker: dict[str, str] = {}
    while True:
        page = _ask(bucket, "listing uploads", "list_multipart_uploads", "IsTruncated", asked | marker)
        # The server's clock, which also dated the uploads: this machine's may be wrong.
        stated = find(page, "ResponseMetadata.HTTPHeaders.date", str, None)
        now = parsedate_to_datetime(stated) if stated else datetime.now(UTC)
        for item in find(page, "Uploads", list, []):
            if now - read(item, "Initiated", datetime) > LEFT_AFTER:
                yield Upload(read(item, "Key", str), read(item, "UploadId", str))
        if not page.get("IsTruncated"):
            return
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        marker = {name: read(page, where, str) for name, where in following.items()}
