"""The requests of a container of Azure Blob Storage (`objects.api.BucketApi` documents them)."""

import base64
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from azure.core import MatchConditions
from azure.storage.blob import BlobBlock, BlobPrefix, ContentSettings

from enginesmith.registry.store.azure.place import AzureLocation
from enginesmith.registry.store.azure.requests import CHUNK_BYTES, answers, condition_of, connect
from enginesmith.registry.store.layout import MARKER
from enginesmith.registry.store.objects.api import (
    NO_RANGE,
    TOKEN,
    TOO_LARGE,
    Body,
    Declined,
    Failed,
    ListedObject,
    ListedPage,
    ObjectFacts,
    parse_date,
)
from enginesmith.registry.store.objects.attempts import ask
from enginesmith.registry.store.objects.body import NoWholeAnswerError
from enginesmith.registry.store.objects.source import UploadSource, md5_of, send_parts

PAGE_KEYS = 5000
# Azure takes no '-' in the name of metadata.
_TOKEN = TOKEN.replace("-", "_")


@dataclass(frozen=True)
class AzureBucket:
    """The container at `place`. Tags are ETags."""

    place: AzureLocation

    @property
    def kind(self) -> str:
        """See `BucketApi.kind`."""
        return "Azure Blob Storage server"

    @property
    def never(self) -> str:
        """See `BucketApi.never`: ETags are times."""
        return '"0x1"'

    def head(self, key: str) -> ObjectFacts:
        """See `BucketApi.head`. The checksum is the MD5, which a blob that another tool put in blocks may lack."""
        with answers(self.place):
            found = self._blob(key).get_blob_properties()
            _require(found.etag, found.size)
            md5 = found.content_settings.content_md5
            token = (found.metadata or {}).get(_TOKEN)
            checksum = base64.b64encode(md5).decode() if md5 else ""
            return ObjectFacts(found.size, found.etag, checksum, {TOKEN: token} if token else {})

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """See `BucketApi.get`. An unchanged blob costs an answer without a body (304)."""
        asked = {"etag": unless, "match_condition": MatchConditions.IfModified} if unless else {}
        with answers(self.place):
            found = self._blob(key).download_blob(**asked)
            _require(found.properties.etag, found.size)
            if found.size > limit:
                raise Declined(TOO_LARGE, "large")
            data = found.readall()
            if len(data) != found.size:
                raise NoWholeAnswerError("it ends before")
            return data, found.properties.etag

    def open_from(self, key: str, start: int, tag: str) -> tuple[str, Body]:
        """See `BucketApi.open_from`."""
        asked = condition_of(tag) if tag else {}
        with answers(self.place):
            found = self._blob(key).download_blob(offset=start or None, **asked)
            _require(found.properties.etag, found.size)
            return found.properties.etag, _Chunks(found, found.size, partial(answers, self.place))

    def open_range(self, key: str, start: int, size: int) -> Body:
        """See `BucketApi.open_range`."""
        with answers(self.place):
            found = self._blob(key).download_blob(offset=start, length=size)
            if found.size < size:
                raise Declined(NO_RANGE, "it ends before")
            return _Chunks(found, size, partial(answers, self.place))

    def put(self, key: str, data: bytes, expected: str | None, token: str) -> None:
        """See `BucketApi.put`."""
        with answers(self.place):
            self._blob(key).upload_blob(
                data,
                length=len(data),
                overwrite=True,
                metadata={_TOKEN: token} if token else None,
                content_settings=ContentSettings(content_md5=bytearray(base64.b64decode(md5_of(data)))),
                validate_content=True,
                **condition_of(expected),
            )

    def put_large(self, key: str, source: UploadSource, expected: str | None) -> None:
        """See `BucketApi.put_large`: blocks, of which Azure keeps nothing that is not committed in a week."""
        # Their names are this writer's own, and all of one length, as Azure wants it.
        upload, where = secrets.token_hex(8), f"{self.place.container}/{self.place.key(key)}"

        def send(number: int, data: bytes) -> BlobBlock:
            name = f"{upload}-{number:06}"

            def stage() -> None:
                with answers(self.place):
                    self._blob(key).stage_block(name, data, length=len(data), validate_content=True)

            ask(self, f"writing part {number} of {where}", stage)
            return BlobBlock(name)

        def commit() -> None:
            with answers(self.place):
                self._blob(key).commit_block_list(
                    blocks,
                    content_settings=ContentSettings(content_md5=md5),
                    validate_content=True,
                    **condition_of(expected),
                )

        blocks, md5 = send_parts(source, send), bytearray(base64.b64decode(source.md5()))
        # Sent twice it does no harm: the second one meets this writer's blob, and is declined.
        ask(self, f"completing {key}", commit)

    def holds(self, found: ObjectFacts, source: UploadSource) -> bool | None:
        """See `BucketApi.holds`: by the MD5."""
        return found.checksum == source.md5() if found.checksum else None

    def delete(self, key: str, tag: str = "") -> None:
        """See `BucketApi.delete`. An account that keeps versions, or deletes softly, keeps the bytes for as long."""
        with answers(self.place):
            self._blob(key).delete_blob(**(condition_of(tag) if tag else {}))

    def copy(self, key: str, dest: str, tag: str) -> None:
        """See `BucketApi.copy`. Within an account Azure copies nothing, and answers at once."""
        with answers(self.place):
            copied, asked = self._blob(dest), condition_of(tag)
            asked = {f"source_{name}": value for name, value in asked.items()}
            status = copied.start_copy_from_url(self._blob(key).url, **asked)["copy_status"]
            while status == "pending":
                time.sleep(0.5)
                status = copied.get_blob_properties().copy.status
            if status != "success":
                raise Failed(f"Azure says that copying it ended as {str(status)[:20]}; run again", passing=True)

    def page(self, prefix: str, after: str, *, deep: bool) -> ListedPage:
        """See `BucketApi.page`."""
        top = self.place.key("")
        with answers(self.place):
            container, start = connect(self.place), self.place.key(prefix) or None
            if deep:
                pages = container.list_blobs(name_starts_with=start, results_per_page=PAGE_KEYS).by_page(after or None)
            else:
                walked = container.walk_blobs(name_starts_with=start, delimiter="/", results_per_page=PAGE_KEYS)
                pages = walked.by_page(after or None)
            found = list(next(pages, ()))
            folders = tuple(item.name.removeprefix(top) for item in found if isinstance(item, BlobPrefix))
            blobs = [item for item in found if not isinstance(item, BlobPrefix)]
            items = tuple(
                ListedObject(item.name.removeprefix(top), item.size, item.etag, item.last_modified) for item in blobs
            )
            return ListedPage(items, folders, pages.continuation_token or "")

    def now(self) -> datetime:
        """See `BucketApi.now`."""
        dates: list[str | None] = []
        with answers(self.place):
            self._blob(MARKER).get_blob_properties(
                raw_response_hook=lambda answer: dates.append(answer.http_response.headers.get("Date"))
            )
            return parse_date(dates[-1] if dates else None)

    def strays(self) -> tuple[str, ...]:
        """See `BucketApi.strays`: none that could be deleted; Azure drops uncommitted blocks after a week."""
        return ()

    def sweep(self) -> int:
        """See `BucketApi.sweep`."""
        return 0

    def _blob(self, key: str) -> Any:
        return connect(self.place).get_blob_client(self.place.key(key))


def _require(*facts: object) -> None:
    """Raise NoWholeAnswerError where one of them is missing."""
    if None in facts:
        raise NoWholeAnswerError("headers are missing")


class _Chunks:
    """A download whose chunks come one request each, with the condition that the blob stays the same."""

    def __init__(self, found: Any, size: int, answers: Callable[[], AbstractContextManager[None]]) -> None:
        self._chunks: Iterator[bytes] = found.chunks()
        self._left, self._answers = size, answers
        self._chunk = memoryview(b"")

    def readinto(self, into: memoryview, /) -> int:
        """See `Body.readinto`."""
        if not self._left or not into:
            return 0
        if not self._chunk:
            with self._answers():
                self._chunk = memoryview(next(self._chunks, b""))
                if len(self._chunk) < min(CHUNK_BYTES, self._left):
                    raise NoWholeAnswerError("it ends before")
        count = min(len(into), len(self._chunk), self._left)
        into[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        self._left -= count
        return count

    def close(self) -> None:
        """See `Body.close`: nothing is held between chunks."""
