"""The functions that open stores, and the change of a document by compare-and-swap."""

import os
import random
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, unquote, urlsplit

from enginesmith.core.errors import ConflictError, InputError, UndecidedError
from enginesmith.registry.store.folder import FileStore as FileStore
from enginesmith.registry.store.folder import open_folder
from enginesmith.registry.store.layout import Documents as Documents
from enginesmith.registry.store.layout import Store as Store

if TYPE_CHECKING:
    from enginesmith.registry.store.objects.api import BucketApi
    from enginesmith.registry.store.objects.place import AzureLocation, GcsLocation, S3Location

# The object stores by their URI schemes, each with its library. The library is imported when such a URI is opened; if
# it is missing, the error names the extra that installs it.

# Scheme -> the extra with its library; boto3 comes with Enginesmith.
BUCKETS = {"s3": "", "gs": "gcs", "az": "azure"}
SCHEMES = "file://, s3://, gs:// or az://"
EXAMPLES = "s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix"


def scheme_of(text: str) -> str:
    """The scheme of a URI, in lower case; '' for a path."""
    scheme, separator, _ = text.partition("://")
    return scheme.lower() if separator else ""


def is_in_bucket(text: str) -> bool:
    """Whether a text is the URI of a place in a bucket."""
    return scheme_of(text) in BUCKETS


def place_in_bucket(uri: str) -> "S3Location | GcsLocation | AzureLocation":
    """The place that a bucket's URI names; no library is imported. Raises InputError."""
    from enginesmith.registry.store.objects.place import parse_azure_place, parse_gcs_place, parse_s3_place

    scheme = scheme_of(uri)
    return parse_gcs_place(uri) if scheme == "gs" else parse_azure_place(uri) if scheme == "az" else parse_s3_place(uri)


def bucket_at(uri: str) -> "BucketApi":
    """The bucket of a URI; nothing is sent yet. Raises InputError, also if the library is not installed."""
    from enginesmith.registry.store.objects.place import AzureLocation, GcsLocation, S3Location

    scheme, place = scheme_of(uri), place_in_bucket(uri)
    try:
        match place:
            case GcsLocation():
                from enginesmith.registry.store.gcs.bucket import GcsBucket

                return GcsBucket(place)
            case AzureLocation():
                from enginesmith.registry.store.azure.bucket import AzureBucket

                return AzureBucket(place)
            case S3Location():
                from enginesmith.registry.store.s3.bucket import S3Bucket

                return S3Bucket(place)
    except ModuleNotFoundError as error:
        extra = BUCKETS[scheme]
        install_target = f"'./enginesmith[{extra}]' in a clone" if extra else "boto3"
        raise InputError(
            f"registry {scheme}://...: the library {error.name} is not installed here; run pip install {install_target}"
        ) from error


# Attempts: enough for dozens of concurrent writers of one document.
_ATTEMPTS = 200
# A writer that lost a race waits a random time up to this, times its attempts, so that not all retry at once.
_LOSERS_PAUSE_S = 0.01


def written_at(store: Store, key: str) -> datetime | None:
    """The time of a document's last write, on the store's clock; None if it is absent."""
    return dict(store.stamps(f"{key.rpartition('/')[0]}/")).get(key)


def place_of(store: Documents, key: str) -> str:
    """The place of a key, for messages: a path, or a bucket's URI."""
    uri = store.locator(key)
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri


def open_store(uri: str | Path, *, create: bool = False, check: bool = True) -> Store:
    """Open the registry at a path, or a `file://`, `s3://`, `gs://` or `az://` URI, or read-only behind `http(s)://`.

    Of several URIs with commas between them, the last is the registry; the others are nearer copies to read from
    (`enginesmith.registry.store.nearest`). With `create`, it is created if it is absent, and must be writable. Without
    `check`, nothing is sent to a remote registry before its first use, and the caller checks the marker
    (`layout.MARKER`).

    Raises InputError if it cannot be a registry (a file, a place with other content, a newer format, an unknown scheme,
    a server without conditional writes) and UnavailableError if it is absent or not writable.
    """
    text = os.fspath(uri) if isinstance(uri, Path) else split_places(uri)[-1]
    if isinstance(uri, Path) or "://" not in text:
        return open_folder(Path(_not_empty(text)), create=create)
    uri_fields = _split(text)
    if uri_fields.scheme in ("http", "https"):
        from enginesmith.registry.store.http import open_http

        return open_http(text, create=create)
    if uri_fields.scheme in BUCKETS:
        # Imported here, because boto3 takes a quarter of a second to import.
        from enginesmith.registry.store.objects.store import open_registry

        return open_registry(bucket_at(text), create=create, check=check)
    if uri_fields.netloc not in ("", "localhost") or not uri_fields.path.startswith("/"):
        raise InputError(f"registry {text}: a file URI needs an absolute path, as in file:///srv/registry")
    return open_folder(Path(unquote(uri_fields.path)), create=create)


def absolute_uri(uri: str) -> str:
    """The URI of a registry that is valid in every folder and on every machine with access; nothing is opened.

    Each of several URIs with commas between them is converted. Raises InputError like `open_store`.
    """
    return ",".join(_absolute(uri_item) for uri_item in split_places(uri))


def split_places(uri: str) -> tuple[str, ...]:
    """The places of a registry's URI: those to read from, nearest first, and the registry itself last.

    They are separated by commas; a folder with a comma in its name is a `file://` URI, with %2C. Raises InputError if
    one is empty.
    """
    return tuple(_not_empty(uri_item.strip()) for uri_item in uri.split(","))


def _absolute(uri: str) -> str:
    if "://" not in uri:
        return f"file://{quote(str(Path(uri).expanduser().absolute()))}"
    return place_in_bucket(uri).uri if _split(uri).scheme in BUCKETS else uri


def _split(text: str) -> SplitResult:
    """The parts of a file://, http(s):// or bucket URI. Raises InputError for any other, and for one with credentials;
    that message repeats no part of the URI.

    A secret may contain '/', so that `urlsplit` takes a part of it for the path; only a file's path may contain '@'.
    """
    scheme, _, remainder = text.partition("://")
    if "@" in (remainder.partition("/")[0] if scheme == "file" else remainder):
        raise InputError(
            f"registry {scheme[:20]}://...: a URI without user and password is needed; give credentials in the usual "
            "ways of its cloud (environment, profile, role), and a cache's token by ENGINESMITH_CACHE_TOKEN_FILE"
        )
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise InputError(
            f"registry {text[:200]!r} is not a URI ({error}); give a path, {SCHEMES} or http://"
        ) from error
    if url.scheme not in ("file", "http", "https", *BUCKETS):
        raise InputError(f"registry {text}: scheme {url.scheme!r} is not known; use a path, {SCHEMES} or http://")
    return url


def _not_empty(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise InputError(f"registry {text!r} is not a path; give --registry or set ENGINESMITH_REGISTRY")
    return text


def change(
    store: Store,
    key: str,
    make: Callable[[bytes | None], bytes | None],
    contains: Callable[[bytes | None, bytes], bool] = lambda stored, written: stored == written,
) -> bytes | None:
    """Replace a document by the result of `make` for its content (None: absent), and return the new content.

    `make` may return None to change nothing, and is called again after every lost race. contains(stored, written):
    whether the content `stored` includes the write `written`, whose response was lost; it is then not repeated. By
    default they must be equal, so a change may be made twice if there are other writers.

    Raises ConflictError if the document keeps changing, and whatever `make` raises.
    """
    for attempt in range(_ATTEMPTS):
        time.sleep(random.uniform(0, _LOSERS_PAUSE_S) * min(attempt, 20))  # noqa: S311 - no secret
        old_bytes = store.read(key)
        new_bytes = make(old_bytes)
        if new_bytes is None or new_bytes == old_bytes:
            return old_bytes
        try:
            if store.replace(key, new_bytes, old_bytes):
                return new_bytes
        except UndecidedError:
            if contains(stored_bytes := store.read(key), new_bytes):
                return stored_bytes
    raise ConflictError(f"{key} of {store.uri} keeps changing; run again when fewer others write it")
