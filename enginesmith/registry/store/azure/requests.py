"""Azure's client, and its errors as answers or failures, in words.

A message has the error's code and the remedy, never the server's whole response: that may hold a token or a signed URL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from xml.etree.ElementTree import ParseError

from azure.core import MatchConditions
from azure.core import exceptions as az
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.storage.blob import ContainerClient

from enginesmith.registry.store.azure.place import AzureLocation
from enginesmith.registry.store.objects import attempts
from enginesmith.registry.store.objects.api import CONDITION_FAILED, Declined, Failed
from enginesmith.registry.store.objects.attempts import UNKNOWN_REQUEST

# Bytes of one request of a download. Azure's library holds all of them in memory.
CHUNK_BYTES = 8 << 20

# Statuses that are about the object and not about the connection or the server: the caller decides what they mean.
_DECLINED = (304, 404, 409, 412, 416)
_ELSEWHERE = ("ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled", "AccountBeingCreated")
# If-None-Match: * where a blob is. Other 409s are about a concurrent request.
_EXISTS = ("BlobAlreadyExists", "UnauthorizedBlobOverwrite")
# Another writer's commit has dropped the blocks of this upload.
_DROPPED = ("InvalidBlockList", "InvalidBlobOrBlock")
_PASSING = ("ServerBusy", "OperationTimedOut", "InternalError", "Md5Mismatch", "IncompleteBody", "RequestBodyInvalid")

# All that azure-storage-blob raises for a request. ParseError and the like: where an answer was cut off, and Azure's
# library takes it for another kind.
FAILURES = (az.AzureError, ParseError, OSError, ValueError, TypeError, KeyError, AttributeError)


def connect(place: AzureLocation) -> ContainerClient:
    """The client, made at first use; one per process, because neither sockets nor locks survive a fork.

    Raises Failed when the credentials cannot be used.
    """
    return _connect(place, os.getpid())


@lru_cache(maxsize=16)
def _connect(place: AzureLocation, _process: int) -> ContainerClient:
    with answers(place):
        return ContainerClient(
            place.url,
            place.container,
            credential=_credential(place),
            connection_timeout=attempts.CONNECT_TIMEOUT_S,
            read_timeout=attempts.READ_TIMEOUT_S,
            # `attempts.ask` repeats requests.
            retry_total=0,
            max_single_get_size=CHUNK_BYTES,
            max_chunk_get_size=CHUNK_BYTES,
            raw_response_hook=_check_length,
            user_agent="enginesmith",
        )


def _check_length(answer: Any) -> None:
    """Raise ValueError for a part of a blob that is longer than was asked for: the library takes memory for the length
    that the server states."""
    asked, headers = answer.http_request.headers, answer.http_response.headers
    if "x-ms-range" in asked and int(headers.get("Content-Length") or 0) > CHUNK_BYTES:
        answer.http_response.internal_response.close()
        raise ValueError("more bytes than were asked for")


def _credential(place: AzureLocation) -> Any:
    """The account's key or a signature from the environment, else what DefaultAzureCredential finds. The library itself
    sends no token over plain http."""
    if key := os.environ.get("AZURE_STORAGE_KEY"):
        return AzureNamedKeyCredential(place.account, key)
    if signature := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return AzureSasCredential(signature.removeprefix("?"))
    from azure.identity import DefaultAzureCredential  # a tenth of a second

    return DefaultAzureCredential()


def condition_of(expected: str | None) -> dict[str, object]:
    """The condition that a blob has this ETag, or (None) is absent."""
    if expected is None:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": expected, "match_condition": MatchConditions.IfNotModified}


@contextmanager
def answers(place: AzureLocation) -> Iterator[None]:
    """Turn what Azure's library raises inside into Declined, where the server said no about the blob, or Failed."""
    try:
        yield
    except FAILURES as error:
        status, code = status_of(error), code_of(error)
        if code in _EXISTS:
            raise Declined(CONDITION_FAILED, code) from error
        if (status in _DECLINED and code not in _ELSEWHERE) or code in _DROPPED:
            raise Declined(status, code) from error
        words = _explain_answer(place, status, code) if status else _explain_no_answer(place, error)
        raise Failed(words, passing=_is_transient(status, code, error), unknown=words == UNKNOWN_REQUEST) from error


def status_of(error: Exception) -> int:
    """The HTTP status; 0 when there was no whole answer."""
    return int(error.status_code or 0) if isinstance(error, az.HttpResponseError) else 0


def code_of(error: Exception) -> str:
    """Azure's code such as 'BlobNotFound'; '' when there was no answer."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _is_transient(status: int, code: str, error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    if status:
        # Without a code, the request could not be read. Azurite's code for another MD5 is InvalidOperation.
        corrupt = status == 400 and (not code or "md5" in str(error).lower())
        return corrupt or (status >= 500 and status != 501) or status in (408, 429) or code in _PASSING or status < 400
    return not isinstance(error, az.ClientAuthenticationError) and not _mentions(error, "SSL", "ProxyError")


def _mentions(error: Exception, *names: str) -> bool:
    return any(name in f"{type(error.__cause__).__name__} {error}" for name in names)


def _explain_answer(place: AzureLocation, status: int, code: str) -> str:
    """What an error response of the server means, and the remedy."""
    at = f" at {place.url}"
    if code in _ELSEWHERE:
        return f"there is no container {place.container!r}{at} ({code}); create it, or check its name"
    if status == 401 or code in ("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"):
        return (
            f"the credentials are not accepted ({code or status}); check AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, "
            "the identity and this machine's clock"
        )
    if status == 403:
        return f"not allowed ({code or status}); docs/concepts/registry.md has the role that is needed"
    if status == 501:
        return UNKNOWN_REQUEST
    if status >= 500 or code in _PASSING or status in (408, 429):
        return f"the server is overloaded or failing ({code or status}); run again later"
    return f"the server refuses with {status} {code[:60]}; check the URI's options"


def _explain_no_answer(place: AzureLocation, error: Exception) -> str:
    """Why there was no response, and the remedy."""
    at, kind = f" at {place.url}", type(error).__name__
    if isinstance(error, az.ClientAuthenticationError):
        return (
            f"no usable credentials ({kind}); give this machine or its Kubernetes service account an identity, run "
            "`az login`, or set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN"
        )
    if _mentions(error, "SSL"):
        return f"no TLS connection{at}; set REQUESTS_CA_BUNDLE to its certificate authority"
    if _mentions(error, "ProxyError"):
        return "the proxy cannot be reached; check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    if _mentions(error, "non-TLS"):
        return f"a token is not sent over plain http{at}; give an https endpoint, or set AZURE_STORAGE_KEY"
    return f"no whole answer{at} ({kind}); check the endpoint and the network, then run again"
