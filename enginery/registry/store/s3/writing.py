"""Writing to a bucket under a condition: an object that must be absent, or still be the one that was read.

The answer to a write can be lost after the server did it. Sent again, the write meets its own object and is refused
(412). So every write carries a token in the object's metadata: who finds it there knows that the object is its own.
"""

import base64
import hashlib
import secrets
import time

from botocore import exceptions as aws

from enginery.core.errors import UndecidedError
from enginery.registry.store.s3.client import client
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.reading import head
from enginery.registry.store.s3.retries import FAILURES, Declined, pauses, raise_if_declined, refuse

TOKEN = "enginery-write"  # noqa: S105 - the name of a header
ABSENT = {"IfNoneMatch": "*"}


def match_etag(etag: str) -> dict[str, str]:
    """The condition that an object still is the one with this ETag."""
    return {"IfMatch": etag}


def md5_of(data: bytes) -> str:
    """MD5 as the Content-MD5 header has it. The server refuses a part that it received otherwise (BadDigest)."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def write(place: S3Location, key: str, data: bytes, condition: dict[str, str]) -> bool:
    """Put an object if the condition holds; whether this call did. Raises UndecidedError when the answer was lost and
    another object is there by now, UnavailableError."""
    token, unsure = secrets.token_hex(16), False
    for pause in pauses():
        try:
            put_once(place, key, data, condition, token)
            return True
        except Declined as declined:
            if declined.status != 409:  # 409: another write is on its way, and this one was not done
                return unsure and _was_done(place, key, token)
            if pause is None:
                return False
        except FAILURES as error:
            refuse(place, f"writing {key}", error, last=pause is None)
            unsure = True
        time.sleep(pause or 0)
    raise AssertionError("unreachable")


def put_once(place: S3Location, key: str, data: bytes, condition: dict[str, str], token: str = "") -> None:
    """One PUT, not repeated. Raises Declined and botocore's errors."""
    try:
        client(place).put_object(
            Bucket=place.bucket,
            Key=place.key(key),
            Body=data,
            ContentMD5=md5_of(data),
            Metadata={TOKEN: token} if token else {},
            **place.encryption(),
            **condition,
        )
    except aws.ClientError as error:
        raise_if_declined(error)
        raise


def _was_done(place: S3Location, key: str, token: str) -> bool:
    """Whether the object there is the one that was written under this token."""
    found = head(place, key)
    if found is not None and found.metadata.get(TOKEN) == token:
        return True
    raise UndecidedError(
        f"writing {key} in {place.locator('')}: the answer was lost, and somebody else's is there by now; "
        "look at it, then run again"
    )
