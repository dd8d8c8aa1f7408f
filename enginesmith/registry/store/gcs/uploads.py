"""Uploads to Google Cloud Storage: in one request, or in chunks of a resumable upload.

Every upload states its MD5, which the server compares before the object exists. A chunk that is sent twice does no
harm, since the server ignores bytes that it has; so google-cloud-storage repeats these by itself. What the object's
answer says is compared once more.
"""

import io
from typing import BinaryIO

from google.api_core.retry import Retry
from google.cloud.storage import Blob

from enginesmith.registry.store.gcs.requests import FAILURES, is_transient, status_of, timeouts
from enginesmith.registry.store.objects import attempts
from enginesmith.registry.store.objects.api import TOKEN
from enginesmith.registry.store.objects.body import NoWholeAnswerError
from enginesmith.registry.store.objects.source import UploadSource, md5_of

# Google takes chunks that are multiples of it.
_CHUNK_UNIT = 256 << 10


def put_small(blob: Blob, data: bytes, expected: str | None, token: str) -> None:
    """Write an object in one request, if it has the generation `expected` (None: is absent). Raises Google's errors."""
    blob.md5_hash = md5_of(data)
    if token:
        blob.metadata = {TOKEN: token}
    _upload(blob, io.BytesIO(data), len(data), expected, None)
    _check(blob, len(data), md5_of(data))


def put_large(blob: Blob, source: UploadSource, expected: str | None) -> None:
    """Write an object in chunks. Raises Google's errors, and IntegrityError when the source has not its digest."""
    blob.md5_hash = md5 = source.md5()
    blob.chunk_size = -(-source.part_bytes // _CHUNK_UNIT) * _CHUNK_UNIT
    retry = Retry(
        predicate=lambda error: isinstance(error, FAILURES) and is_transient(status_of(error), error),
        initial=attempts.FIRST_PAUSE_S,
        maximum=attempts.LONGEST_PAUSE_S,
        timeout=attempts.READ_TIMEOUT_S,
    )
    source.stream.seek(0)
    _upload(blob, _Checked(source), source.size, expected, retry)
    _check(blob, source.size, md5)


def _upload(blob: Blob, stream: "BinaryIO | _Checked", size: int, expected: str | None, retry: Retry | None) -> None:
    blob.upload_from_file(
        stream,
        size=size,
        content_type="application/octet-stream",
        if_generation_match=int(expected or 0),
        timeout=timeouts(),
        # Not the library's: it deletes what does not match, even if that is another writer's object.
        checksum=None,
        retry=retry,
    )


def _check(blob: Blob, size: int, md5: str) -> None:
    """Raise NoWholeAnswerError unless the answer says that this was stored."""
    if blob.size != size or blob.md5_hash != md5:
        raise NoWholeAnswerError("other bytes were stored")


class _Checked:
    """A stream of a source that gives its last bytes only when all of them have the digest; IntegrityError before."""

    def __init__(self, source: UploadSource) -> None:
        self._source, self._hasher, self._at = source, source.blob.hasher(), 0

    def tell(self) -> int:
        """How many bytes were read."""
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        data = self._source.stream.read(size)
        self._hasher.update(data)
        self._at += len(data)
        if self._at >= self._source.size:
            self._source.check(self._hasher.hexdigest())
        return data
