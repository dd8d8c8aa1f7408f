"""Copies complete versions to another registry, such as one of a site without a network.

A version is copied in the order of its publication: blobs first, verified on the way; then the documents beside it
(attestations, attachments, signatures, the page); last the manifest, byte for byte. After a killed run the next one
continues: stored blobs are not sent again, and no version is ever incomplete.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, digests_in
from enginesmith.core.names import Reference
from enginesmith.core.parsing import Malformed
from enginesmith.registry.evidence.attachments import attachments
from enginesmith.registry.evidence.attestations import Attestation
from enginesmith.registry.latency_series import merge_series
from enginesmith.registry.leases import BUILDING, Guard
from enginesmith.registry.manifest import Manifest, load_pinned
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import manifest_key, page_data_key, page_key, version_prefix
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import TrustPolicy
from enginesmith.registry.trust.signatures import read_bundle
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import Channel, position_of, read_channel, read_history
from enginesmith.registry.versions.channel_writes import refresh_version
from enginesmith.registry.versions.index import hold_change
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.policies import canary_pass

_AT_ONCE = 4


@dataclass(frozen=True)
class Mirrored:
    """The result of a copy. versions: `model@version`.  copied, present: numbers of blobs sent, and already there.
    size_bytes: of the blobs sent.  moved: channels that were moved to a version, as `model:channel`."""

    versions: tuple[str, ...]
    copied: int
    present: int
    size_bytes: int
    moved: tuple[str, ...]


def mirror(
    source: Store,
    references: Sequence[Reference],
    dest: Store,
    *,
    with_channels: bool = False,
    trust: TrustPolicy | Path | str | None = None,
    by: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Mirrored:
    """Copy the versions that references mean, and add the points of their models' series of latencies.

    with_channels: at `dest`, also move the channels in `references`, subject to its policies.  say: called
    with the digest of each finished blob.

    Raises UnknownNameError for an unknown reference, IntegrityError for blobs damaged or lost at the source,
    ConflictError if `dest` has another version with that name, InputError if it is the source or its policy refuses,
    UntrustedError, before anything is copied, if a signature that the trust policy requires is missing.
    """
    if source.uri == dest.uri:
        raise InputError(f"{dest.uri} is the registry itself; name another one")
    versions = [locate(source, reference) for reference in references]
    trust_results = [require(source, located_version.manifest, trust) for located_version in versions]
    sizes: dict[str, int | None] = {}
    moves = []
    for located_version, trust_result in zip(versions, trust_results, strict=True):
        manifest = located_version.manifest
        models = [manifest.model, *(graph.model for graph in manifest.graphs)]
        with hold_change(dest, models, f"mirroring {manifest.reference}", BUILDING) as guard:
            _copy_version(source, manifest, guard, sizes, say)
            refresh_version(guard, manifest)
        if with_channels and located_version.channel is not None:
            moves.append(_move(source, located_version.channel, manifest, dest, by, trust_result.counts))
    for model in dict.fromkeys(located_version.manifest.model for located_version in versions):
        merge_series(source, dest, model)
    version_labels = tuple(dict.fromkeys(located_version.manifest.reference for located_version in versions))
    new_sizes = [size for size in sizes.values() if size is not None]
    return Mirrored(version_labels, len(new_sizes), len(sizes) - len(new_sizes), sum(new_sizes), tuple(moves))


def _list_contents(store: Store, manifest: Manifest) -> tuple[list[str], list[str]]:
    """The digests of the blobs and the keys of the documents of a version, without its manifest.

    Blobs are those that the manifest needs, attachments, and all stored ones that its documents name, as kept by
    `collection.references`. Raises IntegrityError if a needed one is lost.
    """
    keys = list(store.list(version_prefix(manifest.model, manifest.version)))
    titles = {attachment.digest: f"attachment {attachment.name}" for attachment, _ in attachments(store, manifest)}
    blob_titles = titles | manifest.blobs()
    documents = [store.read(key) or b"" for key in keys if key.endswith(".json")]
    named_digests = {digest for document in (*documents, "\n".join(keys).encode()) for digest in digests_in(document)}
    extra_digests = [digest for digest in sorted(named_digests - blob_titles.keys()) if store.has(digest)]
    for digest, title in blob_titles.items():
        if not store.has(digest):
            raise IntegrityError(
                f"{manifest.reference} has lost its {title} ({digest}); run `enginesmith registry fsck`"
            )
    return [*blob_titles, *extra_digests], [
        key for key in keys if key != manifest_key(manifest.model, manifest.version)
    ]


def _copy_version(
    source: Store, manifest: Manifest, guard: Guard, sizes: dict[str, int | None], say: Callable[[str], None]
) -> None:
    """Copy a version to the guard's store; for an ensemble, the versions of its graphs first.

    sizes: of the blobs of all versions in bytes, by digest, None for those that existed; entries are added.
    """
    for graph in manifest.graphs:
        _copy_version(source, load_pinned(source, graph), guard, sizes, say)
    dest, name = guard.store, manifest.reference
    key = manifest_key(manifest.model, manifest.version)
    blobs, documents = _list_contents(source, manifest)
    guard.secure([name, *blobs])
    content = source.read(key)
    dest_content = dest.read(key)
    if content is None or (dest_content is not None and dest_content != content):
        refusal = ConflictError(f"{dest.uri} has another {name}; versions never change: mirror it to another registry")
        refusal.nothing_written = not sizes
        raise refusal
    with tempfile.TemporaryDirectory(prefix="enginesmith-mirror-") as folder:
        pending_blobs = [digest for digest in blobs if sizes.get(digest) is None]
        copy = partial(_copy_blob, source, dest, Path(folder))
        for digest, size in side_by_side(copy, pending_blobs, _AT_ONCE, most_in_part=1):
            say(digest)
            sizes[digest] = size
    # The last check before documents are written: the lease must still be held, and every blob be stored.
    guard.secure([name, *blobs])
    if lost_digests := [digest for digest in blobs if not dest.has(digest)]:
        raise IntegrityError(f"{dest.uri} lost blob {lost_digests[0]} while it was copied; run again")
    page_keys = (page_key(manifest.model, manifest.version), page_data_key(manifest.model, manifest.version))
    for document in documents:
        _copy_document(source, document, dest, page=document in page_keys)
    if not dest.create(key, content) and dest.read(key) != content:
        raise ConflictError(f"{dest.uri} got another {name} during the copy; mirror it to another registry")


def _copy_blob(source: Store, dest: Store, folder: Path, digest: str) -> int | None:
    """Copy a blob through a file in `folder`. Returns its size in bytes if it was sent, None if it existed."""
    size = source.size(digest)
    if dest.has(digest) and dest.size(digest) == size:
        return None
    path = folder / digest
    source.fetch(digest, path)
    dest.put_file(path)
    path.unlink()
    return size


def _copy_document(source: Store, key: str, dest: Store, *, page: bool) -> None:
    """Copy a document unless it exists. Raises ConflictError for a different one, except for another page, which is
    only for people, and for another signature by the same key."""
    content = source.read(key)
    if content is None or dest.create(key, content) or page or (dest_content := dest.read(key)) == content:
        return
    with suppress(Malformed):  # unless both are signatures
        dest_bundle, bundle = read_bundle(dest_content or b""), read_bundle(content)
        if (dest_bundle.key_id, dest_bundle.file, dest_bundle.digest) == (bundle.key_id, bundle.file, bundle.digest):
            return
    raise ConflictError(f"{dest.locator(key)} holds a different document; one of the two was edited by hand")


def _move(
    source: Store, channel: Channel, manifest: Manifest, dest: Store, by: str, counts: Callable[[Attestation], bool]
) -> str:
    """Move the channel at `dest`, with the evidence that moved it at the source; returns `model:channel`.

    From a version that the source's channel served, any loss is accepted: the source accepted it, or rolled back.
    """
    move, dest_channel = channel.move, read_channel(dest, channel.model, channel.name)
    served_manifests = {past_move.manifest for past_move in read_history(source, channel).moves}
    is_successor = dest_channel is not None and dest_channel.manifest in served_manifests
    passes = [canary_pass(source, digest) for digest in move.canary]
    for canary in passes:
        dest.put_bytes(source.read_blob(canary.report))
    reason = f"mirror of {source.uri}" + (f": {move.why}" if move.why else "")
    moved_channel = channels.promote(
        dest,
        manifest,
        channel.name,
        by=by,
        why=reason,
        proven_only=channel.proven_only,
        random_inputs=move.random_inputs,
        canaries=passes,
        decided_on=position_of(dest_channel),
        counts=counts,
        accepted_losses=None if is_successor else (),
    )
    return f"{moved_channel.model}:{moved_channel.name}"
