"""Validation reports that were made after a version was published, and each engine's status that follows from them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from enginesmith.core.codec import Excerpt, explain_damage, parse_as
from enginesmith.core.errors import Digest, InputError, IntegrityError, canonical_json, digest_of, digest_of_bytes
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Json
from enginesmith.core.types import CPU_KIND
from enginesmith.registry.manifest import STATUSES, EngineEntry, Manifest, Status, pinned_engines
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.layout import attestation_key, evidence_prefix

if TYPE_CHECKING:
    from enginesmith.core.reports.proof import Report

# Attestations: validation reports made after a version was published, on machines that have the hardware.
#
# A manifest is never rewritten. Attestations are stored beside it under the engine's digest, and `judge_entries`
# combines both into each engine's current status. A CPU engine has one status per kind of CPU
# (`enginesmith.core.hardware.machine`), because a run on one kind does not test the kernels of another.

MAX_BYTES = 16 << 20
DECIDED = ("proven", "proven on random inputs", "failed")


@dataclass(frozen=True)
class Attestation:
    """The verdict of one report on one engine. engine, report: digests.  host: digest of the machine's description.
    created_at: ISO 8601, UTC.  cpu: the machine's kind of CPU."""

    engine: str
    report: str
    verdict: Literal["proven", "proven on random inputs", "failed"]
    reason: str
    host: str
    created_at: str
    cpu: str | None = None


@dataclass(frozen=True)
class JudgedEntry(EngineEntry):
    """An engine with its current status. on: for a CPU engine, kind of CPU -> (status, reason) of runs there."""

    on: Mapping[str, tuple[Status, str]] = field(default_factory=dict)

    def on_cpu(self, kind: str | None) -> "JudgedEntry":
        """The engine with its status on a kind of CPU. Unchanged for None, its own kind, and a GPU engine.

        An engine that was only proven on other kinds is unproven. One that failed on the kind it was built for stays
        failed, unless it was run on this kind.
        """
        if kind in (None, self.cpu) or self.cpu is None or (kind not in self.on and not self.usable):
            return self
        status_text = ", ".join(f"{status} on {other_kind}" for other_kind, (status, _) in sorted(self.on.items()))
        unknown_reason = f"never run on {kind}, this kind of CPU" + (f" ({status_text})" if status_text else "")
        status, reason = self.on.get(kind, ("unproven", unknown_reason))
        return replace(self, status=status, reason=reason)


def attest(store: Store, manifest: Manifest, report: "Report") -> str:
    """Attach a validation report to a published engine and return the report's digest.

    Raises InputError for an engine that this version lacks, and for a report that neither failed nor was approved by
    `proof.approve`.
    """
    from enginesmith.core.reports.proof import approve

    engine = report.engine or ""
    entry = next((entry for entry in manifest.engines if entry.digest == engine), None)
    if entry is None:
        raise InputError(f"the report is about engine {engine or '(none)'}, which {manifest.reference} does not have")
    is_approved = report.verdict in DECIDED and approve(report) is not None
    if not is_approved and report.verdict != "failed":
        raise InputError(
            f"the report about {entry.unit} says {report.verdict!r}; it must be 'failed', or approved by all its checks"
        )
    report_bytes = canonical_json(report.to_json())
    _read(report_bytes, engine, digest_of_bytes(report_bytes))
    store.create(attestation_key(manifest.model, manifest.version, engine, digest_of_bytes(report_bytes)), report_bytes)
    return digest_of_bytes(report_bytes)


def judge_entries(
    store: Documents, manifest: Manifest, counts: Callable[[Attestation], bool] | None = None
) -> tuple[JudgedEntry, ...]:
    """The version's engines with their current status; for CPU engines, on the kind of CPU they were built for. An
    ensemble's engine is never better than the engines of its graphs.

    counts: whether an attestation counts by a trust policy (`trust.Vouched.counts`); None: all count.
    Raises IntegrityError for a damaged attestation.
    """
    engine_attestations: dict[str, list[Attestation]] = {}
    for attestation in attestations(store, manifest):
        if counts is None or counts(attestation):
            engine_attestations.setdefault(attestation.engine, []).append(attestation)
    judged_entries = (_judge(entry, engine_attestations.get(entry.digest or "", [])) for entry in manifest.engines)
    if not manifest.graphs:
        return tuple(judged_entries)
    return tuple(_judge_whole(store, manifest, entry, counts) if entry.usable else entry for entry in judged_entries)


def _judge_whole(
    store: Documents, manifest: Manifest, entry: JudgedEntry, counts: Callable[[Attestation], bool] | None
) -> JudgedEntry:
    """An ensemble's engine, with the status of its graphs' worst engine if that is worse."""
    engines: dict[str, JudgedEntry] = {}
    try:
        for graph, pinned_manifest, engine in pinned_engines(store, manifest, entry):
            entries = judge_entries(store, pinned_manifest, counts)
            engines[graph.name] = next(candidate for candidate in entries if candidate.unit == engine.unit)
    except IntegrityError as error:
        return replace(entry, status="failed", reason=str(error), on={})
    status, reason = _worst((entry.status, entry.reason), engines)
    judgements = {
        kind: _worst(judgement, {name: engine.on_cpu(kind) for name, engine in engines.items()})
        for kind, judgement in entry.on.items()
    }
    return replace(entry, status=status, reason=reason, on=judgements)


def _worst(judgement: tuple[Status, str], engines: Mapping[str, EngineEntry]) -> tuple[Status, str]:
    """Status and reason, or those of the worst engine if that is worse. engines: by graph."""
    for name, engine in engines.items():
        if STATUSES.index(engine.status) > STATUSES.index(judgement[0]):
            judgement = engine.status, f"graph {name!r}: {engine.reason}"
    return judgement


def attestations(store: Documents, manifest: Manifest) -> Iterator[Attestation]:
    """All attestations of a version. Raises IntegrityError for a damaged one."""
    return (attestation for attestation, _ in attestation_documents(store, manifest))


def attestation_documents(store: Documents, manifest: Manifest) -> Iterator[tuple[Attestation, bytes]]:
    """All attestations of a version with their bytes. Raises IntegrityError for a damaged one."""
    prefix = evidence_prefix("attestations", manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        report_bytes = store.read(key) or b""
        with explain_damage(f"{key} of {store.uri}", "delete it, and validate the engine again"):
            attestation = _read(report_bytes, engine, name.removesuffix(".json"))
        yield attestation, report_bytes


def _judge(entry: EngineEntry, evidence: list[Attestation]) -> JudgedEntry:
    """The engine with the status from attestations on the kind of CPU it was built for; for a GPU engine from all."""
    if entry.cpu is None or entry.digest is None:
        status, reason = _combine(entry, evidence)
        return JudgedEntry(**{**vars(entry), "status": status, "reason": reason})
    kinds = sorted({entry.cpu, *(a.cpu for a in evidence if a.cpu)})
    judgements = {kind: _combine(entry, [a for a in evidence if a.cpu == kind], kind == entry.cpu) for kind in kinds}
    status, reason = judgements[entry.cpu]
    decided = {kind: judgement for kind, judgement in judgements.items() if judgement[0] in DECIDED}
    return JudgedEntry(**{**vars(entry), "status": status, "reason": reason, "on": decided})


def _combine(entry: EngineEntry, evidence: list[Attestation], published: bool = True) -> tuple[Status, str]:
    """Status and reason from attestations: the newest of each machine counts, and one failure outweighs all passes.

    published: whether the manifest's status counts, too.
    """
    newest_by_host = {a.host: a for a in sorted(evidence, key=lambda a: a.created_at)}
    failures = [a for a in newest_by_host.values() if a.verdict == "failed"]
    if not newest_by_host or (published and not entry.usable):
        return entry.status, entry.reason
    if failures:
        return "failed", f"failed when validated later: {failures[-1].reason}"
    attestation = max(newest_by_host.values(), key=lambda a: a.created_at)
    return (
        attestation.verdict,
        f"{attestation.verdict} by attestation {attestation.report[:12]} of {attestation.created_at}",
    )


@dataclass(frozen=True)
class _Attested(Excerpt):
    """The content of a stored report. host: the machine's description, whose digest is its identity."""

    engine: Digest
    verdict: Literal["proven", "proven on random inputs", "failed"]
    reason: str
    created_at: str
    host: Json = None


def _read(data: bytes, engine: str, report: str) -> Attestation:
    attestation = parse_as(data, MAX_BYTES, _Attested)
    if digest_of_bytes(data) != report or attestation.engine != engine:
        raise Malformed("its content does not match its path: it was edited by hand, moved or damaged")
    cpu = attestation.host.get(CPU_KIND) if isinstance(attestation.host, Mapping) else None
    return Attestation(
        engine=engine,
        report=report,
        verdict=attestation.verdict,
        reason=attestation.reason,
        host=digest_of(attestation.host),
        created_at=attestation.created_at,
        cpu=cpu if isinstance(cpu, str) else None,
    )
