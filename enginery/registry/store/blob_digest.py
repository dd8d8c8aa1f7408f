"""The digests that a blob is verified by: its SHA-256, which is its name, or its BLAKE3, if a manifest has one.

SHA-256 on a CPU without instructions for it is slower than a network; BLAKE3 is about ten times as fast there
(https://github.com/BLAKE3-team/BLAKE3-specs). But that a BLAKE3 belongs to a SHA-256 is the word of whoever wrote the
manifest, and a cache is shared by registries that need not trust each other. So bytes that were verified by BLAKE3 are
stored under the pair of both digests and used for that pair only, until their SHA-256 was computed, too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from enginery.core.digest import check_digest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Large enough that hashing runs without Python's lock for most of its time.
_BLOCK_BYTES = 1 << 20


class Hasher(Protocol):
    """A hash function over bytes in pieces, as in `hashlib`."""

    def update(self, data: "ReadableBuffer", /) -> object:
        """Add a piece of data."""
        ...

    def hexdigest(self) -> str:
        """The digest of all pieces, in lower-case hexadecimal."""
        ...


@dataclass(frozen=True)
class BlobDigest:
    """A blob's digests. digest: the SHA-256, its name.  blake3: verifies the bytes if given, else the SHA-256 does.

    Raises InputError for malformed digests.
    """

    digest: str
    blake3: str | None = None

    def __post_init__(self) -> None:
        check_digest(self.digest)
        if self.blake3 is not None:
            check_digest(self.blake3)

    @property
    def name(self) -> str:
        """The file name under which bytes that were verified by these digests are stored."""
        return self.digest if self.blake3 is None else f"{self.digest}-{self.blake3}"

    @property
    def expected(self) -> str:
        """The digest that `hasher` must give for the blob's bytes."""
        return self.blake3 or self.digest

    @property
    def algorithm(self) -> str:
        """The hash function's name for messages: 'SHA-256' or 'BLAKE3'."""
        return "SHA-256" if self.blake3 is None else "BLAKE3"

    @property
    def sha256_only(self) -> "BlobDigest":
        """The digest without the BLAKE3, which only a manifest vouches for."""
        return BlobDigest(self.digest)

    def hasher(self) -> Hasher:
        """A new hasher. Raises ModuleNotFoundError where a BLAKE3 is given and the library is not installed."""
        found = sha256() if self.blake3 is None else new_blake3_hasher()
        if found is None:
            raise ModuleNotFoundError("blake3")
        return found

    def matches(self, path: Path) -> bool:
        """Whether a file's content has the expected digest. Reads all of it; raises OSError."""
        hasher = self.hasher()
        with path.open("rb") as stream:
            for block in _blocks(stream):
                hasher.update(block)
        return hasher.hexdigest() == self.expected


def choose_digest(digest: str, blake3: str | None) -> BlobDigest:
    """A blob's digest, with its BLAKE3 if the library is installed. blake3: from the manifest, or None."""
    return BlobDigest(digest, blake3 if new_blake3_hasher() is not None else None)


def new_blake3_hasher() -> Hasher | None:
    """A new BLAKE3 hasher; None where the library is not installed."""
    found = _library()
    return None if found is None else found()


def digest_stream(source: BinaryIO, dest: BinaryIO | None = None) -> BlobDigest:
    """Read a stream to its end and return its SHA-256 and, where the library is installed, its BLAKE3. dest: a stream
    that the bytes are copied to."""
    sha, other = sha256(), new_blake3_hasher()
    for block in _blocks(source):
        sha.update(block)
        if other is not None:
            other.update(block)
        if dest is not None:
            dest.write(block)
    return BlobDigest(sha.hexdigest(), None if other is None else other.hexdigest())


def _blocks(stream: BinaryIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:count]


@cache
def _library() -> "Callable[[], Hasher] | None":
    """Loaded at first use, and left out where it is not installed: a serving node can do without."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    return blake3
