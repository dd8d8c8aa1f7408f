"""boto3's client, and its errors as answers or failures, with messages.

A message has the error's code and the remedy, never the server's whole response, which may contain a key's name, a
token or a signed URL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock
from typing import Any

import boto3
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError
from botocore.response import StreamingBody

from enginesmith.core.parsing import find
from enginesmith.core.requirements import JsonObject
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.place import S3Location

# Statuses about the object, not about the connection or the server: the caller interprets them.
_DECLINED = (304, 404, 409, 412, 416)
_ELSEWHERE = ("NoSuchBucket", "NotImplemented")
# The ETag of an uploaded part was cut off, so that the parts cannot be combined.
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

# The exceptions of botocore for a request; ValueError for a number or a date in a header that was cut off.
FAILURES = (aws.BotoCoreError, aws.ClientError, ResponseParserError, ValueError)
_NO_WHOLE_ANSWER = (
    aws.HTTPClientError, aws.ConnectionError, aws.IncompleteReadError, ResponseParserError, ValueError,
)  # fmt: skip


@contextmanager
def answers(place: S3Location) -> Iterator[None]:
    """Convert exceptions of boto3: to Declined for a refusal about the object, else to Failed."""
    try:
        yield
    except FAILURES as error:
        status, code = status_of(error), code_of(error)
        if (status in _DECLINED and code not in _ELSEWHERE) or code in _GARBLED:
            raise api.Declined(status, code) from error
        explanation = explain(place, error)
        raise api.Failed(explanation, passing=is_transient(error)) from error


def whole(answer: JsonObject, *field_names: str) -> JsonObject:
    """The answer, if it has these fields. Raises IncompleteReadError otherwise: if a connection ends among the headers,
    Python takes it for an answer with fewer headers and no body."""
    missing_fields = [name for name in field_names if name not in answer]
    if missing_fields:
        if body := find(answer, "Body", StreamingBody, None):
            body.close()
        raise aws.IncompleteReadError(actual_bytes=0, expected_bytes=missing_fields[0])
    return answer


def status_of(error: Exception) -> int:
    """The HTTP status; 0 without an answer."""
    if not isinstance(error, aws.ClientError):
        return 0
    return find(error.response, "ResponseMetadata.HTTPStatusCode", int, 0)


def code_of(error: Exception) -> str:
    """S3's code such as 'NoSuchKey'; '' without an answer."""
    return find(error.response, "Error.Code", str, "") if isinstance(error, aws.ClientError) else ""


def is_transient(error: Exception) -> bool:
    """Whether the same request may soon succeed."""
    if isinstance(error, aws.ClientError):
        return (status_of(error) >= 500 and status_of(error) != 501) or code_of(error) in _PASSING
    if isinstance(error, aws.SSLError | aws.ProxyConnectionError):
        return False
    return isinstance(error, _NO_WHOLE_ANSWER)


def explain(place: S3Location, error: Exception) -> str:
    """The error and the remedy, as text."""
    place_text = f" at {place.endpoint}" if place.endpoint else " at AWS"
    explain_error = _explain_answer if isinstance(error, aws.ClientError) else _explain_no_answer
    return explain_error(place, place_text, error)


def _explain_answer(place: S3Location, place_text: str, error: Exception) -> str:
    """The meaning of an error response, and the remedy, as text. place_text: the server's place, for messages."""
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket":
        return f"there is no bucket {place.bucket!r}{place_text}; create it, or check its name"
    if code in _EXPIRED:
        return f"the credentials have expired ({code}); renew them and run again"
    if code in _CREDENTIALS:
        return (
            f"the credentials are not accepted ({code}); check the access key, its secret, the session token and the "
            f"region{place_text}"
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
            "s3:ListBucket, S3 gives this answer for absent objects, too)"
        )
    if status == 501 or code == "NotImplemented":
        return api.UNKNOWN_REQUEST
    if code in _PASSING or status >= 500:
        return f"the server is overloaded or failing ({code or status}); run again later"
    return f"the server refuses with {status} {code[:60]}; check the URI's options"


def _explain_no_answer(_place: S3Location, place_text: str, error: Exception) -> str:
    error_name = type(error).__name__
    if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError | aws.CredentialRetrievalError):
        return (
            f"no usable credentials ({error_name}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or give this machine a role"
        )
    if isinstance(error, aws.ProfileNotFound | aws.ConfigParseError | aws.TokenRetrievalError | aws.SSOError):
        return f"the AWS configuration cannot be used ({error_name}); check AWS_PROFILE and ~/.aws"
    if isinstance(error, aws.SSLError):
        return f"no TLS connection{place_text}; set AWS_CA_BUNDLE to its certificate authority"
    if isinstance(error, aws.ProxyConnectionError):
        return "the proxy cannot be reached; check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    if isinstance(error, _NO_WHOLE_ANSWER):
        return f"no complete answer{place_text} ({error_name}); check the endpoint and the network, then run again"
    return f"{error_name}{place_text}; check the URI's options and the AWS configuration"


def client(place: S3Location) -> Any:
    """boto3's client, created on first use; one per process, because neither sockets nor locks survive a fork.

    Credentials, profile, proxies and CA bundle are found as boto3 finds them. Raises Failed if the AWS configuration
    cannot be used.
    """
    return _client(place, os.getpid())


@lru_cache(maxsize=1)
def _session() -> Any:
    """boto3's session, with data that is read once: service descriptions, profile, credentials. It has no sockets, so a
    fork may share it, but it holds locks while it creates a client: `_making` prevents forks meanwhile."""
    return boto3.session.Session()


_making = RLock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


@lru_cache(maxsize=16)
def _client(place: S3Location, _process: int) -> Any:
    s3_options = {} if place.path_style is None else {"addressing_style": "path" if place.path_style else "virtual"}
    config = Config(
        connect_timeout=api.CONNECT_TIMEOUT_S,
        read_timeout=api.READ_TIMEOUT_S,
        max_pool_connections=api.CONNECTIONS,
        tcp_keepalive=True,
        # `api.ask` repeats requests.
        retries={"total_max_attempts": 1},
        # Older servers refuse the checksums of newer SDKs; parts carry Content-MD5, and readers check SHA-256.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=s3_options,
        user_agent_extra="enginesmith",
    )
    try:
        with _making:
            session = _session()
            region = place.region or session.region_name or "us-east-1"
            return session.client("s3", endpoint_url=place.endpoint, region_name=region, config=config)
    except (aws.BotoCoreError, ValueError) as error:
        raise api.Failed(explain(place, error)) from error
