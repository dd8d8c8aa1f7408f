"""Listing a bucket: a request for each thousand names, whatever lies below them.

What writers that died left in a bucket: uploads that were never completed. They hold no name, and cost money.

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
from enginery.core.errors import UnavailableError
from enginery.core.parsing import find, read
from enginery.registry.store.layout import BLOBS
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.requests import Declined, ask, client, whole


def keys_below(place: S3Location, prefix: str) -> list[str]:
    """All keys under a prefix that ends in '/' or is empty, sorted part by part."""
    start = place.key(prefix)
    names = (read(item, "Key", str).removeprefix(place.key("")) for item in _items(place, "Contents", start))
    # A key that ends in '/' is what some tools write to show a folder that is empty.
    return sorted((name for name in names if not name.endswith("/")), key=lambda name: name.split("/"))


@dataclass(frozen=True)
class Object:
    """An object: its name below the place, its size in bytes, and a tag that changes when it does."""

    name: str
    size: int
    tag: str


def objects_below(place: S3Location) -> list[Object]:
    """Every object under a place's prefix, sorted by name, whoever put it there."""
    start = place.key("")
    found = (
        Object(read(item, "Key", str).removeprefix(start), read(item, "Size", int), read(item, "ETag", str))
        for item in _items(place, "Contents", start)
    )
    return sorted((item for item in found if item.name and not item.name.endswith("/")), key=lambda item: item.name)


def names_below(place: S3Location, prefix: str) -> list[str]:
    """The names directly under a prefix, sorted; those that have more below end in '/'."""
    start = place.key(prefix)
    found: set[str] = set()
    for page in _pages(place, start, Delimiter="/"):
        found.update(read(item, "Key", str).removeprefix(start) for item in find(page, "Contents", list, []))
        found.update(read(item, "Prefix", str).removeprefix(start) for item in find(page, "CommonPrefixes", list, []))
    return sorted(found - {""}, key=lambda name: name.removesuffix("/"))


def _items(place: S3Location, kind: str, start: str) -> Iterator[object]:
    return (item for page in _pages(place, start) for item in find(page, kind, list, []))


def _pages(place: S3Location, start: str, **how: str) -> Iterator[JsonObject]:
    after: dict[str, str] = {}
    while True:
        page: JsonObject = ask(
            place,
            "listing",
            lambda after=after: whole(  # type: ignore[misc]
                client(place).list_objects_v2(Bucket=place.bucket, Prefix=start, **how, **after), "IsTruncated"
            ),
        )
        yield page
        if not page.get("IsTruncated"):
            return
        after = {"ContinuationToken": read(page, "NextContinuationToken", str)}


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
