"""Requests to a bucket: boto3's client, which requests are repeated, and errors in words.

botocore's own retries are off, because they know neither a conditional write whose response was lost (sent again, it
would meet its own object and call that a conflict) nor a body that was cut halfway. So `ask` repeats requests.

A message has the error's code and the remedy, never the server's whole response: that may hold a key's name, a token or
a signed URL.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from threading import RLock
from typing import Any, TypeVar

import boto3
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError
from botocore.response import StreamingBody

from enginery.core.codec import JsonObject
from enginery.core.errors import EngineryError, InputError, UnavailableError
from enginery.core.parsing import find
from enginery.registry.store.files import count_io
from enginery.registry.store.s3.place import S3Location

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
# More than any server needs for one response; a body is read in pieces, each with this limit.
READ_TIMEOUT_S = 60.0
CONNECTIONS = 32
# Requests before giving up: with the pauses between them about ten seconds.
ATTEMPTS = 8
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

# Statuses that are about the object and not about the connection or the server: the caller decides what they mean.
_DECLINED = (304, 404, 409, 412, 416)
_ELSEWHERE = ("NoSuchBucket", "NotImplemented")
# The ETag of an uploaded part was cut off, so that the parts cannot be put together.
_GARBLED = ("InvalidPart", "InvalidPartOrder")
_PASSING = (
    "SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "RequestLimitExceeded", "InternalError",
    "ServiceUnavailable", "RequestTimeout", "TooManyRequests", "BadDigest", "IncompleteBody",
    "XAmzContentSHA256Mismatch",
)  # fmt: skip
_CREDENTIALS = (
    "SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "AuthorizationHeaderMalformed",
    "TokenRefreshRequired", "UnrecognizedClientException", "InvalidClientTokenId",
)  # fmt: skip
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")

# All that botocore raises for a request; ValueError, where it reads a number or a date from a header that was cut off.
FAILURES = (aws.BotoCoreError, aws.ClientError, ResponseParserError, ValueError)
_NO_WHOLE_ANSWER = (
    aws.HTTPClientError, aws.ConnectionError, aws.IncompleteReadError, ResponseParserError, ValueError,
)  # fmt: skip


class Declined(Exception):  # noqa: N818 - an answer, and no failure
    """The server says no about this object: absent (404), busy (409), a condition that does not hold (412, 416)."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


def pauses(attempts: int | None = None) -> Iterator[float | None]:
    """One item for each attempt: the seconds to wait after it before the next one, growing and random; last None."""
    count = ATTEMPTS if attempts is None else attempts
    for number in range(count - 1):
        yield random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)  # noqa: S311 - no secret
    yield None


def ask(place: S3Location, doing: str, send: Callable[[], T], attempts: int | None = None) -> T:
    """Send a request that may be sent twice, until it is answered. doing: 'reading key', for messages.

    Raises Declined, and the error that `translate_error` gives for all else.
    """
    for pause in pauses(attempts):
        try:
            return send()
        except FAILURES as error:
            refuse(place, doing, error, last=pause is None)
            time.sleep(pause or 0)
    raise AssertionError("unreachable")


def refuse(place: S3Location, doing: str, error: Exception, *, last: bool) -> None:
    """Return if it is worth another attempt. Raises Declined and EngineryErrors otherwise."""
    raise_if_declined(error)
    if last or not is_transient(error):
        count_io("errors")
        raise translate_error(place, doing, error) from error
    count_io("retries")


def raise_if_declined(error: Exception) -> None:
    """Raise Declined if the server said no about the object."""
    status, code = status_of(error), code_of(error)
    if (status in _DECLINED and code not in _ELSEWHERE) or code in _GARBLED:
        raise Declined(status, code) from error


def whole(answer: JsonObject, *names: str) -> JsonObject:
    """The answer, if it has these fields. Raises IncompleteReadError otherwise: a connection that ends among the
    headers looks to Python like an answer that has no more of them, and no body."""
    missing = [name for name in names if name not in answer]
    if missing:
        if body := find(answer, "Body", StreamingBody, None):
            body.close()
        raise aws.IncompleteReadError(actual_bytes=0, expected_bytes=missing[0])
    return answer


def status_of(error: Exception) -> int:
    """The HTTP status; 0 when there was no answer."""
    if not isinstance(error, aws.ClientError):
        return 0
    return find(error.response, "ResponseMetadata.HTTPStatusCode", int, 0)


def code_of(error: Exception) -> str:
    """S3's code such as 'NoSuchKey'; '' when there was no answer."""
    return find(error.response, "Error.Code", str, "") if isinstance(error, aws.ClientError) else ""


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    if isinstance(error, aws.ClientError):
        return (status_of(error) >= 500 and status_of(error) != 501) or code_of(error) in _PASSING
    if isinstance(error, aws.SSLError | aws.ProxyConnectionError):
        return False
    return isinstance(error, _NO_WHOLE_ANSWER)


def translate_error(place: S3Location, doing: str, error: Exception) -> EngineryError:
    """The error as InputError or UnavailableError, with what was done, the place and the remedy."""
    explain = _explain_answer if isinstance(error, aws.ClientError) else _explain_no_answer
    at = f" at {place.endpoint}" if place.endpoint else " at AWS"
    words = explain(place, at, error)
    kind = InputError if words == _UNKNOWN_REQUEST else UnavailableError
    return kind(f"{doing} in {place.locator('')}: {words}")


_UNKNOWN_REQUEST = "this server does not know the request; see docs/concepts/registry.md"


def _explain_answer(place: S3Location, at: str, error: Exception) -> str:
    """What an error response of the server means, and the remedy. at: where the server is, for messages."""
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket":
        return f"there is no bucket {place.bucket!r}{at}; create it, or check its name"
    if code in _EXPIRED:
        return f"the credentials have expired ({code}); renew them and run again"
    if code in _CREDENTIALS:
        return (
            f"the credentials are not accepted ({code}); check the access key, its secret, the session token and the "
            f"region{at}"
        )
    if code in ("RequestTimeTooSkewed", "RequestInTheFuture"):
        return f"this machine's clock differs from the server's ({code}); set it"
    if status in (301, 307, 400) and code in ("301", "307", "400", "PermanentRedirect", "TemporaryRedirect"):
        return (
            f"refused with {status} and no reason: the bucket is in another region (give ?region=...), or the "
            "credentials have expired"
        )
    if status == 403 or code in ("AccessDenied", "AllAccessDisabled"):
        return (
            "not allowed (AccessDenied); docs/concepts/registry.md has the policy that is needed (without "
            "s3:ListBucket, S3 answers so for what is absent, too)"
        )
    if status == 501 or code == "NotImplemented":
        return _UNKNOWN_REQUEST
    if code in _PASSING or status >= 500:
        return f"the server is overloaded or failing ({code or status}); run again later"
    return f"the server refuses with {status} {code[:60]}; check the URI's options"


def _explain_no_answer(_place: S3Location, at: str, error: Exception) -> str:
    """Why there was no response, and the remedy."""
    kind = type(error).__name__
    if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError | aws.CredentialRetrievalError):
        return (
            f"no usable credentials ({kind}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give "
            "this machine a role"
        )
    if isinstance(error, aws.ProfileNotFound | aws.ConfigParseError | aws.TokenRetrievalError | aws.SSOError):
        return f"the AWS configuration cannot be used ({kind}); check AWS_PROFILE and ~/.aws"
    if isinstance(error, aws.SSLError):
        return f"no TLS connection{at}; set AWS_CA_BUNDLE to its certificate authority"
    if isinstance(error, aws.ProxyConnectionError):
        return "the proxy cannot be reached; check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    if isinstance(error, _NO_WHOLE_ANSWER):
        return f"no whole answer{at} ({kind}); check the endpoint and the network, then run again"
    return f"{kind}{at}; check the URI's options and the AWS configuration"


def client(place: S3Location) -> Any:
    """boto3's client, made at first use; one per process, because neither sockets nor locks survive a fork.

    Credentials, profile, proxies and CA bundle are found as boto3 finds them. Raises UnavailableError when the AWS
    configuration cannot be used.
    """
    return _client(place, os.getpid())


@lru_cache(maxsize=1)
def _session() -> Any:
    """What boto3 reads once: service descriptions, profile, credentials. It has no sockets, so a fork may share it, but
    locks that it holds while it makes a client: `_making` keeps forks out of that."""
    return boto3.session.Session()


_making = RLock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


@lru_cache(maxsize=16)
def _client(place: S3Location, _process: int) -> Any:
    style = {} if place.path_style is None else {"addressing_style": "path" if place.path_style else "virtual"}
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        # `ask` repeats requests.
        retries={"total_max_attempts": 1},
        # Checksums of newer SDKs are refused by older servers; parts carry Content-MD5, and readers check SHA-256.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=style,
        user_agent_extra="enginery",
    )
    try:
        with _making:
            session = _session()
            region = place.region or session.region_name or "us-east-1"
            return session.client("s3", endpoint_url=place.endpoint, region_name=region, config=config)
    except (aws.BotoCoreError, ValueError) as error:
        raise translate_error(place, "configuring S3", error) from error
