"""Attestations: validation reports made after a version was published, on machines that have the hardware.

A manifest is never rewritten. What became known later lies beside it, keyed by the engine's digest, and everything that
reads a version reads both: `judged` gives each engine the status it has today.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from builders.digest import canonical_json, digest_of, digest_of_bytes
from builders.errors import InputError, IntegrityError
from pipeline.registry import parsing
from pipeline.registry.keys import attestation_key, attestations_prefix
from pipeline.registry.manifest import EngineEntry, Manifest
from pipeline.registry.parsing import Malformed
from pipeline.registry.store import Store

if TYPE_CHECKING:
    from validation.report import Report

MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Attestation:
    """What one report says about one engine. host: digest of the machine's description."""

    engine: str
    report: str
    verdict: str
    reason: str
    host: str
    created_at: str


def attest(store: Store, manifest: Manifest, report: "Report") -> str:
    """Attach a report to a published engine and return the report's digest.

    A report that proves an engine must be one that `validation.report.approve` approves; one that failed is welcome as
    it is. Raises InputError for an engine that this version does not have, or a report that decides nothing.
    """
    from validation.report import approve

    engine = report.engine or ""
    entry = next((entry for entry in manifest.engines if entry.digest == engine), None)
    where = f"{manifest.model}@{manifest.version}"
    if entry is None:
        raise InputError(f"the report is about engine {engine or '(none)'}, which {where} does not have")
    approved = report.verdict == "proven" and approve(report) is not None
    if not approved and report.verdict != "failed":
        raise InputError(f"the report about {entry.unit} says {report.verdict!r}; only 'proven' or 'failed' decides")
    data = canonical_json(report.to_json())
    _read(data, engine, digest_of_bytes(data))
    store.create(attestation_key(manifest.model, manifest.version, engine, digest_of_bytes(data)), data)
    return digest_of_bytes(data)


def judged(
    store: Store, manifest: Manifest, counts: Callable[[Attestation], bool] | None = None
) -> tuple[EngineEntry, ...]:
    """The version's engines with the status they have today. Raises IntegrityError for a damaged attestation.

    counts: which attestations to believe, as a trust policy has it (`trust.Vouched.counts`); None believes all.
    """
    found: dict[str, list[Attestation]] = {}
    for attestation in attestations(store, manifest):
        if counts is None or counts(attestation):
            found.setdefault(attestation.engine, []).append(attestation)
    return tuple(_judge(entry, found.get(entry.digest or "", [])) for entry in manifest.engines)


def attestations(store: Store, manifest: Manifest) -> Iterator[Attestation]:
    """Every attestation of a version. Raises IntegrityError for a damaged one."""
    return (attestation for attestation, _ in attestation_documents(store, manifest))


def attestation_documents(store: Store, manifest: Manifest) -> Iterator[tuple[Attestation, bytes]]:
    """Every attestation of a version with its bytes. Raises IntegrityError for a damaged one."""
    prefix = attestations_prefix(manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        try:
            data = store.read(key) or b""
            yield _read(data, engine, name.removesuffix(".json")), data
        except Malformed as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}") from error


def _judge(entry: EngineEntry, found: list[Attestation]) -> EngineEntry:
    """Each machine's newest word counts; one machine where the engine fails now outweighs all where it passes."""
    newest = {item.host: item for item in sorted(found, key=lambda item: item.created_at)}
    failed = [item for item in newest.values() if item.verdict == "failed"]
    if not newest or not entry.usable:
        return entry
    if failed:
        return replace(entry, status="failed", reason=f"failed when validated later: {failed[-1].reason}")
    latest = max(newest.values(), key=lambda item: item.created_at)
    return replace(entry, status="proven", reason=f"proven by attestation {latest.report[:12]} of {latest.created_at}")


def _read(data: bytes, engine: str, report: str) -> Attestation:
    document: dict[str, Any] = parsing.parse_json(data, MAX_BYTES)
    stated = parsing.field(document, "engine", parsing.digest)
    if digest_of_bytes(data) != report or stated != engine:
        raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
    return Attestation(
        engine=engine,
        report=report,
        verdict=parsing.field(document, "verdict", parsing.one_of("proven", "failed")),
        reason=parsing.field(document, "reason", parsing.text),
        host=digest_of(document.get("host")),
        created_at=parsing.field(document, "created_at", parsing.text),
    )
