"""A container of Azure Blob Storage: its client, its errors, its requests."""

import base64
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, ClassVar
from xml.etree.ElementTree import ParseError

from azure.core import MatchConditions
from azure.core import exceptions as az
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.storage.blob import BlobBlock, BlobPrefix, ContainerClient, ContentSettings

from enginesmith.registry.store.layout import MARKER
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.body import NoWholeAnswerError
from enginesmith.registry.store.objects.place import AzureLocation

# Azure's client, and its errors as answers or failures, with messages.
#
# A message has the error's code and the remedy, never the server's whole response, which may contain a token or a
# signed URL.

# Bytes per request of a download, which Azure's library holds in memory.
CHUNK_BYTES = 8 << 20

# Statuses about the object, not about the connection or the server: the caller interprets them.
_DECLINED = (304, 404, 409, 412, 416)
_ELSEWHERE = ("ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled", "AccountBeingCreated")
# The code for If-None-Match: * if the blob exists. Other 409s are about a concurrent request.
_EXISTS = ("BlobAlreadyExists", "UnauthorizedBlobOverwrite")
# Another writer's commit has dropped the blocks of this upload.
_DROPPED = ("InvalidBlockList", "InvalidBlobOrBlock")
_PASSING = ("ServerBusy", "OperationTimedOut", "InternalError", "Md5Mismatch", "IncompleteBody", "RequestBodyInvalid")

# The exceptions of azure-storage-blob for a request. ParseError and the like: an answer was cut off, and Azure's
# library takes it for another kind.
FAILURES = (az.AzureError, ParseError, OSError, ValueError, TypeError, KeyError, AttributeError)


def connect(place: AzureLocation) -> ContainerClient:
    """The client, created on first use; one per process, because neither sockets nor locks survive a fork.

    Raises Failed if the credentials cannot be used.
    """
    return _connect(place, os.getpid())


@lru_cache(maxsize=16)
def _connect(place: AzureLocation, _process: int) -> ContainerClient:
    with answers(place):
        return ContainerClient(
            place.url,
            place.container,
            credential=_credential(place),
            connection_timeout=api.CONNECT_TIMEOUT_S,
            read_timeout=api.READ_TIMEOUT_S,
            # `api.ask` repeats requests.
            retry_total=0,
            max_single_get_size=CHUNK_BYTES,
            max_chunk_get_size=CHUNK_BYTES,
            raw_response_hook=_check_length,
            user_agent="enginesmith",
        )


def _check_length(answer: Any) -> None:
    """Raise ValueError if a part of a blob is longer than requested: the library allocates the length that the server
    states."""
    request_headers, headers = answer.http_request.headers, answer.http_response.headers
    if "x-ms-range" in request_headers and int(headers.get("Content-Length") or 0) > CHUNK_BYTES:
        answer.http_response.internal_response.close()
        raise ValueError("more bytes than were asked for")


def _credential(place: AzureLocation) -> Any:
    """The account's key or a signature from the environment, else the credential that DefaultAzureCredential finds. The
    library itself sends no token over plain http."""
    if account_key := os.environ.get("AZURE_STORAGE_KEY"):
        return AzureNamedKeyCredential(place.account, account_key)
    if sas_token := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return AzureSasCredential(sas_token.removeprefix("?"))
    from azure.identity import DefaultAzureCredential  # takes a tenth of a second

    return DefaultAzureCredential()


def condition_of(expected: str | None) -> dict[str, object]:
    """The condition that a blob has this ETag, or that it is absent (None)."""
    if expected is None:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": expected, "match_condition": MatchConditions.IfNotModified}


@contextmanager
def answers(place: AzureLocation) -> Iterator[None]:
    """Convert exceptions of Azure's library: to Declined for a refusal about the blob, else to Failed."""
    try:
        yield
    except FAILURES as error:
        status, code = status_of(error), code_of(error)
        if code in _EXISTS:
            raise api.Declined(api.CONDITION_FAILED, code) from error
        if (status in _DECLINED and code not in _ELSEWHERE) or code in _DROPPED:
            raise api.Declined(status, code) from error
        explanation = _explain_answer(place, status, code) if status else _explain_no_answer(place, error)
        raise api.Failed(explanation, passing=_is_transient(status, code, error)) from error


def status_of(error: Exception) -> int:
    """The HTTP status; 0 without a complete answer."""
    return int(error.status_code or 0) if isinstance(error, az.HttpResponseError) else 0


def code_of(error: Exception) -> str:
    """Azure's code such as 'BlobNotFound'; '' without an answer."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _is_transient(status: int, code: str, error: Exception) -> bool:
    if status:
        # Without a code, Azure could not parse the request. Azurite's code for a wrong MD5 is InvalidOperation.
        is_corrupt = status == 400 and (not code or "md5" in str(error).lower())
        return (
            is_corrupt or (status >= 500 and status != 501) or status in (408, 429) or code in _PASSING or status < 400
        )
    return not isinstance(error, az.ClientAuthenticationError) and not _mentions(error, "SSL", "ProxyError")


def _mentions(error: Exception, *words: str) -> bool:
    return any(name in f"{type(error.__cause__).__name__} {error}" for name in words)


def _explain_answer(place: AzureLocation, status: int, code: str) -> str:
    place_text = f" at {place.url}"
    if code in _ELSEWHERE:
        return f"there is no container {place.container!r}{place_text} ({code}); create it, or check its name"
    if status == 401 or code in ("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"):
        return (
            f"the credentials are not accepted ({code or status}); check AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, "
            "the identity and this machine's clock"
        )
    if status == 403:
        return f"not allowed ({code or status}); docs/concepts/registry.md has the role that is needed"
    if status == 501:
        return api.UNKNOWN_REQUEST
    if status >= 500 or code in _PASSING or status in (408, 429):
        return f"the server is overloaded or failing ({code or status}); run again later"
    return f"the server refuses with {status} {code[:60]}; check the URI's options"


def _explain_no_answer(place: AzureLocation, error: Exception) -> str:
    place_text, error_name = f" at {place.url}", type(error).__name__
    if isinstance(error, az.ClientAuthenticationError):
        return (
            f"no usable credentials ({error_name}); give this machine or its Kubernetes service account an identity, "
            "run `az login`, or set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN"
        )
    if _mentions(error, "SSL"):
        return f"no TLS connection{place_text}; set REQUESTS_CA_BUNDLE to its certificate authority"
    if _mentions(error, "ProxyError"):
        return "the proxy cannot be reached; check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    if _mentions(error, "non-TLS"):
        return f"a token is not sent over plain http{place_text}; give an https endpoint, or set AZURE_STORAGE_KEY"
    return f"no complete answer{place_text} ({error_name}); check the endpoint and the network, then run again"


PAGE_KEYS = 5000
# Azure takes no '-' in the name of metadata.
_TOKEN = api.TOKEN.replace("-", "_")


@dataclass(frozen=True)
class AzureBucket(api.ByMd5):
    """The container at `place`. Tags are ETags. Uncommitted blocks are dropped after a week."""

    kind: ClassVar[str] = "Azure Blob Storage server"
    # ETags are times.
    never: ClassVar[str] = '"0x1"'
    place: AzureLocation

    def head(self, key: str) -> api.ObjectFacts:
        """See `BucketApi.head`. The checksum is the MD5, which blobs that other tools uploaded in blocks may lack."""
        with answers(self.place):
            properties = self._blob(key).get_blob_properties()
            _require(properties.etag, properties.size)
            md5 = properties.content_settings.content_md5
            token = (properties.metadata or {}).get(_TOKEN)
            checksum = base64.b64encode(md5).decode() if md5 else ""
            return api.ObjectFacts(properties.size, properties.etag, checksum, {api.TOKEN: token} if token else {})

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """See `BucketApi.get`. The answer for an unchanged blob has no body (304)."""
        conditions = {"etag": unless, "match_condition": MatchConditions.IfModified} if unless else {}
        with answers(self.place):
            download = self._blob(key).download_blob(**conditions)
            _require(download.properties.etag, download.size)
            if download.size > limit:
                raise api.Declined(api.TOO_LARGE, "large")
            content = download.readall()
            if len(content) != download.size:
                raise NoWholeAnswerError("it ends too early")
            return content, download.properties.etag

    def open_from(self, key: str, offset: int, tag: str) -> tuple[str, api.Body]:
        """See `BucketApi.open_from`."""
        conditions = condition_of(tag) if tag else {}
        with answers(self.place):
            download = self._blob(key).download_blob(offset=offset or None, **conditions)
            _require(download.properties.etag, download.size)
            return download.properties.etag, _Chunks(download, download.size, partial(answers, self.place))

    def open_range(self, key: str, offset: int, size: int) -> api.Body:
        """See `BucketApi.open_range`."""
        with answers(self.place):
            download = self._blob(key).download_blob(offset=offset, length=size)
            if download.size < size:
                raise api.Declined(api.NO_RANGE, "it ends too early")
            return _Chunks(download, size, partial(answers, self.place))

    def put(self, key: str, data: bytes, expected: str | None, token: str) -> None:
        """See `BucketApi.put`."""
        with answers(self.place):
            self._blob(key).upload_blob(
                data,
                length=len(data),
                overwrite=True,
                metadata={_TOKEN: token} if token else None,
                content_settings=ContentSettings(content_md5=bytearray(base64.b64decode(api.md5_of(data)))),
                validate_content=True,
                **condition_of(expected),
            )

    def put_large(self, key: str, source: api.UploadSource, expected: str | None) -> None:
        """See `BucketApi.put_large`: uploads blocks. Azure deletes blocks that are not committed within a week."""
        # The block names are this writer's own, all of the same length, as Azure requires.
        upload_id, object_path = secrets.token_hex(8), f"{self.place.container}/{self.place.key(key)}"

        def send(number: int, data: bytes) -> BlobBlock:
            block_id = f"{upload_id}-{number:06}"

            def stage() -> None:
                with answers(self.place):
                    self._blob(key).stage_block(block_id, data, length=len(data), validate_content=True)

            api.ask(self, f"writing part {number} of {object_path}", stage)
            return BlobBlock(block_id)

        def commit() -> None:
            with answers(self.place):
                self._blob(key).commit_block_list(
                    block_ids,
                    content_settings=ContentSettings(content_md5=md5),
                    validate_content=True,
                    **condition_of(expected),
                )

        block_ids, md5 = api.send_parts(source, send), bytearray(base64.b64decode(source.md5()))
        # Sending it twice is harmless: the second request finds this writer's blob, and is declined.
        api.ask(self, f"completing {key}", commit)

    def delete(self, key: str, tag: str = "") -> None:
        """See `BucketApi.delete`. An account with versioning or soft delete keeps the bytes for its retention time."""
        with answers(self.place):
            self._blob(key).delete_blob(**(condition_of(tag) if tag else {}))

    def copy(self, key: str, dest: str, tag: str) -> None:
        """See `BucketApi.copy`. Within an account Azure copies no bytes, and answers at once."""
        with answers(self.place):
            copied_blob, conditions = self._blob(dest), condition_of(tag)
            conditions = {f"source_{name}": value for name, value in conditions.items()}
            status = copied_blob.start_copy_from_url(self._blob(key).url, **conditions)["copy_status"]
            while status == "pending":
                time.sleep(0.5)
                status = copied_blob.get_blob_properties().copy.status
            if status != "success":
                raise api.Failed(
                    f"Azure's copy of it ended with the status {str(status)[:20]}; run again", passing=True
                )

    def page(self, prefix: str, token: str, *, deep: bool) -> api.ListedPage:
        """See `BucketApi.page`."""
        base_prefix = self.place.key("")
        with answers(self.place):
            container, prefix_key = connect(self.place), self.place.key(prefix) or None
            if deep:
                pages = container.list_blobs(name_starts_with=prefix_key, results_per_page=PAGE_KEYS).by_page(
                    token or None
                )
            else:
                listing = container.walk_blobs(name_starts_with=prefix_key, delimiter="/", results_per_page=PAGE_KEYS)
                pages = listing.by_page(token or None)
            entries = list(next(pages, ()))
            folders = tuple(entry.name.removeprefix(base_prefix) for entry in entries if isinstance(entry, BlobPrefix))
            blobs = [blob for blob in entries if not isinstance(blob, BlobPrefix)]
            objects = tuple(
                api.ListedObject(blob.name.removeprefix(base_prefix), blob.size, blob.etag, blob.last_modified)
                for blob in blobs
            )
            return api.ListedPage(objects, folders, pages.continuation_token or "")

    def now(self) -> datetime:
        """See `BucketApi.now`."""
        dates: list[str | None] = []
        with answers(self.place):
            self._blob(MARKER).get_blob_properties(
                raw_response_hook=lambda answer: dates.append(answer.http_response.headers.get("Date"))
            )
            return api.parse_date(dates[-1] if dates else None)

    def _blob(self, key: str) -> Any:
        return connect(self.place).get_blob_client(self.place.key(key))


def _require(*facts: object) -> None:
    """Raise NoWholeAnswerError if one of them is missing."""
    if None in facts:
        raise NoWholeAnswerError("headers are missing")


class _Chunks:
    """The `Body` of a download with one request per chunk, on the condition that the blob stays the same."""

    def __init__(self, download: Any, size: int, answers: Callable[[], AbstractContextManager[None]]) -> None:
        self._chunks: Iterator[bytes] = download.chunks()
        self._left, self._answers = size, answers
        self._chunk = memoryview(b"")

    def readinto(self, into: memoryview, /) -> int:
        if not self._left or not into:
            return 0
        if not self._chunk:
            with self._answers():
                self._chunk = memoryview(next(self._chunks, b""))
                if len(self._chunk) < min(CHUNK_BYTES, self._left):
                    raise NoWholeAnswerError("it ends too early")
        count = min(len(into), len(self._chunk), self._left)
        into[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        self._left -= count
        return count

    def close(self) -> None:
        """See `Body.close`: there are no resources between chunks."""
