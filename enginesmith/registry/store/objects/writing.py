"""Writing to a bucket: conditional writes of objects, and uploads of blobs.

**Conditional writes.** A write requires that the object is absent, or still the one that was read. Its response can be
lost after the server did it; sent again, it meets its own object and is refused (412). So every write carries a token
in the object's metadata, by which the writer knows its own object. Some servers answer 200 to a condition that does not
hold and overwrite, so that of two publishers of one version both succeed, and one version is lost. So before the first
write of a process `require_conditional_writes` writes the marker again, with the bytes that it has and such a
condition: the content stays the same whatever the server does.

**Blobs.** Small ones are one object; large ones are uploaded in parts of 16 MiB (larger above 156 GiB: S3 takes at most
10,000), all of one size but the last, so that a reader can ask for ranges that are parts. No object exists before its
upload is completed, which happens only when the bytes that were sent have the blob's digest. A sound blob is never
overwritten.
"""

import secrets
import time
from contextlib import suppress
from functools import lru_cache

from enginesmith.core.errors import InputError, UnavailableError, UndecidedError
from enginesmith.registry.store.layout import MARKER, blob_key
from enginesmith.registry.store.objects.api import CONFLICT, TOKEN, BucketApi, Declined, Failed, ObjectFacts
from enginesmith.registry.store.objects.attempts import pauses, refuse
from enginesmith.registry.store.objects.reading import HashingSink, head, read_document, stream_blob
from enginesmith.registry.store.objects.source import UploadSource


def write(bucket: BucketApi, key: str, data: bytes, expected: str | None) -> bool:
    """Put an object if it has the tag `expected` (None: is absent), and return whether this call did.

    Raises UnavailableError, and UndecidedError when the response was lost and another object is there by now.
    """
    token, unsure = secrets.token_hex(16), False
    for pause in pauses():
        try:
            bucket.put(key, data, expected, token)
            return True
        except Declined as declined:
            if declined.status != CONFLICT:  # this write was not done because of a concurrent one
                return unsure and _was_done(bucket, key, token)
            if pause is None:
                return False
        except Failed as failed:
            refuse(bucket, f"writing {key}", failed, last=pause is None)
            unsure = True
        time.sleep(pause or 0)
    raise AssertionError("unreachable")


def _was_done(bucket: BucketApi, key: str, token: str) -> bool:
    """True if the stored object has this token. Raises UndecidedError."""
    found = head(bucket, key)
    if found is not None and found.metadata.get(TOKEN) == token:
        return True
    raise UndecidedError(
        f"writing {key} in {bucket.place.locator('')}: the answer was lost, and somebody else's is there by now; "
        "look at it, then run again"
    )


@lru_cache(maxsize=64)
def require_conditional_writes(bucket: BucketApi) -> None:
    """Raise InputError for a server that ignores conditional writes; asked once per process and place.

    Raises UnavailableError when there is no registry, or it cannot be written.
    """
    where = bucket.place.locator("")
    marker = read_document(bucket, MARKER)
    if marker is None:
        raise UnavailableError(f"there is no registry at {where}; `enginesmith build` makes one")
    for wanted, expected in (("absent", None), ("another", bucket.never)):
        if not _honours_condition(bucket, marker[0], expected):
            raise InputError(
                f"the {bucket.kind} of {where} ignores conditional writes: it overwrote an object that had to be "
                f"{wanted} for that, so two publishers could overwrite each other. It can be read and not published "
                "to; use a server with conditional writes (docs/concepts/registry.md), or a file:// registry"
            )


def _honours_condition(bucket: BucketApi, marker: bytes, expected: str | None) -> bool:
    for pause in pauses():
        try:
            bucket.put(MARKER, marker, expected, "")
            return False
        except Declined as declined:
            if declined.status != CONFLICT or pause is None:
                return True
        except Failed as failed:
            if failed.unknown:
                return False
            refuse(bucket, "asking for conditional writes", failed, last=pause is None)
        time.sleep(pause or 0)
    raise AssertionError("unreachable")


def put(bucket: BucketApi, source: UploadSource) -> None:
    """Upload a blob unless it is stored and sound. Raises UnavailableError, and IntegrityError when the source changes
    meanwhile."""
    key = blob_key(source.blob.digest)
    for pause in pauses():
        found = head(bucket, key)
        if found is not None and _is_sound(bucket, key, found, source):
            return
        expected = None if found is None else found.tag
        try:
            if source.small:
                bucket.put(key, source.whole(), expected, "")
            else:
                bucket.put_large(key, source, expected)
            return
        except Declined:
            # Another writer put it or aborted this upload, or the response to this upload was lost: look again.
            if pause is None:
                where = bucket.place.locator(key)
                raise UnavailableError(f"{where} keeps changing while it is written; run again") from None
        except Failed as failed:
            refuse(bucket, f"writing {key}", failed, last=pause is None)
        time.sleep(pause or 0)


def _is_sound(bucket: BucketApi, key: str, found: ObjectFacts, source: UploadSource) -> bool:
    """Whether the object has the source's bytes: by its checksum where that tells, else by reading it."""
    if found.size != source.size:
        return False
    known = bucket.holds(found, source)
    if known is not None:
        return known
    with suppress(Declined):
        return stream_blob(bucket, key, HashingSink()) == source.blob.digest
    return False
