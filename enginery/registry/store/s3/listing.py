"""Lists what is in a bucket: keys, a request for each thousand of them; and uploads that were never completed.

Unfinished uploads are left by writers that died; they have no key, and cost money. No server tells whether an upload is
still being written, so one counts as abandoned a day after it began, by the server's clock; a writer that takes longer
finds its upload gone, and begins again. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) does the same.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial

from enginery.core.codec import JsonObject
from enginery.core.errors import UnavailableError
from enginery.core.parsing import find, read
from enginery.registry.store.layout import BLOBS
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.requests import Declined, ask, client, whole

LEFT_AFTER = timedelta(days=1)


def keys_below(place: S3Location, prefix: str) -> list[str]:
    """All keys under a prefix that ends in '/' or is empty, sorted part by part."""
    start = place.key(prefix)
    names = (read(item, "Key", str).removeprefix(place.key("")) for item in _items(place, start))
    # Some tools write a key that ends in '/' for an empty folder.
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
        for item in _items(place, start)
    )
    return sorted((item for item in found if item.name and not item.name.endswith("/")), key=lambda item: item.name)


def sizes_below(place: S3Location, prefix: str) -> Iterator[tuple[str, int]]:
    """Each key under a prefix that ends in '/', with its size in bytes."""
    start = place.key("")
    for item in _items(place, place.key(prefix)):
        yield read(item, "Key", str).removeprefix(start), read(item, "Size", int)


def names_below(place: S3Location, prefix: str) -> list[str]:
    """The names directly under a prefix, sorted; those that have more below end in '/'."""
    start = place.key(prefix)
    found: set[str] = set()
    for page in _pages(place, start, Delimiter="/"):
        found.update(read(item, "Key", str).removeprefix(start) for item in find(page, "Contents", list, []))
        found.update(read(item, "Prefix", str).removeprefix(start) for item in find(page, "CommonPrefixes", list, []))
    return sorted(found - {""}, key=lambda name: name.removesuffix("/"))


def _items(place: S3Location, start: str) -> Iterator[object]:
    return (item for page in _pages(place, start) for item in find(page, "Contents", list, []))


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


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed: its key in the bucket, and its id."""

    key: str
    upload_id: str

    def __str__(self) -> str:
        return f"unfinished upload of {self.key}"


def list_abandoned(place: S3Location) -> tuple[Upload, ...]:
    """Uploads of blobs that began over a day ago. Raises UnavailableError."""
    return tuple(_find_abandoned(place))


def abort_abandoned(place: S3Location) -> int:
    """Abort these uploads, and return how many; 0 where that is not allowed, or the server lacks the request."""
    count = 0
    with suppress(UnavailableError):
        for upload in _find_abandoned(place):
            asked = {"Bucket": place.bucket, "Key": upload.key, "UploadId": upload.upload_id}
            with suppress(Declined):
                ask(place, f"aborting {upload}", partial(client(place).abort_multipart_upload, **asked))
                count += 1
    return count


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
