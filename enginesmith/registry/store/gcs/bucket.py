"""A bucket of Google Cloud Storage: its requests and uploads."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import BinaryIO, ClassVar
from urllib.parse import quote

import requests
from google.api_core import exceptions as google_errors
from google.api_core.retry import Retry
from google.cloud.storage import Blob

from enginesmith.registry.store.gcs.requests import (
    FAILURES,
    GcsConnection,
    answers,
    connect,
    is_transient,
    status_of,
    timeouts,
)
from enginesmith.registry.store.layout import MARKER
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.body import HttpBody, NoWholeAnswerError
from enginesmith.registry.store.objects.place import GcsLocation

# Uploads to Google Cloud Storage: in one request, or in chunks of a resumable upload.
#
# Every upload states its MD5, which the server compares before the object exists. Sending a chunk twice is harmless,
# since the server ignores bytes that it has; so google-cloud-storage repeats chunks by itself. The answer's facts about
# the object are compared once more.

# Google accepts chunks that are multiples of it.
_CHUNK_UNIT = 256 << 10


def _upload(blob: Blob, stream: "BinaryIO | _Checked", size: int, expected: str | None, retry: Retry | None) -> None:
    blob.upload_from_file(
        stream,
        size=size,
        content_type="application/octet-stream",
        if_generation_match=int(expected or 0),
        timeout=timeouts(),
        # Not the library's check: it deletes an object that does not match, even another writer's.
        checksum=None,
        retry=retry,
    )


def _check(blob: Blob, md5: str) -> None:
    """Raise NoWholeAnswerError unless the answer confirms the upload."""
    if blob.md5_hash != md5:
        raise NoWholeAnswerError("other bytes were stored")


class _Checked:
    """A stream that returns the last bytes of a source only if the whole has the digest; else raises IntegrityError."""

    def __init__(self, source: api.UploadSource) -> None:
        self._source, self._hasher, self._at = source, source.blob.hasher(), 0

    def tell(self) -> int:
        """The number of bytes that were read."""
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        chunk = self._source.stream.read(size)
        self._hasher.update(chunk)
        self._at += len(chunk)
        if self._at >= self._source.size:
            self._source.check(self._hasher.hexdigest())
        return chunk


PAGE_KEYS = 1000
_PARTIAL = 206
_LENGTH, _GENERATION = "Content-Length", "X-Goog-Generation"


@dataclass(frozen=True)
class GcsBucket(api.ByMd5):
    """The bucket at `place`. Tags are generations. Unfinished uploads cost nothing and expire after a week."""

    kind: ClassVar[str] = "Google Cloud Storage server"
    # Generations are times in microseconds.
    never: ClassVar[str] = "1"
    place: GcsLocation

    def head(self, key: str) -> api.ObjectFacts:
        """See `BucketApi.head`. The checksum is the MD5, which objects composed of others lack."""
        with answers(self.place):
            blob = self._blob(key)
            blob.reload(timeout=timeouts(), retry=None)
            if blob.generation is None or blob.size is None:
                raise NoWholeAnswerError("no generation")
            return api.ObjectFacts(blob.size, str(blob.generation), blob.md5_hash or "", dict(blob.metadata or {}))

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """See `BucketApi.get`. The answer for an unchanged object has no body (304)."""
        with answers(self.place), self._open(key, {"ifGenerationNotMatch": unless} if unless else {}) as response:
            size, tag = int(response.headers[_LENGTH]), response.headers[_GENERATION]
            if tag == unless:  # from a server that ignores this condition
                raise api.Declined(api.UNCHANGED, "unchanged")
            content = response.raw.read(limit + 1) if size <= limit else b""
            if max(size, len(content)) > limit:
                raise api.Declined(api.TOO_LARGE, "large")
            if len(content) != size:
                raise NoWholeAnswerError("it ends too early")
            return content, tag

    def open_from(self, key: str, offset: int, tag: str) -> tuple[str, api.Body]:
        """See `BucketApi.open_from`."""
        with answers(self.place):
            conditions = {"ifGenerationMatch": tag} if tag else {}
            response = self._open(key, conditions, f"bytes={offset}-" if offset else "")
            try:
                generation, size = response.headers[_GENERATION], int(response.headers[_LENGTH])
                if tag and generation != tag:  # from a server that ignores this condition
                    raise api.Declined(api.CONDITION_FAILED, "another")
                if offset and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                    raise api.Declined(api.NO_RANGE, "no range")
                return generation, HttpBody(response.raw, size, partial(answers, self.place))
            except BaseException:
                response.close()
                raise

    def open_range(self, key: str, offset: int, size: int) -> api.Body:
        """See `BucketApi.open_range`."""
        last_offset = offset + size - 1
        with answers(self.place):
            response = self._open(key, {}, f"bytes={offset}-{last_offset}")
            is_whole = offset == 0 and response.headers.get(_LENGTH) == str(size)
            content_range = response.headers.get("Content-Range", "").partition("/")[0]
            if content_range == f"bytes {offset}-{last_offset}" or (is_whole and response.status_code != _PARTIAL):
                return HttpBody(response.raw, size, partial(answers, self.place))
            response.close()
            if response.status_code != _PARTIAL or content_range:
                raise api.Declined(api.NO_RANGE, "it ends too early")
            raise NoWholeAnswerError("no range")

    def put(self, key: str, data: bytes, expected: str | None, token: str) -> None:
        """See `BucketApi.put`."""
        with answers(self.place):
            blob = self._blob(key)
            blob.md5_hash = api.md5_of(data)
            if token:
                blob.metadata = {api.TOKEN: token}
            _upload(blob, io.BytesIO(data), len(data), expected, None)
            _check(blob, api.md5_of(data))

    def put_large(self, key: str, source: api.UploadSource, expected: str | None) -> None:
        """See `BucketApi.put_large`: a resumable upload, which Google deletes if it is not completed within a week."""
        retry = Retry(
            predicate=lambda error: isinstance(error, FAILURES) and is_transient(status_of(error), error),
            initial=api.FIRST_PAUSE_S,
            maximum=api.LONGEST_PAUSE_S,
            timeout=api.READ_TIMEOUT_S,
        )
        with answers(self.place):
            blob = self._blob(key)
            blob.md5_hash = md5 = source.md5()
            blob.chunk_size = -(-source.part_bytes // _CHUNK_UNIT) * _CHUNK_UNIT
            source.stream.seek(0)
            _upload(blob, _Checked(source), source.size, expected, retry)
            _check(blob, md5)

    def delete(self, key: str, tag: str = "") -> None:
        """See `BucketApi.delete`. A bucket with versioning or soft delete keeps the bytes for its retention time."""
        with answers(self.place):
            self._blob(key).delete(if_generation_match=int(tag) if tag else None, timeout=timeouts(), retry=None)

    def copy(self, key: str, dest: str, tag: str) -> None:
        """See `BucketApi.copy`. Large objects take several requests."""
        rewrite_token, is_done = "", False
        with answers(self.place):
            while not is_done:
                rewrite_token, _, _ = self._blob(dest).rewrite(
                    self._blob(key),
                    rewrite_token or None,
                    if_source_generation_match=int(tag),
                    timeout=timeouts(),
                    retry=None,
                )
                is_done = not rewrite_token

    def page(self, prefix: str, token: str, *, deep: bool) -> api.ListedPage:
        """See `BucketApi.page`."""
        base_prefix = self.place.key("")
        with answers(self.place):
            bucket = self._connection.bucket
            blob_pages = bucket.list_blobs(
                prefix=self.place.key(prefix) or None,
                delimiter=None if deep else "/",
                page_token=token or None,
                page_size=PAGE_KEYS,
                fields="items(name,size,generation,updated),prefixes,nextPageToken,kind",
                timeout=timeouts(),
                retry=None,
            )
            page = tuple(next(blob_pages.pages, ()))
            if any(blob.updated is None for blob in page):
                raise NoWholeAnswerError("no time")
            objects = tuple(
                api.ListedObject(
                    str(blob.name).removeprefix(base_prefix), blob.size, str(blob.generation), blob.updated
                )
                for blob in page
            )
            folders = tuple(str(name).removeprefix(base_prefix) for name in sorted(blob_pages.prefixes))
            return api.ListedPage(objects, folders, blob_pages.next_page_token or "")

    def now(self) -> datetime:
        """See `BucketApi.now`."""
        with answers(self.place), self._open(MARKER, {}) as response:
            return api.parse_date(response.headers.get("Date"))

    @property
    def _connection(self) -> GcsConnection:
        return connect(self.place)

    def _blob(self, key: str) -> Blob:
        return self._connection.bucket.blob(self.place.key(key))

    def _open(self, key: str, conditions: Mapping[str, str], part: str = "") -> requests.Response:
        """The response whose body is the object's bytes, or the range `part` of them, as a stream. The methods of a
        Blob do not stream."""
        connection, name = self._connection, quote(self.place.key(key), safe="")
        response: requests.Response = connection.session.get(
            f"{connection.url}/download/storage/v1/b/{self.place.bucket}/o/{name}",
            params={"alt": "media", **conditions},
            headers={"Accept-Encoding": "identity", **({"Range": part} if part else {})},
            timeout=timeouts(),
            stream=True,
        )
        if response.status_code >= 300:
            with response:
                raise google_errors.from_http_response(response)
        if response.status_code not in (requests.codes.ok, _PARTIAL):
            response.close()
            raise google_errors.Unknown(f"status {response.status_code}")
        return response
