"""Listing a bucket: a request for each thousand names, whatever lies below them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from enginery.registry.store.s3.answers import ask, whole
from enginery.registry.store.s3.client import client
from enginery.registry.store.s3.place import Place


def keys_below(place: Place, prefix: str) -> list[str]:
    """All keys under a prefix that ends in '/' or is empty, sorted part by part."""
    start = place.key(prefix)
    names = (item["Key"].removeprefix(place.key("")) for page in _pages(place, start) for item in page["Contents"])
    # A key that ends in '/' is what some tools write to show a folder that is empty.
    return sorted((name for name in names if not name.endswith("/")), key=lambda name: name.split("/"))


@dataclass(frozen=True)
class Object:
    """An object: its name below the place, its size in bytes, and a tag that changes when it does."""

    name: str
    size: int
    tag: str


def objects_below(place: Place) -> list[Object]:
    """Every object under a place's prefix, sorted by name, whoever put it there."""
    start = place.key("")
    items = (item for page in _pages(place, start) for item in page["Contents"])
    found = (Object(item["Key"].removeprefix(start), item["Size"], item["ETag"]) for item in items)
    return sorted((item for item in found if item.name and not item.name.endswith("/")), key=lambda item: item.name)


def names_below(place: Place, prefix: str) -> list[str]:
    """The names directly under a prefix, sorted; those that have more below end in '/'."""
    start = place.key(prefix)
    found: set[str] = set()
    for page in _pages(place, start, Delimiter="/"):
        found.update(item["Key"].removeprefix(start) for item in page["Contents"])
        found.update(item["Prefix"].removeprefix(start) for item in page["CommonPrefixes"])
    return sorted(found - {""}, key=lambda name: name.removesuffix("/"))


def _pages(place: Place, start: str, **how: str) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        page: dict[str, Any] = ask(
            place,
            "listing",
            lambda after=after: whole(  # type: ignore[misc]
                client(place).list_objects_v2(Bucket=place.bucket, Prefix=start, **how, **after), "IsTruncated"
            ),
        )
        yield {"Contents": page.get("Contents", ()), "CommonPrefixes": page.get("CommonPrefixes", ())}
        if not page.get("IsTruncated"):
            return
        after = {"ContinuationToken": page["NextContinuationToken"]}
