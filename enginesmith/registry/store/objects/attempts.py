"""Which requests to a bucket are repeated, and when. The libraries' own retries are off, because they know neither a
conditional write whose response was lost (sent again, it would meet its own object and call that a conflict) nor a body
that was cut halfway (docs/decisions/0005-retries-of-our-own.md).
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from enginesmith.core.errors import InputError, UnavailableError
from enginesmith.registry.store.files import count_io
from enginesmith.registry.store.objects.api import BucketApi, Failed

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
# More than any server needs for one response; a body is read in pieces, each with this limit.
READ_TIMEOUT_S = 60.0
CONNECTIONS = 32
# Requests before giving up: with the pauses between them about ten seconds.
ATTEMPTS = 8
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

UNKNOWN_REQUEST = "this server does not know the request; see docs/concepts/registry.md"


def pauses(attempts: int | None = None) -> Iterator[float | None]:
    """One item for each attempt: the seconds to wait after it before the next one, growing and random; last None."""
    count = ATTEMPTS if attempts is None else attempts
    for number in range(count - 1):
        yield random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)  # noqa: S311 - no secret
    yield None


def ask(bucket: BucketApi, doing: str, send: Callable[[], T], attempts: int | None = None) -> T:
    """Send a request that may be sent twice, until it is answered. doing: 'reading key', for messages.

    Raises Declined, UnavailableError, and InputError for a request that the server lacks.
    """
    for pause in pauses(attempts):
        try:
            return send()
        except Failed as failed:
            refuse(bucket, doing, failed, last=pause is None)
            time.sleep(pause or 0)
    raise AssertionError("unreachable")


def refuse(bucket: BucketApi, doing: str, failed: Failed, *, last: bool) -> None:
    """Return if it is worth another attempt. Raises UnavailableError or InputError otherwise."""
    if last or not failed.passing:
        count_io("errors")
        kind = InputError if failed.unknown else UnavailableError
        raise kind(f"{doing} in {bucket.place.locator('')}: {failed.words}") from failed
    count_io("retries")
