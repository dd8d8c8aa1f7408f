"""Lists what is in a bucket: keys, a request for each thousand of them."""

from collections.abc import Iterator
from datetime import datetime

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.layout import MAX_KEYS, check_size
from enginesmith.registry.store.objects.api import BucketApi, ListedObject, ListedPage
from enginesmith.registry.store.objects.attempts import ask


def keys_below(bucket: BucketApi, prefix: str) -> list[str]:
    """All keys under a prefix that ends in '/' or is empty, sorted part by part."""
    return sorted((item.name for item in _objects(bucket, prefix)), key=lambda name: name.split("/"))


def objects_below(bucket: BucketApi) -> list[ListedObject]:
    """Every object under a place's prefix, sorted by name, whoever put it there."""
    return sorted((item for item in _objects(bucket, "") if item.name), key=lambda item: item.name)


def sizes_below(bucket: BucketApi, prefix: str) -> Iterator[tuple[str, int]]:
    """Each key under a prefix that ends in '/', with its size in bytes."""
    for page in _pages(bucket, prefix, deep=True):
        for item in page.objects:
            yield item.name, item.size


def stamps_below(bucket: BucketApi, prefix: str) -> Iterator[tuple[str, datetime]]:
    """Each key under a prefix that ends in '/', with the time of its last write."""
    return ((item.name, item.modified) for item in _objects(bucket, prefix))


def names_below(bucket: BucketApi, prefix: str) -> list[str]:
    """The names directly under a prefix, sorted; those that have more below end in '/'."""
    found: set[str] = set()
    for page in _pages(bucket, prefix, deep=False):
        found.update(item.name.removeprefix(prefix) for item in page.objects)
        found.update(name.removeprefix(prefix) for name in page.folders)
    return sorted(found - {""}, key=lambda name: name.removesuffix("/"))


def _objects(bucket: BucketApi, prefix: str) -> Iterator[ListedObject]:
    """Some tools write a key that ends in '/' for an empty folder, which is left out."""
    pages = _pages(bucket, prefix, deep=True)
    return (item for page in pages for item in page.objects if not item.name.endswith("/"))


def _pages(bucket: BucketApi, prefix: str, *, deep: bool) -> Iterator[ListedPage]:
    """The pages. Raises IntegrityError for a server that lists without end, and for a size that no object has."""
    after, keys, seen = "", 0, set[str]()
    while True:
        page = ask(bucket, "listing", lambda after=after: bucket.page(prefix, after, deep=deep))  # type: ignore[misc]
        for item in page.objects:
            check_size(item.size, bucket.place.locator(item.name))
        yield page
        after, keys = page.after, keys + len(page.objects) + len(page.folders)
        if not after:
            return
        if after in seen or len(seen) > MAX_KEYS // 1000 or keys > MAX_KEYS:
            raise IntegrityError(f"{bucket.place.locator(prefix)} is listed without end: {keys} keys so far")
        seen.add(after)
