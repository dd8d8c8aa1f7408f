"""Whether a server honours conditional writes, found out before the first write of each process.

Some answer 200 to `If-None-Match: *` and overwrite: with them two publishers of one version both win, and one of them
is lost without a word. The marker is written again, with the bytes that it has: if the condition counts nothing
changes, and if not, nothing changes either.
"""

from functools import lru_cache

from enginery.core.errors import InputError, UnavailableError
from enginery.registry.store.keys import MARKER
from enginery.registry.store.s3.place import S3Location
from enginery.registry.store.s3.reading import read_document
from enginery.registry.store.s3.retries import FAILURES, Declined, code_of, pauses, refuse
from enginery.registry.store.s3.writing import ABSENT, match_etag, put_once

# An ETag that no object has: that of an MD5 of zeros.
_NOBODYS = f'"{"0" * 32}"'


@lru_cache(maxsize=64)
def require_conditional_writes(place: S3Location) -> None:
    """Raise InputError for a server that ignores conditional writes; asked once per process and place.

    Raises UnavailableError when there is no registry, or it cannot be written.
    """
    marker = read_document(place, MARKER)
    if marker is None:
        raise UnavailableError(f"there is no registry at {place.locator('')}; `enginery build` makes one")
    for header, condition in (("If-None-Match: *", ABSENT), ("If-Match", match_etag(_NOBODYS))):
        if not _honours_condition(place, marker[0], condition):
            raise InputError(
                f"the S3 server of {place.locator('')} ignores conditional writes: it took a PUT with {header} that it "
                "had to refuse, so two publishers could overwrite each other. It can be read and not published to; "
                "use Amazon S3, a server with conditional writes (docs/concepts/registry.md), or a file:// registry"
            )


def _honours_condition(place: S3Location, marker: bytes, condition: dict[str, str]) -> bool:
    for pause in pauses():
        try:
            put_once(place, MARKER, marker, condition)
            return False
        except Declined as declined:
            if declined.status != 409 or pause is None:
                return True
        except FAILURES as error:
            if code_of(error) == "NotImplemented":
                return False
            refuse(place, "asking for conditional writes", error, last=pause is None)
    raise AssertionError("unreachable")
