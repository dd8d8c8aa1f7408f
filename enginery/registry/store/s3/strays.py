"""What writers that died left in a bucket: uploads that were never completed. They hold no name, and cost money.

No server tells whether somebody still writes to an upload. So one counts as left behind a day after it began, by the
server's own clock; a writer that took longer would find its upload gone, and begin again. A lifecycle rule of the
bucket (AbortIncompleteMultipartUpload) does the same without Enginery.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from enginery.core.codec import JsonObject
from enginery.core.documents import find, read
from enginery.core.errors import UnavailableError
from enginery.registry.store.keys import BLOBS
from enginery.registry.store.s3.client import client
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.retries import Declined, ask, whole

LEFT_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed: of which key of the bucket, and its id."""

    key: str
    upload_id: str

    def __str__(self) -> str:
        return f"unfinished upload of {self.key}"


def list_abandoned(place: S3Location) -> tuple[Upload, ...]:
    """Uploads of blobs that began over a day ago. Raises UnavailableError."""
    return tuple(_find_abandoned(place))


def abort_abandoned(place: S3Location) -> int:
    """Abort them; how many. Someone who may not, or a server without the request, cleans nothing."""
    count = 0
    with suppress(UnavailableError):
        for upload in _find_abandoned(place):
            with suppress(Declined):
                ask(place, f"aborting {upload}", lambda upload=upload: _abort(place, upload))  # type: ignore[misc]
                count += 1
    return count


def _abort(place: S3Location, upload: Upload) -> None:
    client(place).abort_multipart_upload(Bucket=place.bucket, Key=upload.key, UploadId=upload.upload_id)


def _find_abandoned(place: S3Location) -> Iterator[Upload]:
    marker: dict[str, str] = {}
    while True:
        page = ask(
            place,
            "listing uploads",
            lambda marker=marker: whole(  # type: ignore[misc]
                client(place).list_multipart_uploads(Bucket=place.bucket, Prefix=place.key(BLOBS), **marker),
                "IsTruncated",
            ),
        )
        now = _now(page)
        for item in find(page, "Uploads", list, []):
            if now - read(item, "Initiated", datetime) > LEFT_AFTER:
                yield Upload(read(item, "Key", str), read(item, "UploadId", str))
        if not page.get("IsTruncated"):
            return
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        marker = {name: read(page, where, str) for name, where in following.items()}


def _now(page: JsonObject) -> datetime:
    """The server's clock, which also dated the uploads; this machine's may be wrong."""
    stated = find(page, "ResponseMetadata.HTTPHeaders.date", str, None)
    return parsedate_to_datetime(stated) if stated else datetime.now(UTC)
