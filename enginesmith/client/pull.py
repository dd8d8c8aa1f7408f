"""Downloads an engine, verified, with a JSON description for the server that loads it.

The engine is written first and its description last; each file appears whole or not at all, and the description names
the engine's digest. So a server that waits for the description never loads an incomplete engine.
"""

import errno
import fcntl
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from enginesmith.client.resolve import FALLBACK, EngineRanking, Resolution
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError, IntegrityError, digest_of_bytes, digest_of_file
from enginesmith.core.hardware.evaluation import evaluate
from enginesmith.core.names import Reference
from enginesmith.core.parsing import parse_json
from enginesmith.core.state import DESCRIPTION_FORMAT, padding_of, parts_folder, state_ends, states_of, with_int8_states
from enginesmith.registry.manifest import MAX_BYTES, EngineEntry, Manifest, functions_of, make_request, pinned_engines
from enginesmith.registry.store import files
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.download import download, journal_of
from enginesmith.registry.store.layout import evidence_prefix
from enginesmith.registry.versions.lookup import Located

if TYPE_CHECKING:
    from enginesmith.core.reports.latency import LatencyReport
    from enginesmith.registry.evidence.attachments import Attachment
    from enginesmith.registry.store.cache import BlobCache, VerificationCache

# A blob of a remote registry is downloaded into the cache, once for all processes, over several connections, and
# resumed after a killed download; then the path becomes a hard link to it, or a copy on another file system. Without a
# cache it is downloaded beside the path. A file appears whole and verified, or not at all. Several blobs, such as the
# shards of a large model, are downloaded in parallel and share the connections and the memory of one.

# Source of the bytes: the existing file, this machine's cache, or the registry.
Origin = Literal["there", "cache", "registry"]
# Called with the downloaded and the total bytes.
Progress = Callable[[int, int], object]

# The number of parallel downloads: each has one of the four connections with which a single download begins.
SIDE_BY_SIDE = 4

_PARTIAL = ".enginesmith-partial-"
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def silent(_done: int, _total: int) -> None:
    """A progress listener that does nothing."""


@dataclass(frozen=True)
class Wanted:
    """A blob to be written to `dest`. size_bytes: from the manifest."""

    blob: files.BlobDigest
    size_bytes: int
    dest: Path


@dataclass(frozen=True)
class BlobFetcher:
    """Downloads blobs. cache: None for none.  progress: called with downloaded and total bytes.  rehash: read local
    files again instead of trusting the verification cache.  beside: number of simultaneous fetchers."""

    cache: "BlobCache | None" = None
    progress: Progress = silent
    rehash: bool = False
    beside: int = 1

    def fetch(self, store: Store, blob: files.BlobDigest, size_bytes: int, dest: Path) -> Origin:
        """Write the blob to `dest`, verified and atomically, and return where its bytes came from.

        Raises IntegrityError if the registry sends other bytes or has lost the blob, UnavailableError if registry or
        disk are unavailable; the next call resumes the download.
        """
        with files.reachable(f"writing {dest}"):
            files.make_folder(dest.parent)
            verifications = self.cache.verifications if self.cache is not None and not self.rehash else None
            if _is_there(dest, blob, size_bytes, verifications):
                return "there"
            files.sweep(dest.parent)
            if self.cache is None or store.near or size_bytes > self.cache.limit_bytes:
                self._direct(store, blob, size_bytes, dest)
                if verifications is not None:
                    verifications.add(blob, dest)
                return "registry"
            return self._through(self.cache, store, blob, size_bytes, dest)

    def fetch_all(self, store: Store, downloads: Sequence[Wanted]) -> None:
        """Write several blobs like `fetch`, at most `SIDE_BY_SIDE` at a time; the listener gets the sums of bytes.

        If one fails, the others stop, and downloaded parts are kept for the next call. Raises the first error, as
        `fetch`.
        """
        if not downloads:
            return
        meter = _Meter(self.progress, sum(blob_request.size_bytes for blob_request in downloads))
        worker_count = min(SIDE_BY_SIDE, len(downloads))
        with ThreadPoolExecutor(worker_count) as pool:

            def start(blob_task: Wanted) -> object:
                fetcher = replace(self, progress=meter.listener(), beside=worker_count)
                return fetcher.fetch(store, blob_task.blob, blob_task.size_bytes, blob_task.dest)

            try:
                for future in as_completed([pool.submit(start, blob_request) for blob_request in downloads]):
                    future.result()
            except BaseException:
                meter.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _through(self, cache: "BlobCache", store: Store, blob: files.BlobDigest, size_bytes: int, dest: Path) -> Origin:
        origin: list[Origin] = ["cache"]

        def bring(partial: Path) -> str:
            origin[:] = ["registry"]
            return self._download(store, blob, size_bytes, partial)

        try:
            with cache.hold_verified(blob, bring, rehash=self.rehash) as (cached_file, cached_digest):
                _place(cached_file, cached_digest, dest, cache.verifications)
                return origin[0]
        except OSError as error:
            if error.errno not in _UNUSABLE:
                raise
            # Download without a cache that is full, read-only or another user's, instead of failing.
            cache.give_up(blob)
            self._direct(store, blob, size_bytes, dest)
            return "registry"

    def _direct(self, store: Store, blob: files.BlobDigest, size_bytes: int, dest: Path) -> None:
        """Download to a partial file beside `dest`, one process at a time, and rename it."""
        partial_path = dest.with_name(f"{_PARTIAL}{blob.digest[:32]}")
        with _lock_download(partial_path):
            if _is_there(dest, blob, size_bytes, None):
                return
            self._download(store, blob, size_bytes, partial_path)
            files.rename_durably(partial_path, dest)

    def _download(self, store: Store, blob: files.BlobDigest, size_bytes: int, partial: Path) -> str:
        """Download a blob to `partial` and return its digest, the expected one.

        Wrong bytes are downloaded again from the start. From a list of places, each retry leaves out one more place;
        any other store is asked once more, since a resumed part or the network may have been at fault. Then
        IntegrityError is raised.
        """
        for source in (store, *getattr(store, "list_rests", lambda: [store])()):
            actual_digest = download(
                partial,
                blob,
                size_bytes,
                lambda start, size, source=source: source.open_range(blob.digest, start, size),  # type: ignore[misc]
                lambda byte_count: self.progress(byte_count, size_bytes),
                beside=self.beside,
            )
            journal_of(partial).unlink()
            if actual_digest == blob.expected:
                return actual_digest
            partial.unlink()
        raise IntegrityError(
            f"blob {blob.digest} of {store.uri} holds other bytes (their {blob.algorithm} is "
            f"{actual_digest}, and should be "
            f"{blob.expected}); run `enginesmith registry fsck --repair`, then build again"
        )


class _StoppedError(Exception):
    """Ends a download because another one has failed."""


@dataclass
class _Meter:
    """Adds up the bytes of several downloads for one listener. total: of all, in bytes."""

    progress: Progress
    total: int
    came: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def listener(self) -> Progress:
        """A listener for one of the downloads. It raises `_StoppedError` after a stop."""
        own_bytes = 0

        def add(byte_count: int, _size: int) -> None:
            nonlocal own_bytes
            if self.stopped.is_set():
                raise _StoppedError
            with self.lock:
                self.came, own_bytes = self.came + byte_count - own_bytes, byte_count
                self.progress(self.came, self.total)

        return add


def _is_there(dest: Path, blob: files.BlobDigest, size_bytes: int, verifications: "VerificationCache | None") -> bool:
    if not dest.is_file() or dest.stat().st_size != size_bytes:
        return False
    return blob.matches(dest) if verifications is None else verifications.is_verified(blob, dest)


def _place(cached_path: Path, blob: files.BlobDigest, dest: Path, verifications: "VerificationCache") -> None:
    """Make `dest` a hard link to a cached blob, or a verified copy if the file system refuses links."""
    new_link = dest.with_name(f".enginesmith-link-{secrets.token_hex(8)}")
    try:
        os.link(cached_path, new_link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with cached_path.open("rb") as source, files.start_atomic_write(dest.parent) as file:
            if files.copy_hashed(source, file.stream, blob.hasher()) != blob.expected:
                raise IntegrityError(f"cached blob {cached_path} is damaged; delete it and run again") from None
            file.commit(dest)
    else:
        new_link.replace(dest)
        # If `dest` was a link to this file already, `replace` did nothing, and the new link still exists.
        new_link.unlink(missing_ok=True)
        files.sync_folder(dest.parent)
    verifications.add(blob, dest)


@contextmanager
def _lock_download(partial: Path) -> Iterator[None]:
    """Hold the lock file beside a partial download, and delete it afterwards."""
    path = partial.with_name(f"{partial.name}.lock")
    while True:
        with path.open("ab") as lock_file:
            fcntl.flock(lock_file.fileno(), fcntl.LOCK_EX)
            if not os.fstat(lock_file.fileno()).st_nlink:
                continue  # deleted by a download that has just ended
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def folder_name(located: Located, engine: EngineEntry) -> str:
    """The name of the folder of an engine, unique by the digest of its description."""
    description = describe(located, engine, f"{stem_of(located.manifest, engine)}{engine.suffix}")
    return f"{located.manifest.version}-{digest_of_bytes(as_json(description))[:16]}"


def stem_of(manifest: Manifest, engine: EngineEntry) -> str:
    """The file name of an engine and its description, without the suffix; with the backend if the version has engines
    of several for one target and precision."""
    stem = f"{manifest.model}-{manifest.version}-{engine.target}-{engine.precision}"
    target_engines = (sibling for sibling in manifest.engines if sibling.digest and sibling.target == engine.target)
    if len({sibling.backend for sibling in target_engines if sibling.precision == engine.precision}) > 1:
        stem += f"-{engine.backend}"
    return stem


def weights_name(manifest: Manifest, engine: EngineEntry) -> str | None:
    """The file name of the model with the weights beside an engine; None if the engine contains its weights."""
    return f"{stem_of(manifest, engine)}.weights.onnx" if engine.is_stripped else None


def shards_of(manifest: Manifest, engine: EngineEntry) -> dict[str, int]:
    """Sizes in bytes, by digest, of the shards beside an engine: its own, and those of the model with its weights."""
    weight_shards = manifest.shards.get(str(engine.graph), {}) if engine.is_stripped else {}
    return {**manifest.shards.get(str(engine.digest), {}), **weight_shards}


def as_json(description: Mapping[str, object]) -> bytes:
    """The bytes of a description's file."""
    return (json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def describe(located: Located, engine: EngineEntry, file: str) -> dict[str, object]:
    """JSON object with the facts that a server needs to load an engine, and the engine's origin."""
    manifest = located.manifest
    origin = {
        "format": DESCRIPTION_FORMAT,
        "file": file,
        "model": manifest.model,
        "version": manifest.version,
        "channel": located.channel.name if located.channel else None,
        "manifest": manifest.digest,
    }
    weights_file = weights_name(manifest, engine)
    description: dict[str, object] = {"weights": weights_file} if weights_file else {}
    if shards := shards_of(manifest, engine):
        description["shards"] = sorted(shards)
    request = with_int8_states(make_request(engine))
    if states := states_of(manifest.spec):
        description |= {
            "state": [encode(state) for state in states],
            "ends": state_ends(request.inputs, states, request.profiles),
        }
    if (padding := padding_of(manifest.spec)).inputs:
        description["padding"] = encode(padding)
    if engine.quantized_states:
        engine = replace(engine, inputs=request.inputs, outputs=request.outputs, profiles=request.profiles)
    return origin | description | {key: value for key, value in encode(engine).items() if key != "checks"}


# The largest file of a function's code, in bytes.
MOST_CODE_BYTES = 16 << 20


@dataclass(frozen=True)
class PulledAttachment:
    """An attachment on disk. description: the document beside it.  signed_by: the signers of that document, as the
    trust policy names them; empty if no signature was required."""

    path: Path
    description: Path
    attachment: "Attachment"
    signed_by: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Pulled:
    """An engine on disk. path: the engine.  description: the JSON beside it.  origin: the source of its bytes.

    weights: the ONNX model beside it with the weights of an engine whose own file has none.
    latency: the newest report on machines of this kind, if `Client.pull_all` found one.
    attachments: those that `Client.pull` pulled.  left_out: name -> the reason why it was not pulled.
    """

    path: Path
    description: Path
    located: Located
    resolution: Resolution
    origin: Origin
    weights: Path | None = None
    latency: "LatencyReport | None" = None
    attachments: tuple[PulledAttachment, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """One line: the file, its unit and version, and its status."""
        reference, engine = self.located.manifest.reference, self.engine
        return f"Pulled({self.path.name!r}: {engine.unit} of {reference}, {engine.status})"

    def moved_to(self, folder: Path) -> "Pulled":
        """A copy with the paths after its files were moved to another folder."""
        return replace(self, path=folder / self.path.name, description=folder / self.description.name)

    @property
    def cached(self) -> bool:
        """Whether the engine was already there, and intact."""
        return self.origin == "there"

    @property
    def engine(self) -> EngineEntry:
        """The chosen engine, with its current status."""
        return self.resolution.chosen

    @property
    def warning(self) -> str | None:
        """The warning to show before the engine is used; None if it is proven."""
        if self.engine.status == "proven":
            return None
        if self.engine.target == FALLBACK:
            return f"FALLBACK: no engine of this version fits this machine; this is {self.engine.reason}"
        if not self.engine.is_measured or self.engine.status != "unproven":
            return f"{self.engine.status.upper()}: {self.engine.unit} is not proven: {self.engine.reason}"
        return (
            f"UNPROVEN: {self.engine.unit} is not proven on this kind of machine ({self.engine.reason}); "
            f"run `enginesmith validate {self.located.manifest.reference}` there first"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings to show: better engines that are lost, and `warning`."""
        loss_lines = (f"LOST: {unit}: {reason.removeprefix('lost: ')}" for unit, reason in self.resolution.lost)
        return (*loss_lines, *([self.warning] if self.warning else []))


def download_best(ranking: EngineRanking, download: Callable[[Resolution], Pulled]) -> Pulled:
    """Call `download` for the best engine; if it raises IntegrityError, for the next one.

    Raises the error of the last one, and as `EngineRanking.resolution`.
    """
    while True:
        resolution = ranking.resolution()
        try:
            return download(resolution)
        except IntegrityError as error:
            if len(ranking.candidates) == 1:
                raise
            ranking = ranking.without({str(resolution.chosen.digest): str(error)})


def download_engine(
    store: Store, located: Located, resolution: Resolution, dest: Path, fetcher: BlobFetcher, *, file: str = ""
) -> Pulled:
    """Download the chosen engine into the folder `dest`, verified, with a JSON description beside it.

    An engine without weights gets the model with its weights beside it. This model and, in parallel, all shards are
    downloaded before the engine. The engines and functions of an ensemble go to a folder of this version, with one
    folder for each, before the ensemble's description.
    file: the engine's name there; '' for one with model, version, target and precision. Raises IntegrityError for other
    bytes than were published, UnavailableError if registry or disk are unavailable, and InputError if another version's
    engine has the file's name.
    """
    engine, manifest = resolution.chosen, located.manifest
    if manifest.graphs:
        return _download_graphs(store, located, resolution, dest, fetcher)

    def fetch(digest: str, size_bytes: int, path: Path) -> Origin:
        return fetcher.fetch(store, files.BlobDigest(digest, manifest.blake3.get(digest)), size_bytes, path)

    stem = Path(file).stem if file else stem_of(manifest, engine)
    file = file or f"{stem}{engine.suffix}"
    path, description_path = dest / file, dest / f"{stem}.json"
    _check_owner(description_path, manifest)
    weights_path = dest / name if (name := weights_name(manifest, engine)) else None
    shards = shards_of(manifest, engine)
    digests = {shard: files.BlobDigest(shard, manifest.blake3.get(shard)) for shard in shards}
    fetcher.fetch_all(store, [Wanted(digests[shard], size, dest / shard) for shard, size in shards.items()])
    if weights_path is not None:
        fetch(str(engine.graph), store.size(str(engine.graph)), weights_path)
    origin = fetch(str(engine.digest), engine.size_bytes or 0, path)
    description_bytes = as_json(describe(located, engine, file))
    if origin != "there" or not description_path.is_file() or description_path.read_bytes() != description_bytes:
        files.write_whole(description_path, description_bytes)
    return Pulled(path, description_path, located, resolution, origin, weights_path)


def _download_graphs(
    store: Store, located: Located, resolution: Resolution, dest: Path, fetcher: BlobFetcher
) -> Pulled:
    ensemble, graphs, functions = resolution.chosen, list[dict[str, object]](), functions_of(located.manifest)
    origins = set[Origin]()
    path = dest / f"{stem_of(located.manifest, ensemble)}.json"
    _check_owner(path, located.manifest)
    parts_prefix = parts_folder(located.manifest.model, located.manifest.version)
    for graph, manifest, entry in pinned_engines(store, located.manifest, ensemble):
        # Each engine gets the status of the ensemble, which is never better.
        engine = replace(entry, status=ensemble.status, reason=ensemble.reason)
        graph_version = replace(
            located, reference=Reference(graph.model, graph.version), manifest=manifest, channel=None
        )
        graph_resolution = replace(resolution, chosen=engine, ranked=(engine,))
        pulled_engine = download_engine(
            store, graph_version, graph_resolution, dest / parts_prefix / graph.name, fetcher
        )
        origins.add(pulled_engine.origin)
        file = f"{parts_prefix}/{graph.name}/{pulled_engine.description.name}"
        graph_fields = {"name": graph.name, "description": file, "digest": entry.digest}
        graphs.append({**graph_fields, "sources": dict(graph.sources)})
    for function in functions:
        for file, digest in function.files.items():
            code_path = dest / parts_prefix / function.name / file
            if not code_path.is_file() or digest_of_file(code_path) != digest:
                origins.add("registry")
                files.write_whole(code_path, store.read_blob(digest, MOST_CODE_BYTES))
    description = {**describe(located, ensemble, path.name), "graphs": graphs}
    description |= {"functions": encode(functions)} if functions else {}
    description_bytes = as_json(description)
    if not path.is_file() or path.read_bytes() != description_bytes:
        files.write_whole(path, description_bytes)
    origin: Origin = "registry" if "registry" in origins else "cache" if "cache" in origins else "there"
    return Pulled(path, path, located, resolution, origin)


def _check_owner(description: Path, manifest: Manifest) -> None:
    """Raise InputError if another version's description has this name, like 'a-1' version 2 and 'a' version '1-2'."""
    with suppress(OSError, IntegrityError):
        document = parse_json(description.read_bytes(), MAX_BYTES)
        if (document.get("model"), document.get("version")) != (manifest.model, manifest.version):
            raise InputError(
                f"{description} belongs to {document.get('model')}@{document.get('version')}; give another folder"
            )


# The folder of a version's attachments, beside the engine.
ATTACHMENTS = "attachments"


def with_attachments(pulled: Pulled, store: Store, ranking: EngineRanking, dest: Path, fetcher: BlobFetcher) -> Pulled:
    """A pulled engine with the attachments of its version that fit the machine, each verified, in `dest`/attachments.

    Of several with one name, the newest allowed one is pulled. If the trust policy requires signatures, attachments
    without them are not pulled; otherwise, code without a signature needs `Policy.allow_unsigned`. Damaged or lost
    attachments are left out: the engine does not depend on them. Raises UnavailableError.
    """
    documents, manifest = pulled.located.documents or store, pulled.located.manifest
    if not any(True for _ in documents.list(evidence_prefix("attachments", manifest.model, manifest.version))):
        return pulled
    from enginesmith.registry.evidence.attachments import DESCRIPTION, attachments, read_attachment
    from enginesmith.registry.trust import require

    pulled_attachments, refusals = dict[str, PulledAttachment](), dict[str, str]()
    try:
        version_attachments = attachments(documents, manifest)
        trust_result = require(documents, manifest, ranking.policy.trust)
    except IntegrityError as error:
        return replace(pulled, left_out=((ATTACHMENTS, str(error)),))
    for attachment, document in version_attachments:
        name = attachment.name
        signer_names = trust_result.attachment_signers(document)
        reason = _refusal(attachment, ranking, bool(trust_result.signers), bool(signer_names))
        if name in pulled_attachments or reason:
            refusals.setdefault(name, reason)
            continue
        path = dest / ATTACHMENTS / name
        description_path = path.with_name(f"{name}{DESCRIPTION}")
        try:
            with suppress(OSError, IntegrityError):
                if (attached := read_attachment(description_path.read_bytes())).model != manifest.model:
                    raise InputError(
                        f"{description_path} belongs to {attached.model}@{attached.version}; give another folder"
                    )
            fetcher.fetch(store, files.BlobDigest(attachment.digest), attachment.size_bytes, path)
        except (InputError, IntegrityError) as error:
            refusals.setdefault(name, str(error))
            continue
        files.write_whole(description_path, document)
        pulled_attachments[name] = PulledAttachment(path, description_path, attachment, signer_names)
    left_out_reasons = tuple((name, reason) for name, reason in refusals.items() if name not in pulled_attachments)
    return replace(pulled, attachments=tuple(pulled_attachments.values()), left_out=left_out_reasons)


def _refusal(attachment: "Attachment", ranking: EngineRanking, needs_signature: bool, is_signed: bool) -> str:
    """The reason why an attachment is not pulled; '' if it is. needs_signature: whether the policy requires one."""
    machine = ranking.machine.with_installed(attachment.requires)
    unmet_reasons = [finding.words for finding in evaluate(attachment.requires, machine) if finding.rules_out]
    if unmet_reasons:
        return unmet_reasons[0]
    if is_signed or (ranking.policy.allow_unsigned and not needs_signature):
        return ""
    if needs_signature:
        return (
            "it lacks the signatures that the trust policy needs; have it signed (`enginesmith registry sign "
            f"{attachment.model}@{attachment.version} --key KEY --attachment FILE`)"
        )
    if attachment.is_code:
        return (
            f"a {attachment.kind} is code, and no signature of it was checked; pull with a trust policy, or with "
            "--allow-unsigned (allow_unsigned=True) if whoever can write to the registry may run code here"
        )
    return ""
