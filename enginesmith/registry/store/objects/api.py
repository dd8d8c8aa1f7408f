"""What the store in a bucket asks of an object store's API: one request each, and how an answer is told from none.

A *tag* changes whenever an object is written: an ETag in S3 and Azure, a generation in Google Cloud Storage. A write
requires that the object is absent or still has the tag that was read. Attempts, write tokens and digests are
`attempts`, `reading` and `writing`, the same for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

from enginesmith.registry.store.objects.source import UploadSource

# The name of a write's token among an object's metadata.
TOKEN = "enginesmith-write"  # noqa: S105 - a name

ABSENT, UNCHANGED, CONFLICT, CONDITION_FAILED, TOO_LARGE, NO_RANGE = 404, 304, 409, 412, 413, 416


class Declined(Exception):  # noqa: N818 - an answer, and no failure
    """The server says no about this object: absent (404), busy (409), a condition that does not hold (412), no such
    range (416), over the limit (413), or still as it was (304)."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


def parse_date(text: str | None) -> datetime:
    """The time of the header Date. Raises ValueError for none, of which a server without a clock sends none."""
    if not text:
        raise ValueError("the answer has no date")
    return parsedate_to_datetime(text).astimezone(UTC)


class Failed(Exception):  # noqa: N818 - becomes an EnginesmithError when it is given up
    """No answer, or an error that is not about the object. words: what happened and the remedy, never the server's own.

    passing: whether the same request may succeed in a moment.  unknown: whether the server lacks the request.
    """

    def __init__(self, words: str, *, passing: bool = False, unknown: bool = False) -> None:
        super().__init__(words)
        self.words = words
        self.passing = passing
        self.unknown = unknown


@dataclass(frozen=True)
class ObjectFacts:
    """An object's metadata. size: in bytes.  checksum: of its content as the server states it, '' where it states none.
    metadata: what its writer gave, the token among it."""

    size: int
    tag: str
    checksum: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing: its name below the place, its size in bytes, a tag that changes when it does, and when it
    was written by the server's clock."""

    name: str
    size: int
    tag: str
    modified: datetime


@dataclass(frozen=True)
class ListedPage:
    """A page of a listing. folders: names that have more below, ending in '/'.  after: where the next page begins; ''
    for the last one."""

    objects: tuple[ListedObject, ...]
    folders: tuple[str, ...]
    after: str


class BucketPlace(Protocol):
    """Where a registry is: a bucket, a prefix, and how to reach it. Frozen, without credentials."""

    @property
    def uri(self) -> str:
        """The URI that opens it, everywhere with the same result."""
        ...

    def locator(self, key: str) -> str:
        """Where a key is, as other tools write it: 's3://bucket/prefix/key'."""
        ...

    def key(self, key: str) -> str:
        """The key's name in the bucket."""
        ...


class Body(Protocol):
    """Bytes that are coming: a whole object, or a range of one."""

    def readinto(self, into: memoryview, /) -> int:
        """Read the next bytes into `into`, and return how many; 0 only when all that was asked has come.

        Raises Failed when it breaks off.
        """
        ...

    def close(self) -> None:
        """Release the connection, for reuse if all of it was read."""
        ...


class BucketApi(Protocol):
    """The requests. Keys are those of the registry; the place's prefix is put before them.

    Each raises Declined and Failed, and may be used by many threads and after a fork. Implementations are frozen and
    compare by their place.
    """

    def __hash__(self) -> int: ...

    @property
    def place(self) -> BucketPlace:
        """Where the registry is."""
        ...

    @property
    def kind(self) -> str:
        """What holds the bucket, for messages: 'S3 server'."""
        ...

    @property
    def never(self) -> str:
        """A well-formed tag that no object has."""
        ...

    def head(self, key: str) -> ObjectFacts:
        """An object's metadata."""
        ...

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """A small object and its tag. Declines one of over `limit` bytes, and one that still has the tag `unless`."""
        ...

    def open_from(self, key: str, start: int, tag: str) -> tuple[str, Body]:
        """The object's tag, and its bytes from `start` to its end. Declines if it has not the tag `tag` ('': any)."""
        ...

    def open_range(self, key: str, start: int, size: int) -> Body:
        """Exactly `size` bytes (1 or more) from `start`. Declines (416) if the object ends before."""
        ...

    def put(self, key: str, data: bytes, expected: str | None, token: str) -> None:
        """Write an object if it has the tag `expected` (None: is absent), with `token` in its metadata unless ''.

        The server refuses bytes that changed on the way.
        """
        ...

    def put_large(self, key: str, source: UploadSource, expected: str | None) -> None:
        """Like `put`, of more than one part, with as many requests as it takes; those that may be are repeated.

        Raises IntegrityError, and makes no object, when the source has not its digest. What is left of an upload that
        was not completed has no key.
        """
        ...

    def holds(self, found: ObjectFacts, source: UploadSource) -> bool | None:
        """Whether the object of `source`'s size has its bytes; None where only reading it tells."""
        ...

    def delete(self, key: str, tag: str = "") -> None:
        """Delete an object if it has the tag `tag` ('': any)."""
        ...

    def copy(self, key: str, dest: str, tag: str) -> None:
        """Copy an object that has the tag `tag` to the key `dest`, whatever is there."""
        ...

    def page(self, prefix: str, after: str, *, deep: bool) -> ListedPage:
        """A page of what is under a prefix: all of it, or (not `deep`) only what is directly there, and folders."""
        ...

    def now(self) -> datetime:
        """The time by the server's clock: the date of its answer about the registry's marker (RFC 9110, 6.6.1)."""
        ...

    def strays(self) -> tuple[str, ...]:
        """Uploads that dead writers left and that cost money, in words. Raises UnavailableError."""
        ...

    def sweep(self) -> int:
        """Delete these, and return how many; 0 where that is not allowed."""
        ...
