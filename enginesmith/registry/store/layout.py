"""The protocol of a registry's stores, and the keys of blobs, documents and the marker in them.

A store has blobs (immutable, by digest) and documents (small, by key, changed by compare-and-swap). It knows no
models, so that another kind of store needs one file and passes the same tests.

A key is a relative path with '/' between its parts::

    enginesmith-registry.json                                the marker, {"format": 1}: this place is a registry
    blobs/sha256/ab/abcd...                               bytes, by digest
    records/<kind>/<key>.json                             the result of a step (`enginesmith.registry.builds.runs`)
    records/copies/<key>.json                             copies of a model's records (`registry.builds.runs`)
    models/<model>/versions/<version>/manifest.json       the description of a version; never rewritten
    models/<model>/versions/<version>/attestations/<engine>/<report>.json
    models/<model>/versions/<version>/latency/<engine>/<report>.json
    models/<model>/versions/<version>/attachments/<blob>/<document>.json
    models/<model>/versions/<version>/attributions/<name>.json   causes of drift in a graph or unit
    models/<model>/versions/<version>/canaries/<target>/<report>.json    a canary's verdict on one target
    models/<model>/versions/<version>/signatures/<document>/<key id>.sig.json
    models/<model>/versions/<version>/report.html         a copy of the report for people
    models/<model>/versions/<version>/report.json         the data of that page
    models/<model>/channels/<channel>.json                a channel and its rollout (`registry.versions.channel_state`)
    models/<model>/histories/<channel>.json               the earlier moves and rollouts
    failed/<model>/report.html, report.json               page of the model's last run that published nothing
    models/<model>/policies/<channel>.json                a channel's policy; policies/<channel>.json: for all models
    models/<model>/pins/<version>.json                    a version that is never deleted, and why
    models/<model>/registered.json                        the model's last registered specs, with their files' digests
    rollouts/<model>/<channel>/<rollout>.json             marks a rollout that may run (`versions.channel_writes`)
    serving/<model>/<channel>/<rollout>/<node>.json        a node's report (`registry.rollouts.reports`)
    serving/<model>/<channel>/nodes/<node>.json            its report outside of rollouts
    locks/<digest>.json                                   a build lock (`enginesmith.registry.builds.build_history`)
    leases/<id>.json                                      a running writer (`enginesmith.registry.leases`)
    runs/<run>.json, <run>.live                           the state of a run, and the latest output of its jobs
    history/<backend>/models/<model>.json, all.json       finished builds (`enginesmith.registry.builds.build_history`)
    series/<model>/<digest>.json                          latencies of a unit (`registry.latency_series`)
    history/totals.json                                   number of builds by outcome, and their times
    timing/<product>/<driver>/<version>.json              names the blob of a GPU's timing cache
    index/<digit>.json                                    the models' versions
                                                          (`enginesmith.registry.versions.index`)
    gc/state.json, gc/marks/<two digits>.json             the garbage marks (`enginesmith.registry.leases`)
"""

import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Protocol

from enginesmith.core.codec import Excerpt, NewerFormatError, parse_as
from enginesmith.core.errors import InputError, IntegrityError, canonical_json, check_digest, digest_of
from enginesmith.core.names import check_channel, check_model, check_version
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Format
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import BlobDigest

# The registry of commands and flows that name none.
DEFAULT_REGISTRY = "./registry"
# The environment variable with another registry.
REGISTRY_VARIABLE = "ENGINESMITH_REGISTRY"

# The maximum sizes of a registry's documents and blobs; uploads have at most 10,000 parts.
MAX_DOCUMENT_BYTES = 64 << 20
MAX_BLOB_BYTES = 1 << 40
# The maximum number of keys in one listing: a registry of a million documents is large.
MAX_KEYS = 1 << 24

MARKER = "enginesmith-registry.json"
MARKER_MAX_BYTES = 64 << 10
FORMAT = 1
MARKER_CONTENT = canonical_json({"format": FORMAT})

BLOBS = "blobs/sha256/"
RECORDS = "records/"
MODELS = "models/"
FAILED = "failed/"
MANIFEST = "manifest.json"
LEASES = "leases/"
BUILD_LOCKS = "locks/"
MARK_STATE = "gc/state.json"
MARK_SHARDS = "gc/marks/"
RUNS = "runs/"
HISTORY = "history/"
TOTALS = "history/totals.json"
TIMING = "timing/"
SERIES = "series/"
ROLLOUTS = "rollouts/"
SERVING = "serving/"

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")


def check_key(key: str) -> str:
    """Return `key` if it can only be a path within the registry. Raises InputError."""
    if is_key(key):
        return key
    raise InputError(f"registry key {key!r}: its parts must match {_PART.pattern}")


def is_key(text: str) -> bool:
    """Whether `text` can be a key: a relative path without '..'."""
    return all(_PART.fullmatch(segment) for segment in text.split("/"))


def check_size(size: int, where: str) -> int:
    """Return an object's size in bytes as a server states it, if it is possible. Raises IntegrityError."""
    if 0 <= size <= MAX_BLOB_BYTES:
        return size
    raise IntegrityError(f"the server says {where} has {str(size)[:40]} bytes; an object has 0 to {MAX_BLOB_BYTES}")


def blob_key(digest: str) -> str:
    """Key of a blob."""
    return f"{BLOBS}{check_digest(digest)[:2]}/{digest}"


def record_key(kind: str, key: str) -> str:
    """Key of a step's record; `key`: digest of its inputs. Raises InputError for a kind that no key can contain."""
    if not _KIND.fullmatch(kind):
        raise InputError(f"record kind {kind!r} must match {_KIND.pattern}")
    return f"{RECORDS}{kind}/{check_digest(key)}.json"


def model_prefix(kind: Literal["versions", "channels", "pins"], model: str) -> str:
    """Prefix of the documents of one kind of a model."""
    return f"{MODELS}{check_model(model)}/{kind}/"


def version_prefix(model: str, version: str) -> str:
    """Prefix of all documents about one version."""
    return f"{model_prefix('versions', model)}{check_version(version)}/"


def evidence_prefix(
    kind: Literal["attestations", "attachments", "latency", "canaries", "signatures", "attributions"],
    model: str,
    version: str,
) -> str:
    """Prefix of the documents of one kind that were stored beside a version after its publication."""
    return f"{version_prefix(model, version)}{kind}/"


def manifest_key(model: str, version: str) -> str:
    """Key of a version's manifest."""
    return f"{version_prefix(model, version)}{MANIFEST}"


def page_key(model: str, version: str) -> str:
    """Key of the copy of a version's HTML report."""
    return f"{version_prefix(model, version)}report.html"


def page_data_key(model: str, version: str) -> str:
    """Key of the JSON data of a version's HTML report."""
    return f"{version_prefix(model, version)}report.json"


def failed_page_key(model: str) -> str:
    """Key of the HTML report of a model's last run that published nothing."""
    return f"{FAILED}{check_model(model)}/report.html"


def failed_data_key(model: str) -> str:
    """Key of the JSON data of that report."""
    return f"{FAILED}{check_model(model)}/report.json"


def attestation_key(model: str, version: str, engine: str, report: str) -> str:
    """Key of one attestation: the report `report` about the engine `engine`, both digests."""
    return f"{evidence_prefix('attestations', model, version)}{check_digest(engine)}/{check_digest(report)}.json"


def attachment_key(model: str, version: str, blob: str, document: str) -> str:
    """Key of the document about an attachment; both arguments are digests."""
    return f"{evidence_prefix('attachments', model, version)}{check_digest(blob)}/{check_digest(document)}.json"


def latency_key(model: str, version: str, engine: str, report: str) -> str:
    """Key of one latency report about the engine `engine`; both are digests."""
    return f"{evidence_prefix('latency', model, version)}{check_digest(engine)}/{check_digest(report)}.json"


def attribution_key(model: str, version: str, name: str) -> str:
    """Key of the attribution of a graph or a unit of a version. name: of the graph or unit."""
    return f"{evidence_prefix('attributions', model, version)}{digest_of({'attribution': name})}.json"


def canary_key(model: str, version: str, target: str, report: str) -> str:
    """Key of one verdict: of the canary on `target` ('sm_89') whose report has this digest."""
    return check_key(f"{evidence_prefix('canaries', model, version)}{target}/{check_digest(report)}.json")


def signature_key(model: str, version: str, document: str, key_id: str) -> str:
    """Key of one signature; `document` is the digest of the document, `key_id` the id of the key that signed it."""
    return f"{evidence_prefix('signatures', model, version)}{check_digest(document)}/{check_digest(key_id)}.sig.json"


def channel_key(model: str, channel: str) -> str:
    """Key of a channel's state."""
    return f"{model_prefix('channels', model)}{check_channel(channel)}.json"


def channel_history_key(model: str, channel: str) -> str:
    """Key of a channel's history: the moves and rollouts before its state."""
    return f"{MODELS}{check_model(model)}/histories/{check_channel(channel)}.json"


def running_rollout_key(model: str, channel: str, rollout: str) -> str:
    """Key of the mark of a rollout that may be unfinished."""
    return check_key(f"{ROLLOUTS}{check_model(model)}/{check_channel(channel)}/{rollout}.json")


def serving_prefix(model: str, channel: str, rollout: str | None = None) -> str:
    """Prefix of nodes' reports about a rollout of a channel ('nodes': outside of rollouts), or (None) of all."""
    channel_prefix = f"{SERVING}{check_model(model)}/{check_channel(channel)}/"
    return channel_prefix if rollout is None else f"{check_key(f'{channel_prefix}{rollout}')}/"


def policy_key(model: str | None, channel: str) -> str:
    """Key of the policy of a model's channel, or (None) of this channel for all models."""
    prefix = f"{MODELS}{check_model(model)}/" if model is not None else ""
    return f"{prefix}policies/{check_channel(channel)}.json"


def registered_key(model: str) -> str:
    """Key of a model's registered specs."""
    return f"{MODELS}{check_model(model)}/registered.json"


def build_lock_key(name: str) -> str:
    """Key of a build lock; `name` is the digest of the build."""
    return f"{BUILD_LOCKS}{check_digest(name)}.json"


def pin_key(model: str, version: str) -> str:
    """Key of a version's pin."""
    return f"{model_prefix('pins', model)}{check_version(version)}.json"


def lease_key(lease: str) -> str:
    """Key of a lease."""
    return check_key(f"{LEASES}{lease}.json")


def index_key(shard: str) -> str:
    """Key of a part of the index of all models; `shard` is a hexadecimal digit."""
    return check_key(f"index/{shard}.json")


def mark_shard_key(shard: str) -> str:
    """Key of a shard of the garbage marks; `shard` is two hexadecimal digits."""
    return check_key(f"{MARK_SHARDS}{shard}.json")


def run_key(run: str) -> str:
    """Key of the state of a run."""
    return check_key(f"{RUNS}{run}.json")


def run_live_key(run: str) -> str:
    """Key of the last output of a run's jobs."""
    return check_key(f"{RUNS}{run}.live")


def history_key(backend: str, model: str | None = None) -> str:
    """Key of the build history of a backend: of one model, or (None) of the newest builds of all models."""
    return check_key(f"{HISTORY}{backend}/" + ("all.json" if model is None else f"models/{check_model(model)}.json"))


def series_key(model: str, series: str) -> str:
    """Key of a series of latencies; `series` is the digest of its identity."""
    return f"{SERIES}{check_model(model)}/{check_digest(series)}.json"


def timing_key(product: str, driver: str, version: str) -> str:
    """Key of the document that names a GPU's timing cache; characters that are not allowed in a key become '-'."""
    key_parts = (
        re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-._").lower() or "unknown" for part in (product, driver, version)
    )
    return check_key(f"{TIMING}{'/'.join(key_parts)}.json")


def refuse_other(children: Collection[str], where: str, remedy: str) -> NoReturn:
    """Raise InputError for a place that has other content and no marker. If a registry lost its marker, the message
    says how to restore it. children: names in the place.  remedy: for a place that is no registry."""
    if {"blobs", "models"} & set(children):
        raise InputError(
            f"{where} looks like a registry that has lost its marker; if it is one, write "
            f"{MARKER_CONTENT.decode()} into {where}/{MARKER}"
        )
    raise InputError(f"{where} holds {min(children)!r} and is not a registry (no {MARKER}); {remedy}")


@dataclass(frozen=True)
class _Marker(Excerpt):
    format: Annotated[int, Format(FORMAT)]


def check_format(marker: bytes, where: str) -> None:
    """Raise IntegrityError for an unreadable marker, InputError for a format that this release does not know."""
    try:
        parse_as(marker, MARKER_MAX_BYTES, _Marker)
    except NewerFormatError as error:
        raise InputError(f"registry {where}: {error}") from error
    except Malformed as error:
        raise IntegrityError(f"{where}/{MARKER} is damaged; write {MARKER_CONTENT.decode()} into it") from error


class Documents(Protocol):
    """The reads that resolve a version: from a store, or a snapshot of its documents (`versions.lookup`)."""

    @property
    def uri(self) -> str:
        """The URI that opens this store in `open_store`."""

    def locator(self, key: str) -> str:
        """The URI of a document: 'file:///srv/registry/KEY', 's3://bucket/prefix/KEY'."""

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """A blob's bytes, verified, at most `max_bytes`: memory has this limit, whatever size the server states.

        Raises IntegrityError for a missing, corrupt or larger blob.
        """

    def read(self, key: str) -> bytes | None:
        """Read a document; None if it is absent."""

    def list(self, prefix: str = "") -> Iterator[str]:
        """All keys under a prefix that ends in '/' (or is empty), blobs included, sorted part by part.

        A remote store lists pages of keys, whatever the number of folders.
        """

    def children(self, prefix: str = "") -> Iterator[str]:
        """The names directly under a prefix, sorted; folders end in '/'. Lists no deeper names."""


class Store(Documents, Protocol):
    """A place for blobs and documents.

    Every method raises UnavailableError if the place is unreachable, full or read-only, and then leaves no half-written
    object. Keys and digests are checked before they become a path (InputError).
    """

    @property
    def near(self) -> bool:
        """Whether blobs are files of this machine, so that a cache of copies is useless."""

    def put_file(self, path: Path) -> str:
        """Store a file as a blob and return its digest. An intact stored blob stays, a corrupt one is replaced."""
        return self.put_and_digest_file(path).digest

    def put_and_digest_file(self, path: Path) -> BlobDigest:
        """Like `put_file`; also returns the BLAKE3 of the same bytes."""

    def put_bytes(self, data: bytes) -> str:
        """Store bytes and return their digest."""

    def has(self, digest: str) -> bool:
        """Whether a blob exists, without reading its bytes. A link out of the store is no blob."""
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        """Size of a blob in bytes; None if `has` is False. Reads none of its bytes."""

    def size(self, digest: str) -> int:
        """Size of a blob in bytes. Raises IntegrityError if it is missing."""
        if (size_bytes := self.stored_size(digest)) is None:
            raise self.lost_error(digest)
        return size_bytes

    def lost_error(self, digest: str) -> IntegrityError:
        """The error for a missing blob."""
        return IntegrityError(f"{self.uri} has lost blob {digest}; run `enginesmith registry fsck`, then build again")

    def path(self, digest: str) -> Path:
        """A local read-only file with a blob's bytes, not verified. Raises IntegrityError if the blob is missing.

        For a remote registry it is a cached copy, which may be evicted later: open it at once, or use `fetch`.
        """

    def fetch(self, digest: str, dest: Path) -> None:
        """Copy a blob to `dest`, verified and atomically. Raises IntegrityError for a missing or corrupt blob."""

    def open_range(self, digest: str, offset: int, size: int) -> AbstractContextManager[Fill]:
        """Open `size` bytes of a blob from `offset`: gives a function that fills a view with the next bytes.

        The bytes are not verified. Several threads may each open a range. Raises IntegrityError, here or while filling,
        if the blob is missing or too short.
        """

    def rehash(self, digest: str) -> BlobDigest:
        """The digests of a blob's stored bytes, computed anew.

        Raises IntegrityError if the blob is missing.
        """

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """A document and its tag; (None, `tag`), without reading it, if it still has that tag; (None, '') if absent."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a document if it is absent, and return whether this call wrote it. Of concurrent writers one wins."""

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """Write a document if its content is `expected` (None: absent), and return whether this call wrote it.

        Raises UndecidedError if the response was lost and the content does not show who wrote it: read it again.
        """

    def remove(self, key: str) -> None:
        """Delete a document or a blob by its key, if it exists.

        Only `gc` may delete blobs, since only it checks that nothing refers to them.
        """

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Each key under a prefix that ends in '/', with its size in bytes, in any order.

        A thousand keys cost a remote store one request. Links in a folder are left out: `stored_size` tells whether one
        counts.
        """

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """Each key under a prefix that ends in '/', with the time of its last write on the store's clock, in any order.

        It costs as much as `sizes`.
        """

    def now(self) -> datetime:
        """The time in UTC on the clock of `stamps`. Durations between writes of different machines are measured with
        it, since the machines' clocks differ."""

    def discard(self, digest: str) -> None:
        """Move a corrupt blob to discarded/ for inspection, so that it counts as missing and can be stored again. A
        blob that was stored again since it was read is sound, and stays."""

    def strays(self) -> tuple[str, ...]:
        """Descriptions of files or uploads that dead writers left behind; no key refers to them."""
        return ()

    def sweep(self) -> int:
        """Delete the remains that `strays` lists, and return their number; files of running processes stay."""
        return 0
