"""The store in a bucket."""

import io
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, ClassVar

from enginesmith.core.errors import InputError, IntegrityError, UnavailableError, UndecidedError, digest_of_bytes
from enginesmith.registry.store import files, layout
from enginesmith.registry.store.cache import BlobCache, cached_file, local_cache
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.layout import Store
from enginesmith.registry.store.objects import api, reading
from enginesmith.registry.store.objects.place import BucketPlace

# Writing to a bucket: conditional writes of objects, and uploads of blobs.
#
# **Conditional writes.** A write requires that the object is absent, or still the one that was read. Its response can
# be lost after the server wrote; sent again, it finds its own object and is refused (412). So every write has a token
# in the object's metadata, which identifies the writer's own object. Some servers ignore the condition, overwrite and
# answer 200: then two publishers of one version both succeed, and one version is lost. So before the first write of a
# process `require_conditional_writes` writes the marker again, with its present bytes and a condition that does not
# hold: the content stays the same whatever the server does.
#
# **Blobs.** Small ones are one object; large ones are uploaded in parts of 16 MiB (larger above 156 GiB: S3 allows at
# most 10,000), all of one size but the last, so that a reader can request ranges that are parts. No object exists
# before its upload is completed, which happens only if the bytes that were sent have the blob's digest. A sound blob is
# never overwritten.


def write(bucket: api.BucketApi, key: str, data: bytes, expected: str | None) -> bool:
    """Put an object if it has the tag `expected` (None: is absent), and return whether this call did.

    Raises UnavailableError, and UndecidedError if the response was lost and the object is now absent or another one.
    """
    token, is_uncertain = secrets.token_hex(16), False
    for pause in api.pauses():
        try:
            bucket.put(key, data, expected, token)
            return True
        except api.Declined as refusal:
            if refusal.status != api.CONFLICT:  # not written because of a concurrent write
                return is_uncertain and _was_done(bucket, key, token)
            if pause is None:
                return False
        except api.Failed as failure:
            api.refuse(bucket, f"writing {key}", failure, last=pause is None)
            is_uncertain = True
        time.sleep(pause or 0)
    raise AssertionError("unreachable")


def _was_done(bucket: api.BucketApi, key: str, token: str) -> bool:
    """True if the stored object has this token. Raises UndecidedError if it has another one, or is absent."""
    attributes = reading.head(bucket, key)
    if attributes is not None and attributes.metadata.get(api.TOKEN) == token:
        return True
    raise UndecidedError(
        f"writing {key} in {bucket.place.locator('')}: the response was lost, and the key now has "
        f"{'no object' if attributes is None else 'the object of another writer'}; look at it, then run again"
    )


@lru_cache(maxsize=64)
def require_conditional_writes(bucket: api.BucketApi) -> None:
    """Raise InputError for a server that ignores conditional writes; tested once per process and place.

    Raises UnavailableError if there is no registry, or it cannot be written.
    """
    location = bucket.place.locator("")
    marker = reading.read_document(bucket, layout.MARKER)
    if marker is None:
        raise UnavailableError(f"there is no registry at {location}; `enginesmith build` makes one")
    for precondition, expected_tag in (("is absent", None), ("has another tag", bucket.never)):
        if not _honours_condition(bucket, marker[0], expected_tag):
            raise InputError(
                f"the {bucket.kind} of {location} ignores conditional writes: it overwrote an object although the "
                f"write required that it {precondition}, so two publishers could overwrite each other. It can be read, "
                "but not published to; use a server with conditional writes (docs/concepts/registry.md), or a "
                "file:// registry"
            )


def _honours_condition(bucket: api.BucketApi, marker: bytes, expected: str | None) -> bool:
    for pause in api.pauses():
        try:
            bucket.put(layout.MARKER, marker, expected, "")
            return False
        except api.Declined as refusal:
            if refusal.status != api.CONFLICT or pause is None:
                return True
        except api.Failed as failure:
            if failure.unknown:
                return False
            api.refuse(bucket, "asking for conditional writes", failure, last=pause is None)
        time.sleep(pause or 0)
    raise AssertionError("unreachable")


def put(bucket: api.BucketApi, source: api.UploadSource) -> None:
    """Upload a blob unless it is stored and sound. Raises UnavailableError; IntegrityError if the source changes."""
    key = layout.blob_key(source.blob.digest)
    for pause in api.pauses():
        attributes = reading.head(bucket, key)
        if attributes is not None and _is_sound(bucket, key, attributes, source):
            return
        expected_tag = None if attributes is None else attributes.tag
        try:
            if source.small:
                bucket.put(key, source.whole(), expected_tag, "")
            else:
                bucket.put_large(key, source, expected_tag)
            return
        except api.Declined:
            # Another writer stored it or aborted this upload, or the response to this upload was lost: check again.
            if pause is None:
                location = bucket.place.locator(key)
                raise UnavailableError(f"{location} keeps changing while it is written; run again") from None
        except api.Failed as failure:
            api.refuse(bucket, f"writing {key}", failure, last=pause is None)
        time.sleep(pause or 0)


def _is_sound(bucket: api.BucketApi, key: str, facts: api.ObjectFacts, source: api.UploadSource) -> bool:
    """Whether the object has the source's bytes: by its checksum if possible, else by reading it."""
    if facts.size != source.size:
        return False
    is_same = bucket.holds(facts, source)
    if is_same is not None:
        return is_same
    with suppress(api.Declined):
        return reading.stream_blob(bucket, key, reading.HashingSink()) == source.blob.digest
    return False


_DISCARDED = "discarded"
# Attempts when a registry is opened: few, since a wrong endpoint is likelier than a temporary fault.
_ATTEMPTS = 4


@dataclass(frozen=True)
class ObjectStore(Store):
    """The store in `bucket`. `open_store` creates and checks it. May be used by many threads and after a fork."""

    bucket: api.BucketApi
    near = False  # see `Store.near`
    # The remedy for a damaged blob.
    remedy: ClassVar[str] = "run `enginesmith registry fsck --repair`, then build again"

    @property
    def place(self) -> BucketPlace:
        """The place of the registry."""
        return self.bucket.place

    @property
    def uri(self) -> str:
        """'s3://bucket/prefix?endpoint=...', without credentials."""
        return self.place.uri

    def locator(self, key: str) -> str:
        """See `Store.locator`."""
        return self.place.locator(layout.check_key(key))

    def put_and_digest_file(self, path: Path) -> files.BlobDigest:
        """See `Store.put_and_digest_file`. Raises IntegrityError, and stores nothing, if the file changes meanwhile."""
        require_conditional_writes(self.bucket)
        with files.reachable(f"reading {path}"), path.open("rb") as stream:
            digest = files.digest_stream(stream)
            put(self.bucket, api.UploadSource(stream, path.stat().st_size, digest))
        return digest

    def put_bytes(self, data: bytes) -> str:
        """See `Store.put_bytes`."""
        require_conditional_writes(self.bucket)
        digest = digest_of_bytes(data)
        put(self.bucket, api.UploadSource(io.BytesIO(data), len(data), files.BlobDigest(digest)))
        return digest

    def stored_size(self, digest: str) -> int | None:
        """See `Store.stored_size`."""
        attributes = reading.head(self.bucket, layout.blob_key(digest))
        return None if attributes is None else attributes.size

    def path(self, digest: str) -> Path:
        """See `Store.path`. The file is this machine's cached copy, verified when it was downloaded."""
        return cached_file(digest, lambda sink: self._stream_verified(digest, sink))

    def fetch(self, digest: str, dest: Path) -> None:
        """See `Store.fetch`. A blob in this machine's cache is not downloaded again."""
        cache = local_cache()
        size = None if cache is not None and cache.holds(digest) else self.size(digest)
        with files.reachable(f"copying blob {digest} of {self.uri} to {dest}"):
            files.make_folder(dest.parent)
            files.sweep(dest.parent)
            with files.start_atomic_write(dest.parent) as file:
                sink = file.stream
                if cache is None or (size or 0) > cache.limit_bytes or not self._copy_from_cache(cache, digest, sink):
                    self._stream_verified(digest, sink)
                file.commit(dest)

    def read_blob(self, digest: str, max_bytes: int = layout.MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        buffer = io.BytesIO()
        self._stream_verified(digest, buffer, max_bytes)
        return buffer.getvalue()

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Fill]:
        """See `Store.open_range`."""

        def fill(into: memoryview) -> None:
            try:
                blob_range.fill(into)
            except api.Declined as refusal:
                if refusal.status == api.ABSENT:
                    raise self.lost_error(digest) from refusal
                raise IntegrityError(
                    f"blob {digest} of {self.uri} ends before it should, or the server has no ranges; {self.remedy}"
                ) from refusal

        with closing(reading.Range(self.bucket, layout.blob_key(digest), offset, size)) as blob_range:
            yield fill

    def rehash(self, digest: str) -> files.BlobDigest:
        """See `Store.rehash`."""
        try:
            sink = reading.HashingSink()
            return files.BlobDigest(reading.stream_blob(self.bucket, layout.blob_key(digest), sink), sink.blake3)
        except api.Declined as refusal:
            raise self.lost_error(digest) from refusal

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        document = reading.read_document(self.bucket, layout.check_key(key))
        return None if document is None else document[0]

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """See `Store.read_if_changed`. An unchanged document costs one request without a body."""
        return reading.read_changed(self.bucket, layout.check_key(key), tag)

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        # Undecided means that another writer's document is stored: it is never replaced, so this call wrote none.
        with suppress(UndecidedError):
            return self.replace(key, data, None)
        return False

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """See `Store.replace`."""
        layout.check_key(key)
        require_conditional_writes(self.bucket)
        if expected is None:
            return write(self.bucket, key, data, None)
        tag = reading.tag_of(self.bucket, key, expected)
        return tag is not None and write(self.bucket, key, data, tag)

    def remove(self, key: str) -> None:
        """See `Store.remove`. A bucket with versioning keeps the bytes until its own rule deletes them."""
        layout.check_key(key)
        with suppress(api.Declined):
            api.ask(self.bucket, f"deleting {key}", lambda: self.bucket.delete(key))

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`."""
        keys = api.keys_below(self.bucket, self._prefix(prefix))
        return (key for key in keys if prefix or not key.startswith(f"{_DISCARDED}/"))

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`."""
        child_names = api.names_below(self.bucket, self._prefix(prefix))
        return (name for name in child_names if prefix or name != f"{_DISCARDED}/")

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.sizes`."""
        return api.sizes_below(self.bucket, self._prefix(prefix))

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """See `Store.stamps`."""
        return api.stamps_below(self.bucket, self._prefix(prefix))

    def now(self) -> datetime:
        """See `Store.now`: the date of the server's answer about the marker."""
        try:
            return api.ask(self.bucket, "asking for the time", self.bucket.now)
        except api.Declined as refusal:
            raise UnavailableError(f"there is no registry at {self.locator(layout.MARKER)}; check the URI") from refusal

    def discard(self, digest: str) -> None:
        """See `Store.discard`. Copies it to discarded/ and deletes it, unless it was replaced in between."""
        key = layout.blob_key(digest)
        with suppress(api.Declined):
            attributes = reading.head(self.bucket, key)
            if attributes is None or reading.stream_blob(self.bucket, key, reading.HashingSink()) == digest:
                return
            api.ask(
                self.bucket,
                f"moving {key} away",
                lambda: self.bucket.copy(key, f"{_DISCARDED}/{digest}", attributes.tag),
            )
            api.ask(self.bucket, f"deleting {key}", lambda: self.bucket.delete(key, attributes.tag))

    def strays(self) -> tuple[str, ...]:
        """See `Store.strays`."""
        return self.bucket.strays()

    def sweep(self) -> int:
        """See `Store.sweep`."""
        return self.bucket.sweep()

    def _prefix(self, prefix: str) -> str:
        if prefix:
            layout.check_key(prefix.removesuffix("/"))
        return prefix

    def _stream_verified(self, digest: str, sink: BinaryIO, max_bytes: int = layout.MAX_BLOB_BYTES) -> str:
        """Write a blob's bytes to `sink` and return its digest. Wrong bytes are downloaded once more, since the network
        may have changed them; then IntegrityError is raised."""
        sink_offset, actual_digest = sink.tell(), ""
        for _ in range(2):
            sink.seek(sink_offset)
            sink.truncate()
            try:
                actual_digest = reading.stream_blob(self.bucket, layout.blob_key(digest), sink, max_bytes)
            except api.Declined as refusal:
                raise self.lost_error(digest) from refusal
            if actual_digest == digest:
                return actual_digest
        raise IntegrityError(
            f"blob {digest} of {self.uri} holds other bytes (their digest is {actual_digest}); {self.remedy}"
        )

    def _copy_from_cache(self, cache: BlobCache, digest: str, sink: BinaryIO) -> bool:
        """Write a blob's bytes to `sink` through the cache; False if the cache is full, read-only or damaged."""
        with ExitStack() as exit_stack:
            try:
                cache_path = exit_stack.enter_context(
                    cache.hold(digest, lambda file: self._stream_verified(digest, file))
                )
                source = exit_stack.enter_context(cache_path.open("rb"))
            except OSError:
                return False
            sink_offset = sink.tell()
            if files.copy_hashed(source, sink) == digest:
                return True
        cache.drop(digest)
        sink.seek(sink_offset)
        sink.truncate()
        return False


def open_registry(bucket: api.BucketApi, *, create: bool, check: bool = True) -> ObjectStore:
    """Open the registry in a bucket, or create one. Raises InputError and UnavailableError; see `open_store`."""
    if not (create or check):
        return ObjectStore(bucket)
    location = bucket.place.locator("")
    marker = reading.read_document(bucket, layout.MARKER, attempts=_ATTEMPTS)
    if marker is None and not create:
        raise UnavailableError(f"there is no registry at {location}; `enginesmith build` makes one, or set --registry")
    if marker is None and (names := [name.removesuffix("/") for name in api.names_below(bucket, "")]):
        marker = reading.read_document(
            bucket, layout.MARKER
        )  # another process may have created it since the first read
        if marker is None:
            layout.refuse_other(names, location, "give a prefix of its own")
    if marker is None:
        write(bucket, layout.MARKER, layout.MARKER_CONTENT, None)
    else:
        layout.check_format(marker[0], location)
    store = ObjectStore(bucket)
    if create:
        require_conditional_writes(bucket)
        store.sweep()
    return store
