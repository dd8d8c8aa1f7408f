"""The requests of the store in a bucket to an object store, their retries, and the bytes of an upload."""

import base64
import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import BinaryIO, Protocol, TypeVar

from enginesmith.core.errors import InputError, IntegrityError, UnavailableError
from enginesmith.registry.store.files import BlobDigest, count_io
from enginesmith.registry.store.layout import MAX_KEYS, check_size
from enginesmith.registry.store.objects.place import BucketPlace

T = TypeVar("T")

PART_BYTES = 16 << 20
# S3's limit, the lowest.
MAX_PARTS = 10_000
# Parts that are uploaded at the same time; they and one more are in memory.
AT_ONCE = 4


def md5_of(data: bytes) -> str:
    """MD5 in base64, as in the header Content-MD5; servers refuse bytes with another MD5."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


@dataclass(frozen=True)
class UploadSource:
    """Bytes to upload: a seekable stream from its beginning, their size and their digests."""

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

    @property
    def small(self) -> bool:
        """Whether it is one part."""
        return self.size <= self.part_bytes

    def parts(self) -> Iterator[bytes]:
        """All parts, in order."""
        self.stream.seek(0)
        while part := self.stream.read(self.part_bytes):
            yield part

    def whole(self) -> bytes:
        """All bytes. Raises IntegrityError if their digest differs."""
        self.stream.seek(0)
        content = self.stream.read()
        hasher = self.blob.hasher()
        hasher.update(content)
        self.check(hasher.hexdigest())
        return content

    def md5(self) -> str:
        """MD5 of all bytes, in base64."""
        hasher = hashlib.md5(usedforsecurity=False)
        for part in self.parts():
            hasher.update(part)
        return base64.b64encode(hasher.digest()).decode()

    def check(self, actual_digest: str) -> None:
        """Raise IntegrityError unless `actual_digest` is the expected digest."""
        if actual_digest != self.blob.expected:
            raise IntegrityError(
                f"blob {self.blob.digest} changed while it was uploaded (its {self.blob.algorithm} differs now); "
                "nothing was stored: run again"
            )


def send_parts(source: UploadSource, send: Callable[[int, bytes], T]) -> list[T]:
    """The results of `send` for each part and its number (from 1), several at a time, in order.

    Raises what `send` raises, and IntegrityError if the source's digest differs.
    """
    hasher = source.blob.hasher()
    futures: deque[Future[T]] = deque()
    part_receipts: list[T] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for number, part in enumerate(source.parts(), 1):
                hasher.update(part)
                futures.append(pool.submit(send, number, part))
                if len(futures) == AT_ONCE:
                    part_receipts.append(futures.popleft().result())
            part_receipts.extend(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    source.check(hasher.hexdigest())
    return part_receipts


# The protocol of an object store: one request per method, and the distinction between an answer and a failure.
#
# A *tag* changes whenever an object is written: an ETag in S3 and Azure, a generation in Google Cloud Storage. A write
# requires that the object is absent or still has the tag that was read.

# The name of a write's token among an object's metadata.
TOKEN = "enginesmith-write"  # noqa: S105 - a name

ABSENT, UNCHANGED, CONFLICT, CONDITION_FAILED, TOO_LARGE, NO_RANGE = 404, 304, 409, 412, 413, 416


class Declined(Exception):  # noqa: N818 - an answer, not a failure
    """The server refuses a request about this object: absent (404), busy (409), a condition that does not hold (412),
    no such range (416), over the limit (413), or unchanged (304)."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


def parse_date(text: str | None) -> datetime:
    """The time in the header Date. Raises ValueError if it is missing; servers without a clock send none."""
    if not text:
        raise ValueError("the answer has no date")
    return parsedate_to_datetime(text).astimezone(UTC)


class Failed(Exception):  # noqa: N818 - becomes an EnginesmithError after the last attempt
    """No answer, or an error that is not about the object. words: the error and the remedy, never the server's text.

    passing: whether the same request may soon succeed.
    """

    def __init__(self, words: str, *, passing: bool = False) -> None:
        super().__init__(words)
        self.words = words
        self.passing = passing

    @property
    def unknown(self) -> bool:
        """Whether the server does not support the request."""
        return self.words == UNKNOWN_REQUEST


@dataclass(frozen=True)
class ObjectFacts:
    """An object's metadata. size: in bytes.  checksum: of its content as stated by the server, '' if it states none.
    metadata: set by its writer, including the token."""

    size: int
    tag: str
    checksum: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing: its name below the place, its size in bytes, a tag that changes with every write, and the
    time of the write on the server's clock."""

    name: str
    size: int
    tag: str
    modified: datetime


@dataclass(frozen=True)
class ListedPage:
    """A page of a listing. folders: names with further names below, ending in '/'.  next_token: of the next page; ''
    for the last one."""

    objects: tuple[ListedObject, ...]
    folders: tuple[str, ...]
    next_token: str


class Body(Protocol):
    """The body of an answer: a whole object, or a range of one."""

    def readinto(self, into: memoryview, /) -> int:
        """Read the next bytes into `into`; return their number, 0 only at the end. Raises Failed if it breaks off."""

    def close(self) -> None:
        """Release the connection, for reuse if the body was read to its end."""


class BucketApi(Protocol):
    """Requests to one bucket. `key`: relative to the registry; implementations add the prefix of `place`.

    Every request raises Declined or Failed, and can be used by several threads and after a fork. Implementations are
    frozen; two are equal if their places are.
    """

    def __hash__(self) -> int: ...

    @property
    def place(self) -> BucketPlace:
        """Where the registry is."""

    @property
    def kind(self) -> str:
        """The kind of the bucket's server, for messages: 'S3 server'."""

    @property
    def never(self) -> str:
        """A well-formed tag that no object has."""

    def head(self, key: str) -> ObjectFacts:
        """An object's metadata."""

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """A small object and its tag. Declines one of over `limit` bytes, and one that still has the tag `unless`."""

    def open_from(self, key: str, offset: int, tag: str) -> tuple[str, Body]:
        """The object's tag, and its bytes from `offset` to its end. Declines if its tag is not `tag` ('': any)."""

    def open_range(self, key: str, offset: int, size: int) -> Body:
        """Exactly `size` bytes (1 or more) from `offset`. Declines (416) if the object ends earlier."""

    def put(self, key: str, data: bytes, expected: str | None, token: str) -> None:
        """Write an object if it has the tag `expected` (None: is absent), with `token` in its metadata unless ''.

        The server refuses bytes that changed on the way.
        """

    def put_large(self, key: str, source: UploadSource, expected: str | None) -> None:
        """Like `put`, for more than one part, with several requests; those that are safe to repeat are repeated.

        Raises IntegrityError, and creates no object, if the source's digest differs. Remains of an upload that was not
        completed have no key.
        """

    def holds(self, facts: ObjectFacts, source: UploadSource) -> bool | None:
        """Whether an object of `source`'s size has the same bytes; None if only reading it can tell."""

    def delete(self, key: str, tag: str = "") -> None:
        """Delete an object if it has the tag `tag` ('': any)."""

    def copy(self, key: str, dest: str, tag: str) -> None:
        """Copy an object with the tag `tag` to the key `dest`, which is overwritten."""

    def page(self, prefix: str, token: str, *, deep: bool) -> ListedPage:
        """A page of the names under a prefix: all, or (not `deep`) only the objects directly there, and folders."""

    def now(self) -> datetime:
        """The time on the server's clock: the date of its answer about the registry's marker (RFC 9110, 6.6.1)."""

    def strays(self) -> tuple[str, ...]:
        """Descriptions of uploads that dead writers left and that cost money. Raises UnavailableError."""

    def sweep(self) -> int:
        """Delete these uploads, and return their number; 0 without permission."""


class ByMd5:
    """Common methods for the clouds that check uploads by MD5, and that delete abandoned uploads themselves."""

    def holds(self, facts: ObjectFacts, source: UploadSource) -> bool | None:
        """See `BucketApi.holds`."""
        return facts.checksum == source.md5() if facts.checksum else None

    def strays(self) -> tuple[str, ...]:
        """See `BucketApi.strays`: always empty."""
        return ()

    def sweep(self) -> int:
        """See `BucketApi.sweep`: always 0."""
        return 0


# The rules which requests to a bucket are repeated, and when. The libraries' own retries are off: they handle neither a
# conditional write whose response was lost (sent again, it would find its own object and report a conflict) nor a body
# that was cut halfway (docs/decisions/0005-retries-of-our-own.md).

Sent = TypeVar("Sent")

CONNECT_TIMEOUT_S = 5.0
# More than any server needs for one response; a body is read in pieces, each with this limit.
READ_TIMEOUT_S = 60.0
CONNECTIONS = 32
# Requests before giving up: about ten seconds, including the pauses between them.
ATTEMPTS = 8
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

UNKNOWN_REQUEST = "this server does not know the request; see docs/concepts/registry.md"


def pauses(attempts: int | None = None) -> Iterator[float | None]:
    """One item per attempt: the seconds to wait before the next one, growing and random; the last item is None."""
    count = ATTEMPTS if attempts is None else attempts
    for attempt in range(count - 1):
        yield random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)  # noqa: S311 - no secret
    yield None


def ask(bucket: BucketApi, doing: str, send: Callable[[], Sent], attempts: int | None = None) -> Sent:
    """Send a repeatable request until it is answered. doing: 'reading key', for messages.

    Raises Declined, UnavailableError, and InputError for a request that the server does not support.
    """
    for pause in pauses(attempts or bucket.place.attempts):
        try:
            return send()
        except Failed as failure:
            refuse(bucket, doing, failure, last=pause is None)
            time.sleep(pause or 0)
    raise AssertionError("unreachable")


def refuse(bucket: BucketApi, doing: str, failure: Failed, *, last: bool) -> None:
    """Return if another attempt may succeed. Raises UnavailableError or InputError otherwise."""
    if last or not failure.passing:
        count_io("errors")
        error_class = InputError if failure.unknown else UnavailableError
        raise error_class(f"{doing} in {bucket.place.locator('')}: {failure.words}") from failure
    count_io("retries")


def keys_below(bucket: BucketApi, prefix: str) -> list[str]:
    """All keys under a prefix that ends in '/' or is empty, sorted part by part."""
    return sorted((entry.name for entry in _objects(bucket, prefix)), key=lambda name: name.split("/"))


def objects_below(bucket: BucketApi) -> list[ListedObject]:
    """Every object under a place's prefix, sorted by name, including those of other tools."""
    return sorted((entry for entry in _objects(bucket, "") if entry.name), key=lambda entry: entry.name)


def sizes_below(bucket: BucketApi, prefix: str) -> Iterator[tuple[str, int]]:
    """Each key under a prefix that ends in '/', with its size in bytes."""
    for page in _pages(bucket, prefix, deep=True):
        for entry in page.objects:
            yield entry.name, entry.size


def stamps_below(bucket: BucketApi, prefix: str) -> Iterator[tuple[str, datetime]]:
    """Each key under a prefix that ends in '/', with the time of its last write."""
    return ((entry.name, entry.modified) for entry in _objects(bucket, prefix))


def names_below(bucket: BucketApi, prefix: str) -> list[str]:
    """The names directly under a prefix, sorted; folders end in '/'."""
    child_names: set[str] = set()
    for page in _pages(bucket, prefix, deep=False):
        child_names.update(entry.name.removeprefix(prefix) for entry in page.objects)
        child_names.update(name.removeprefix(prefix) for name in page.folders)
    return sorted(child_names - {""}, key=lambda name: name.removesuffix("/"))


def _objects(bucket: BucketApi, prefix: str) -> Iterator[ListedObject]:
    """The objects under a prefix. Leaves out keys that end in '/', which some tools write for an empty folder."""
    pages = _pages(bucket, prefix, deep=True)
    return (entry for page in pages for entry in page.objects if not entry.name.endswith("/"))


def _pages(bucket: BucketApi, prefix: str, *, deep: bool) -> Iterator[ListedPage]:
    """The pages of a listing. Raises IntegrityError for an endless listing, and for an impossible size."""
    token, key_count, seen_tokens = "", 0, set[str]()
    while True:
        page = ask(bucket, "listing", lambda token=token: bucket.page(prefix, token, deep=deep))  # type: ignore[misc]
        for entry in page.objects:
            check_size(entry.size, bucket.place.locator(entry.name))
        yield page
        token, key_count = page.next_token, key_count + len(page.objects) + len(page.folders)
        if not token:
            return
        if token in seen_tokens or len(seen_tokens) > MAX_KEYS // 1000 or key_count > MAX_KEYS:
            raise IntegrityError(
                f"{bucket.place.locator(prefix)}: the list of its keys does not end ({key_count} so far)"
            )
        seen_tokens.add(token)
