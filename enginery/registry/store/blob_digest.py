"""What makes bytes the right ones: their SHA-256, which names a blob, or their BLAKE3, where a manifest says it.

SHA-256 on a CPU without instructions for it is slower than a network; BLAKE3 is about ten times as fast there
(https://github.com/BLAKE3-team/BLAKE3-specs). But that a BLAKE3 belongs to a SHA-256 is the word of whoever wrote the
manifest, and a cache is shared by registries that need not trust each other. So what was verified by a BLAKE3 is kept
under the pair of both, and answers for that pair alone; for the SHA-256 it counts once that was looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from enginery.registry.store.keys import check_digest

# Large enough that hashing runs without Python's lock for most of its time.
_BLOCK_BYTES = 1 << 20


class Hasher(Protocol):
    """What digests bytes that come in pieces."""

    def update(self, data: Any, /) -> object:
        """Digest a piece more."""
        ...

    def hexdigest(self) -> str:
        """The digest of all pieces, in lower-case hexadecimal."""
        ...


@dataclass(frozen=True)
class Seal:
    """How a blob's bytes are recognised: by the BLAKE3 if there is one, else by the SHA-256. digest: the SHA-256.

    Raises InputError for what is no digest.
    """

    digest: str
    blake3: str | None = None

    def __post_init__(self) -> None:
        check_digest(self.digest)
        if self.blake3 is not None:
            check_digest(self.blake3)

    @property
    def name(self) -> str:
        """What the bytes are kept under: a file's name that belongs to this pair alone."""
        return self.digest if self.blake3 is None else f"{self.digest}-{self.blake3}"

    @property
    def expected(self) -> str:
        """What the hasher must say in the end."""
        return self.blake3 or self.digest

    @property
    def algorithm(self) -> str:
        """As a person writes it."""
        return "SHA-256" if self.blake3 is None else "BLAKE3"

    @property
    def named(self) -> "Seal":
        """The seal that is the blob's name alone, and that no manifest's word is needed for."""
        return Seal(self.digest)

    def hasher(self) -> Hasher:
        """A fresh one."""
        found = sha256() if self.blake3 is None else blake3_hasher()
        if found is None:
            raise ModuleNotFoundError("blake3")
        return found

    def holds(self, path: Path) -> bool:
        """Whether a file has the bytes. Reads all of it."""
        hasher = self.hasher()
        with path.open("rb") as stream:
            for block in _blocks(stream):
                hasher.update(block)
        return hasher.hexdigest() == self.expected


def seal(digest: str, blake3: str | None) -> Seal:
    """The fastest seal that can be checked here. blake3: what a manifest says, None where it says none."""
    return Seal(digest, blake3 if blake3_hasher() is not None else None)


def blake3_hasher() -> Hasher | None:
    """A fresh one; None where the library is not installed."""
    found = _library()
    return None if found is None else found()


def sealed(source: BinaryIO, dest: BinaryIO | None = None) -> Seal:
    """Digest what is left of a stream by SHA-256 and, where the library is there, by BLAKE3, in one pass; with `dest`,
    which it is copied to."""
    sha, other = sha256(), blake3_hasher()
    for block in _blocks(source):
        sha.update(block)
        if other is not None:
            other.update(block)
        if dest is not None:
            dest.write(block)
    return Seal(sha.hexdigest(), None if other is None else other.hexdigest())


def _blocks(stream: BinaryIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:count]


@cache
def _library() -> Any:
    """Loaded at first use, and left out where it is not installed: a serving node can do without."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    return blake3
