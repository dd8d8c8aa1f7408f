"""Publishes versions, and adds evidence to published versions."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import (
    ConflictError,
    InputError,
    IntegrityError,
    UnavailableError,
    UndecidedError,
    UnknownNameError,
    canonical_json,
    digest_of,
)
from enginesmith.core.names import number_of
from enginesmith.core.requirements import Json
from enginesmith.registry.builds.runs import recall, remember
from enginesmith.registry.evidence.attachments import Attachment, attachments
from enginesmith.registry.evidence.attestations import MAX_BYTES, attest
from enginesmith.registry.evidence.latencies import attach_latency
from enginesmith.registry.leases import BUILDING, Guard, hold_lease, secure_graphs, secure_version, version_name
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import manifest_key, page_data_key, page_key
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_writes import refresh_version
from enginesmith.registry.versions.index import hold_change
from enginesmith.registry.versions.lookup import find_lost_of, load_if_there, versions
from enginesmith.registry.versions.policies import losses_of_build

if TYPE_CHECKING:
    from enginesmith.core.reports.proof import Approved, Report
    from enginesmith.registry.trust.signing import Keyless, Signed, SigningKey

# Adds evidence to a published version (attestations, latency reports, signatures), and refreshes the channels that
# serve it, because their snapshots contain the evidence.
#
# If a writer dies in between, the next collection finds its expired lease, which names the model, and refreshes them.


def add_attestation(store: Store, manifest: Manifest, report: "Report") -> str | None:
    """`attest`, and refresh the channels that serve the version. Does nothing and returns None for a report without a
    decision, of which a part was not measured. Raises as `attest` and the store."""
    if report.verdict == "unproven":
        return None
    with _hold_change(store, manifest) as guard:
        digest = attest(store, manifest, report)
        refresh_version(guard, manifest)
    return digest


def add_latencies(store: Store, manifest: Manifest, reports: Iterable[str]) -> None:
    """`attach_latency` of each report, given as a blob's digest, and refresh the channels once."""
    report_digests = list(reports)
    if not report_digests:
        return
    with _hold_change(store, manifest) as guard:
        for report in report_digests:
            attach_latency(store, manifest, report)
        refresh_version(guard, manifest)


def add_signatures(
    store: Store, manifest: Manifest, signer: "SigningKey | Keyless", attached: Collection[str] = ()
) -> tuple["Signed", ...]:
    """`sign`, and refresh the channels if a signature is new. Raises as `sign` and the store."""
    from enginesmith.registry.trust.signing import sign

    with _hold_change(store, manifest) as guard:
        signatures = sign(store, manifest, signer, attached)
        if any(signature.new for signature in signatures):
            refresh_version(guard, manifest)
    return signatures


def add_attachment(store: Store, manifest: Manifest, attachment: Attachment, path: Path) -> tuple[Attachment, bool]:
    """Attach the file `path` to a version, and refresh the channels that serve it. Returns the attachment, and whether
    it is new: an equal one is not added twice.

    Raises InputError if the file changes meanwhile, IntegrityError if the version was deleted meanwhile, Malformed for
    an invalid field.
    """
    document, purpose = attachment.to_bytes(), f"attaching {attachment.name} to {manifest.reference}"
    with hold_change(store, [manifest.model], purpose, BUILDING) as guard:
        secure_version(guard, manifest)
        guard.secure([attachment.digest])
        old_attachment = next(
            (candidate for candidate, _ in attachments(store, manifest) if candidate.says_same(attachment)), None
        )
        if store.put_file(path) != attachment.digest:
            raise InputError(f"{path} changed while it was read; attach it again")
        guard.secure([manifest.reference, attachment.digest])
        if old_attachment is None:
            store.create(attachment.key(), document)
        refresh_version(guard, manifest)
    return old_attachment or attachment, old_attachment is None


def _hold_change(store: Store, manifest: Manifest) -> AbstractContextManager[Guard]:
    return hold_change(store, [manifest.model], f"adding evidence to {manifest.reference}")


# Publishing a version: first the blobs, then the manifest atomically, last the channel. A publication that is killed
# leaves no partial version.
#
# Only engines with an `Approved` report are published as usable: `publish` gets each with its proof, and all other
# units are failures or refusals, which have no engine.
#
# `find_same` finds a version that a publication would repeat: the same engines with the same proofs, from other inputs
# (a comment in the entry point, a renamed file, a calibration sample that changes no scale).

_RECORD = "publish"
_ATTEMPTS = 200
_RECENT = 32
# Parts of a spec that determine the engines, and so show in them. The others determine how engines are proven.
_MAKING = ("source", "precisions", "targets", "backends", "calibration", "quantization")
# Fields of a report about the time and the machine, not the engine.
_CIRCUMSTANCES = ("created_at", "host")


@dataclass(frozen=True)
class Published:
    """A version in the registry. existed: an earlier run published the same content, and nothing was written.

    channel_refusal: the reason why the channel did not move (the version is published anyway), or None.
    repeated: other inputs gave the same engines and proofs as this version, so no channel moved (`find_same`).
    """

    manifest: Manifest
    existed: bool
    channel_refusal: str | None = None
    repeated: bool = False

    @property
    def version(self) -> str:
        """The version's name."""
        return self.manifest.version

    @property
    def digest(self) -> str:
        """Digest of its manifest."""
        return self.manifest.digest


def publish(
    store: Store,
    draft: Manifest,
    approved: Sequence[tuple[EngineEntry, "Approved"]],
    others: Sequence[EngineEntry] = (),
    *,
    channel: str | None = "candidate",
    wanted_version: str | None = None,
    by: str = "",
    why: str = "",
) -> Published:
    """Publish a version of `draft`, a manifest without version and engines, and move the channel to it.

    approved: each usable engine with its proof.  others: failed and refused units.
    The version's name is `wanted_version`, or 1 + the highest number so far; if the same content was published before,
    it is that version. Raises ConflictError if the wanted version exists with other content, InputError if an entry and
    its proof disagree, IntegrityError if a blob is missing.
    """
    manifest = replace(draft, engines=_entries(approved, others))
    with hold_change(store, [manifest.model], f"publishing {manifest.model}") as guard:
        try:
            secure_graphs(guard, manifest)
            newest_number = 0 if wanted_version else _highest_number(store, manifest.model)
            existing_result = _find_existing(store, manifest, wanted_version, newest_number)
            if existing_result:
                secure_version(guard, existing_result.manifest)
            result = existing_result or _write(guard, manifest, wanted_version, newest_number)
        except ConflictError as conflict:
            conflict.nothing_written = True  # the manifest is the first document
            raise
        with published_without(result.manifest, f"the move of channel {channel}" if channel else "its build record"):
            if not result.existed:
                remember(store, _RECORD, _memo_key(result.manifest), {"version": result.version})
            if channel is None:
                return result
            refusal = _move(guard, result.manifest, channel, by, why)
        return replace(result, channel_refusal=refusal)


def _move(guard: Guard, manifest: Manifest, channel: str, by: str, why: str) -> str | None:
    """Point a channel at a version that was built. Returns the reason if the channel does not accept it, else None."""
    accepted_losses = losses_of_build(channel)
    refusal = channels.policy_refusal(guard.store, manifest, channel, accepted_losses=accepted_losses)
    if refusal is None:
        try:
            channels.point(guard, manifest, channel, by=by, why=why, accepted_losses=accepted_losses)
        except InputError as error:  # the channel was moved after the check
            return str(error)
    return refusal


@contextmanager
def published_without(manifest: Manifest, missing_part: str) -> Iterator[None]:
    """Re-raise an error of the block with a message that the version is published, and which part of it is missing."""
    try:
        yield
    except (UnavailableError, IntegrityError, ConflictError) as error:
        raise type(error)(
            f"{manifest.reference} is published, but {missing_part} could not be written: {error}"
        ) from error


def find_published(store: Store, manifest: Manifest, known_number: int = 0) -> Manifest | None:
    """The published version that equals a manifest, or None. Reads no blob. known_number: used if a listing is stale.

    Equal means: the same inputs, the same status of every unit, and all blobs present. (The engines' bytes may differ:
    compilers are not deterministic, and two builds of equal inputs are interchangeable.)
    """
    record = recall(store, _RECORD, _memo_key(manifest))
    existing_manifest = _alike(store, manifest, str(record.get("version"))) if record else None
    return existing_manifest or _recent(store, manifest, max(known_number, _highest_number(store, manifest.model)))


def find_same(
    store: Store, manifest: Manifest, reports: Sequence["Report"], wanted_version: str | None = None
) -> Manifest | None:
    """The newest version, or the wanted one if it exists, if its engines and proofs equal those of `manifest`; or None.

    manifest: ready for publication, with its engines.  reports: of its usable engines.
    """
    version = wanted_version or next(reversed(versions(store, manifest.model)), None)
    existing_manifest = _load_sound(store, manifest.model, version) if version else None
    if existing_manifest is None or _comparable_content(existing_manifest) != _comparable_content(manifest):
        return None
    if not all(map(store.has, existing_manifest.blobs())):
        return None
    own_reports = {report.unit: _comparable_report(report.to_json()) for report in reports}
    try:
        for entry in existing_manifest.engines:
            if entry.usable:
                report = parsing.parse_json(store.read_blob(str(entry.report)), MAX_BYTES)
                if _comparable_report(report) != own_reports[entry.unit]:
                    return None
    except IntegrityError:  # a damaged report proves nothing
        return None
    with hold_lease(store, f"counting on {existing_manifest.reference}") as guard:
        secure_version(guard, existing_manifest)
    return existing_manifest


def attach_page(store: Store, manifest: Manifest, page: bytes, data: bytes) -> str:
    """Write a copy of the version's HTML report and its JSON data beside the manifest, and return the page's key."""
    key = page_key(manifest.model, manifest.version)
    for document_key, content in ((page_data_key(manifest.model, manifest.version), data), (key, page)):
        with suppress(UndecidedError):  # another writer has stored its copy
            store.replace(document_key, content, store.read(document_key))
    return key


def _entries(
    approved: Sequence[tuple[EngineEntry, "Approved"]], others: Sequence[EngineEntry]
) -> tuple[EngineEntry, ...]:
    for entry, proof in approved:
        report = proof.report
        stated_facts = (entry.digest, entry.status, entry.target, entry.precision, entry.backend)
        if stated_facts != (report.engine, report.verdict, report.target, report.precision, report.backend):
            raise InputError(f"engine {entry.unit} ({entry.status}, {entry.digest}) has the proof of another one")
    for entry in others:
        if entry.usable or entry.digest is not None:
            raise InputError(
                f"engine {entry.unit} is {entry.status} and has no approved report; it cannot be published"
            )
    return (*(entry for entry, _ in approved), *others)


def _find_existing(store: Store, manifest: Manifest, version: str | None, number: int) -> Published | None:
    existing_manifest = (
        load_if_there(store, manifest.model, version) if version else find_published(store, manifest, number)
    )
    if existing_manifest is None:
        return None
    result = _same_or_conflict(existing_manifest, manifest)
    if losses := find_lost_of(store, existing_manifest):
        role = existing_manifest.blobs()[next(iter(losses))]
        raise IntegrityError(
            f"{existing_manifest.reference} has lost its {role}, and the new build gave other "
            "bytes; versions never change: restore it, or choose another version"
        )
    return result


def _write(guard: Guard, manifest: Manifest, wanted_version: str | None, seen_number: int) -> Published:
    """Write the manifest under its name or the next number. seen_number: the highest with other content."""
    store = guard.store
    guard.secure(manifest.blobs())
    for digest, loss in find_lost_of(store, manifest).items():
        blob_text = f"{manifest.blobs()[digest]} ({digest})"
        if loss.kind == "missing":
            raise IntegrityError(f"{blob_text} is not in {store.uri}; put it there before publishing")
        raise IntegrityError(f"{blob_text} in {store.uri} has {loss.detail}")
    newest_number = 0
    for _ in range(_ATTEMPTS):
        # A listing may be stale on servers with weaker consistency than S3; then the rejected number counts.
        newest_number = max(_highest_number(store, manifest.model), newest_number)
        if wanted_version is None and (existing_manifest := _recent(store, manifest, newest_number, seen_number)):
            secure_version(guard, existing_manifest)
            return Published(existing_manifest, existed=True)
        seen_number = newest_number
        version = wanted_version or str(newest_number + 1)
        new_manifest = replace(manifest, version=version)
        guard.secure([version_name(manifest.model, version)])
        if store.create(manifest_key(manifest.model, version), new_manifest.to_bytes()):
            return Published(new_manifest, existed=False)
        if wanted_version and (existing_manifest := load_if_there(store, manifest.model, wanted_version)):
            return _same_or_conflict(existing_manifest, manifest)
        newest_number += wanted_version is None
    raise ConflictError(f"versions of {manifest.model} are being published faster than this one; run again")


def _recent(store: Store, manifest: Manifest, newest_number: int, floor: int = 0) -> Manifest | None:
    """The version equal to `manifest` among the newest numbered versions after `floor`: from a run that was killed
    before it wrote its record, or from a concurrent one."""
    candidates = (
        _alike(store, manifest, str(n)) for n in range(newest_number, max(floor, newest_number - _RECENT), -1)
    )
    return next((candidate for candidate in candidates if candidate), None)


def _alike(store: Store, manifest: Manifest, version: str) -> Manifest | None:
    """The published version, if it equals `manifest` and is undamaged, else None."""
    existing_manifest = _load_sound(store, manifest.model, version)
    return (
        existing_manifest
        if existing_manifest and _same(existing_manifest, manifest) and not find_lost_of(store, existing_manifest)
        else None
    )


def _load_sound(store: Store, model: str, version: str) -> Manifest | None:
    """A version's manifest; None if it is absent or damaged. (`verify` reports damage.)"""
    with suppress(IntegrityError, UnknownNameError):
        return load_if_there(store, model, version)
    return None


def _same(theirs: Manifest, mine: Manifest) -> bool:
    return theirs.content == mine.content and _outcome(theirs) == _outcome(mine)


def _outcome(manifest: Manifest) -> list[list[str]]:
    return sorted([entry.unit, entry.status] for entry in manifest.engines)


def _same_or_conflict(theirs: Manifest, mine: Manifest) -> Published:
    if _same(theirs, mine):
        return Published(theirs, existed=True)
    difference = "results" if theirs.content == mine.content else "content"
    raise ConflictError(
        f"{mine.model}@{theirs.version} exists with other {difference} (manifest {theirs.digest[:12]}, published "
        f"{theirs.created_at}); versions never change: choose another version, or leave it out"
    )


def _highest_number(store: Store, model: str) -> int:
    return max(map(number_of, versions(store, model)), default=0)


def _memo_key(manifest: Manifest) -> str:
    return digest_of({"model": manifest.model, "content": manifest.content, "outcome": _outcome(manifest)})


def _comparable_content(manifest: Manifest) -> bytes:
    """The parts of a manifest about its engines and their proofs, without the reports' digests, as bytes."""
    entries = sorted((entry.unit, encode(replace(entry, report=None))) for entry in manifest.engines)
    spec = {name: value for name, value in manifest.spec.items() if name not in _MAKING}
    validation = decode(spec.pop("validation", {}), dict[str, Json], "spec.validation")
    validation.pop("latency", None)
    golden_fields = decode(spec.pop("golden", None) or {}, dict[str, Json], "spec.golden").get("metric")
    return canonical_json([entries, spec, validation, golden_fields, manifest.sources.get("golden")])


def _comparable_report(report: dict[str, object]) -> bytes:
    return canonical_json({name: value for name, value in report.items() if name not in _CIRCUMSTANCES})
