"""Bytes that are to be uploaded: their parts, digested while they are read."""

import base64
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.files import BlobDigest

T = TypeVar("T")

PART_BYTES = 16 << 20
# S3's limit, the lowest.
MAX_PARTS = 10_000
# Parts that are uploaded at the same time; they and one more are in memory.
AT_ONCE = 4


def md5_of(data: bytes) -> str:
    """MD5 in base64, as in the header Content-MD5, by which servers refuse other bytes."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


@dataclass(frozen=True)
class UploadSource:
    """Bytes to put: a seekable stream from its beginning, their size and their digests."""

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
        """All bytes. Raises IntegrityError when they have not the digest."""
        self.stream.seek(0)
        data = self.stream.read()
        hasher = self.blob.hasher()
        hasher.update(data)
        self.check(hasher.hexdigest())
        return data

    def md5(self) -> str:
        """MD5 of all bytes, in base64."""
        hasher = hashlib.md5(usedforsecurity=False)
        for part in self.parts():
            hasher.update(part)
        return base64.b64encode(hasher.digest()).decode()

    def check(self, found: str) -> None:
        """Raise IntegrityError unless that is the digest."""
        if found != self.blob.expected:
            raise IntegrityError(
                f"blob {self.blob.digest} changed while it was uploaded (its {self.blob.algorithm} is another now); "
                "nothing was stored: run again"
            )


def send_parts(source: UploadSource, send: Callable[[int, bytes], T]) -> list[T]:
    """What `send` returns for each part and its number (from 1), several at a time, in order.

    Raises what `send` raises, and IntegrityError when the source has not its digest.
    """
    hasher = source.blob.hasher()
    running: deque[Future[T]] = deque()
    found: list[T] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for number, part in enumerate(source.parts(), 1):
                hasher.update(part)
                running.append(pool.submit(send, number, part))
                if len(running) == AT_ONCE:
                    found.append(running.popleft().result())
            found.extend(future.result() for future in running)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    source.check(hasher.hexdigest())
    return found
