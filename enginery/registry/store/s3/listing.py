"""Listing a bucket: a request for each thousand names, whatever lies below them."""

from collections.abc import Iterator
from dataclasses import dataclass

from enginery.core.codec import JsonObject
from enginery.core.documents import find, read
from enginery.registry.store.s3.client import client
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.retries import ask, whole


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
