"""Google's client and session, and their errors as answers or failures, with messages.

A message has the status and the remedy, never the server's whole response, which may contain a token or a signed URL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import google.auth
import requests
from google.api_core import exceptions as google_errors
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Bucket, Client
from google.cloud.storage import exceptions as storage
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.place import GcsLocation

GOOGLE = "https://storage.googleapis.com"
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)

# Statuses about the object, not about the connection or the server: the caller interprets them.
_DECLINED = (304, 404, 409, 412, 416)
# Besides 5xx: too many requests, too slow; 400 for an upload whose bytes do not have the stated checksum.
_PASSING = (408, 429)
_CORRUPT = ("checksum", "md5", "crc32c", "content hash")

# The exceptions of a request. KeyError and the like: an answer was cut off, and Google's library takes it for another
# kind.
FAILURES = (
    google_errors.GoogleAPIError, auth.GoogleAuthError, storage.InvalidResponse, storage.DataCorruption,
    requests.RequestException, HTTPError, OSError, KeyError, ValueError, TypeError,
    AttributeError,
)  # fmt: skip


@dataclass(frozen=True)
class GcsConnection:
    """A client for a bucket, and the session for streamed bodies. url: of the server."""

    bucket: Bucket
    session: AuthorizedSession
    url: str


def timeouts() -> tuple[float, float]:
    """Timeouts in seconds: for a connection, and for each piece of an answer."""
    return api.CONNECT_TIMEOUT_S, api.READ_TIMEOUT_S


def connect(place: GcsLocation) -> GcsConnection:
    """The connection, created on first use; one per process, because neither sockets nor locks survive a fork.

    Raises Failed if the credentials cannot be used.
    """
    return _connect(place, os.getpid())


@lru_cache(maxsize=16)
def _connect(place: GcsLocation, _process: int) -> GcsConnection:
    with answers(place):
        # Application Default Credentials; none for a server over plain http, where everybody could read the token.
        is_plain = place.endpoint is not None and place.endpoint.startswith("http://")
        credentials: Credentials = AnonymousCredentials() if is_plain else google.auth.default(scopes=_SCOPES)[0]
        session = AuthorizedSession(credentials)
        pool = HTTPAdapter(pool_connections=api.CONNECTIONS, pool_maxsize=api.CONNECTIONS, max_retries=0)
        session.mount("https://", pool)
        session.mount("http://", pool)
        options = {"api_endpoint": place.endpoint} if place.endpoint else {}
        # A project is only needed to list buckets, which this module does not do.
        client = Client(project="enginesmith", credentials=credentials, client_options=options)
        # For its traces the library requests the bucket in its own thread, even with traces off: an extra request, an
        # extra permission, and a thread that a fork may meet. This attribute prevents it.
        client._bucket_metadata_cache = None
        return GcsConnection(client.bucket(place.bucket), session, place.endpoint or GOOGLE)


@contextmanager
def answers(place: GcsLocation) -> Iterator[None]:
    """Convert exceptions of Google's libraries: to Declined for a refusal about the object, else to Failed."""
    try:
        yield
    except FAILURES as error:
        status = status_of(error)
        lacks_bucket = status == 404 and "bucket does not exist" in str(error).lower()
        if status in _DECLINED and not lacks_bucket:
            raise api.Declined(status, type(error).__name__) from error
        explanation = _explain_answer(place, status, error) if status else _explain_no_answer(place, error)
        raise api.Failed(explanation, passing=is_transient(status, error)) from error


def status_of(error: Exception) -> int:
    """The HTTP status; 0 when there was no answer."""
    if isinstance(error, google_errors.GoogleAPICallError):
        return int(error.code or 0)
    if isinstance(error, storage.InvalidResponse):
        return int(error.response.status_code)
    return 0


def is_transient(status: int, error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    if status:
        is_corrupt = status == 400 and any(word in str(error).lower() for word in _CORRUPT)
        return (status >= 500 and status != 501) or status in _PASSING or is_corrupt or status < 400
    if isinstance(error, auth.GoogleAuthError):
        return isinstance(error, auth.TransportError) or bool(getattr(error, "retryable", False))
    return not isinstance(error, requests.exceptions.SSLError | requests.exceptions.ProxyError)


def _explain_answer(place: GcsLocation, status: int, error: Exception) -> str:
    place_text = f" at {place.endpoint}" if place.endpoint else " at Google"
    if status == 404:
        return f"there is no bucket {place.bucket!r}{place_text}; create it, or check its name"
    if status == 401:
        return "the credentials are not accepted (401); check GOOGLE_APPLICATION_CREDENTIALS, or log in again"
    if status == 403:
        return (
            "not allowed (403); docs/concepts/registry.md has the roles that are needed (without "
            "storage.objects.list, Google gives this answer for absent objects, too)"
        )
    if status == 501:
        return api.UNKNOWN_REQUEST
    if is_transient(status, error):
        return f"the server is overloaded or failing ({status}); run again later"
    return f"the server refuses with {status}; check the URI's options"


def _explain_no_answer(place: GcsLocation, error: Exception) -> str:
    place_text = f" at {place.endpoint}" if place.endpoint else " at Google"
    error_name = type(error).__name__
    if isinstance(error, auth.GoogleAuthError):
        return (
            f"no usable credentials ({error_name}); set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud auth "
            "application-default login`, or give this machine or its Kubernetes service account a Google service "
            "account"
        )
    if isinstance(error, requests.exceptions.SSLError):
        return f"no TLS connection{place_text}; set REQUESTS_CA_BUNDLE to its certificate authority"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy cannot be reached; check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    return f"no complete answer{place_text} ({error_name}); check the endpoint and the network, then run again"
