"""What was proven and measured after publication: attestations and latency reports."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from enginesmith.core.codec import Excerpt, parse_as
from enginesmith.core.errors import Digest, InputError, IntegrityError, canonical_json, digest_of, digest_of_bytes
from enginesmith.core.hardware.machine import Machine, product_of
from enginesmith.core.names import version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.reports.latency import BucketLatency, Interval, LatencyReport, MachineKind, Timed, timed_alike
from enginesmith.core.requirements import Json
from enginesmith.core.types import CPU_KIND
from enginesmith.registry.manifest import STATUSES, EngineEntry, Manifest, Status, pinned_engines
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.layout import attestation_key, evidence_prefix, latency_key

if TYPE_CHECKING:
    from enginesmith.core.reports.proof import Report


# Attestations: validation reports made after a version was published, on machines that have the hardware.
#
# A manifest is never rewritten. Attestations are stored beside it under the engine's digest, and `judge_entries`
# combines both into each engine's current status. A CPU engine has a status on each kind of CPU
# (`enginesmith.core.hardware.machine`), since a run on one kind says nothing about the kernels of another.


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
    """An engine with its current status. on: of a CPU engine, kind of CPU -> (status, reason) of runs there."""

    on: Mapping[str, tuple[Status, str]] = field(default_factory=dict)

    def on_cpu(self, kind: str | None) -> "JudgedEntry":
        """The engine with its status on a kind of CPU. Unchanged for None, for the kind that it was built for, and for
        a GPU engine.

        An engine that was only proven on other kinds is unproven; one that failed on the kind it was built for stays
        failed, unless it was run on this kind.
        """
        if kind in (None, self.cpu) or self.cpu is None or (kind not in self.on and not self.usable):
            return self
        tried = ", ".join(f"{status} on {other}" for other, (status, _) in sorted(self.on.items()))
        unknown = f"never run on {kind}, this kind of CPU" + (f" ({tried})" if tried else "")
        status, reason = self.on.get(kind, ("unproven", unknown))
        return replace(self, status=status, reason=reason)


def attest(store: Store, manifest: Manifest, report: "Report") -> str:
    """Attach a validation report to a published engine and return the report's digest.

    Raises InputError for an engine that this version does not have, and for a report that is neither failed nor
    approved by `proof.approve`.
    """
    from enginesmith.core.reports.proof import approve

    engine = report.engine or ""
    entry = next((entry for entry in manifest.engines if entry.digest == engine), None)
    where = f"{manifest.model}@{manifest.version}"
    if entry is None:
        raise InputError(f"the report is about engine {engine or '(none)'}, which {where} does not have")
    approved = report.verdict in DECIDED and approve(report) is not None
    if not approved and report.verdict != "failed":
        raise InputError(f"the report about {entry.unit} says {report.verdict!r}; only 'proven' or 'failed' decides")
    data = canonical_json(report.to_json())
    _read(data, engine, digest_of_bytes(data))
    store.create(attestation_key(manifest.model, manifest.version, engine, digest_of_bytes(data)), data)
    return digest_of_bytes(data)


def judge_entries(
    store: Documents, manifest: Manifest, counts: Callable[[Attestation], bool] | None = None
) -> tuple[JudgedEntry, ...]:
    """The version's engines with their current status; of a CPU engine the one on the kind of CPU it was built for. An
    engine of an ensemble is no better than those that it stands for.

    counts: whether an attestation counts by a trust policy (`trust.Vouched.counts`); None: all of them do.
    Raises IntegrityError for a damaged attestation.
    """
    found: dict[str, list[Attestation]] = {}
    for attestation in attestations(store, manifest):
        if counts is None or counts(attestation):
            found.setdefault(attestation.engine, []).append(attestation)
    judged = (_judge(entry, found.get(entry.digest or "", [])) for entry in manifest.engines)
    if not manifest.graphs:
        return tuple(judged)
    return tuple(_judge_whole(store, manifest, entry, counts) if entry.usable else entry for entry in judged)


def _judge_whole(
    store: Documents, manifest: Manifest, entry: JudgedEntry, counts: Callable[[Attestation], bool] | None
) -> JudgedEntry:
    """An engine of an ensemble with the status of the worst engine that it stands for, where that is worse."""
    engines: dict[str, JudgedEntry] = {}
    try:
        for graph, pinned, engine in pinned_engines(store, manifest, entry):
            judged = judge_entries(store, pinned, counts)
            engines[graph.name] = next(item for item in judged if item.unit == engine.unit)
    except IntegrityError as error:
        return replace(entry, status="failed", reason=str(error), on={})
    status, reason = _worst((entry.status, entry.reason), engines)
    on = {
        kind: _worst(found, {name: engine.on_cpu(kind) for name, engine in engines.items()})
        for kind, found in entry.on.items()
    }
    return replace(entry, status=status, reason=reason, on=on)


def _worst(found: tuple[Status, str], engines: Mapping[str, EngineEntry]) -> tuple[Status, str]:
    """Status and reason, those of an engine where that is worse. engines: by graph."""
    for name, engine in engines.items():
        if STATUSES.index(engine.status) > STATUSES.index(found[0]):
            found = engine.status, f"graph {name!r}: {engine.reason}"
    return found


def attestations(store: Documents, manifest: Manifest) -> Iterator[Attestation]:
    """All attestations of a version. Raises IntegrityError for a damaged one."""
    return (attestation for attestation, _ in attestation_documents(store, manifest))


def attestation_documents(store: Documents, manifest: Manifest) -> Iterator[tuple[Attestation, bytes]]:
    """All attestations of a version with their bytes. Raises IntegrityError for a damaged one."""
    prefix = evidence_prefix("attestations", manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        try:
            data = store.read(key) or b""
            yield _read(data, engine, name.removesuffix(".json")), data
        except Malformed as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}") from error


def _judge(entry: EngineEntry, found: list[Attestation]) -> JudgedEntry:
    """The engine with the status by the attestations on the kind of CPU it was built for; a GPU engine by all."""
    judged = JudgedEntry(**vars(entry))
    if entry.cpu is None or entry.digest is None:
        status, reason = _combine(entry, found)
        return replace(judged, status=status, reason=reason)
    kinds = sorted({entry.cpu, *(item.cpu for item in found if item.cpu)})
    statuses = {
        kind: _combine(entry, [item for item in found if item.cpu == kind], kind == entry.cpu) for kind in kinds
    }
    status, reason = statuses[entry.cpu]
    return replace(
        judged,
        status=status,
        reason=reason,
        on={kind: found for kind, found in statuses.items() if found[0] in DECIDED},
    )


def _combine(entry: EngineEntry, found: list[Attestation], published: bool = True) -> tuple[Status, str]:
    """Status and reason by attestations: of each machine the newest counts, and one failure outweighs all passes.

    published: whether the manifest's status counts, too.
    """
    newest = {item.host: item for item in sorted(found, key=lambda item: item.created_at)}
    failed = [item for item in newest.values() if item.verdict == "failed"]
    if not newest or (published and not entry.usable):
        return entry.status, entry.reason
    if failed:
        return "failed", f"failed when validated later: {failed[-1].reason}"
    latest = max(newest.values(), key=lambda item: item.created_at)
    return latest.verdict, f"{latest.verdict} by attestation {latest.report[:12]} of {latest.created_at}"


@dataclass(frozen=True)
class _Attested(Excerpt):
    """What a stored report says. host: of the machine, of which the digest is its identity."""

    engine: Digest
    verdict: Literal["proven", "proven on random inputs", "failed"]
    reason: str
    created_at: str
    host: Json = None


def _read(data: bytes, engine: str, report: str) -> Attestation:
    found = parse_as(data, MAX_BYTES, _Attested)
    if digest_of_bytes(data) != report or found.engine != engine:
        raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
    cpu = found.host.get(CPU_KIND) if isinstance(found.host, Mapping) else None
    return Attestation(
        engine=engine,
        report=report,
        verdict=found.verdict,
        reason=found.reason,
        host=digest_of(found.host),
        created_at=found.created_at,
        cpu=cpu if isinstance(cpu, str) else None,
    )


# Latency reports of published engines, for each kind of machine they were timed on, and speeds from them.
#
# Like attestations they are stored beside the manifest, under the engine's digest and their own; the manifest does not
# change.


_MOST_BYTES = 16 << 20
_REMEDY = "time the engine again"


def attach_latency(store: Store, manifest: Manifest, report: str) -> None:
    """Store a report, given as a blob's digest, beside its version; nothing changes if it is there already.

    Raises IntegrityError for a blob that is no such report, or about an engine that the version does not have.
    """
    engine = read_latency_report(store, report).engine
    if all(entry.digest != engine for entry in manifest.engines):
        where = f"{manifest.model}@{manifest.version}"
        raise IntegrityError(f"the latency report {report} is about engine {engine}, which {where} does not have")
    store.create(latency_key(manifest.model, manifest.version, engine, report), store.read_blob(report))


def read_latency_report(store: Store, report: str) -> LatencyReport:
    """The report with this blob digest. Raises IntegrityError for a blob that is none."""
    try:
        return _parse(store.read_blob(report))
    except IntegrityError as error:
        raise IntegrityError(f"blob {report} is no latency report: {error}; {_REMEDY}") from error


def latency_reports(store: Documents, manifest: Manifest) -> Iterator[LatencyReport]:
    """All of a version, in the order of their keys. Raises IntegrityError for a damaged one."""
    prefix = evidence_prefix("latency", manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        data = store.read(key) or b""
        try:
            report = _parse(data)
            if digest_of_bytes(data) != name.removesuffix(".json") or report.engine != engine:
                raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
        except IntegrityError as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}; {_REMEDY}") from error
        yield report


def _parse(data: bytes) -> LatencyReport:
    return parse_as(data, _MOST_BYTES, LatencyReport)


def latencies(store: Documents, manifest: Manifest) -> dict[str, list[LatencyReport]]:
    """Engine's digest -> the newest report of each kind of machine, newest first. One at sizes that somebody asked for
    counts where there is no other: engines are compared at the sizes that all are timed at.

    Raises IntegrityError for a damaged report.
    """
    found: dict[str, list[LatencyReport]] = {}
    newest = newest_of_each(latency_reports(store, manifest))
    for report in sorted(newest, key=lambda item: item.created_at, reverse=True):
        found.setdefault(report.engine, []).append(report)
    return found


def newest_of_each(reports: Iterable[LatencyReport]) -> list[LatencyReport]:
    """Of each engine and kind of machine the report that counts, as in `latencies`."""
    newest: dict[tuple[str, MachineKind], LatencyReport] = {}
    for report in reports:
        key = (report.engine, report.machine)
        if key not in newest or _rank(newest[key]) <= _rank(report):
            newest[key] = report
    return list(newest.values())


def _rank(report: LatencyReport) -> tuple[bool, str]:
    return isinstance(report.asked.buckets, str), report.created_at


@dataclass(frozen=True)
class MeasuredSpeed:
    """The median time of a run in seconds, summed over `buckets`, which are named as in the report.

    busy: whether other work ran on the machine.  timed: the runtime's call, or `Session.run`.  interval: the 95 %
    intervals of the medians, summed; None where one of them had too few runs.
    """

    seconds: float
    buckets: tuple[str, ...]
    busy: bool = False
    timed: Timed = "session"
    interval: Interval | None = None


def measured_speeds(
    store: Documents, manifest: Manifest, machine: Machine, engines: Iterable[EngineEntry]
) -> dict[str, MeasuredSpeed]:
    """Engine's digest -> its speed on machines of this kind, by the newest report; unmeasured engines are left out.

    The times are the runtimes' own where every one of these reports has them, else those of `Session.run`.
    Reads every latency report of the version. Raises IntegrityError for a damaged one.
    """
    wanted = {entry.digest for entry in engines}
    alike = measured_latencies(store, manifest, machine)
    return speeds_of({digest: report for digest, report in alike.items() if digest in wanted})


def speeds_of(newest: Mapping[str, LatencyReport]) -> dict[str, MeasuredSpeed]:
    """Engine's digest -> its speed by its report, all of machines of one kind; unmeasured engines are left out."""
    timed = timed_alike(newest.values())
    speeds = {digest: _speed(report, timed) for digest, report in newest.items()}
    return {digest: speed for digest, speed in speeds.items() if speed}


def measured_latencies(store: Documents, manifest: Manifest, machine: Machine) -> dict[str, LatencyReport]:
    """Engine's digest -> its newest latency report on machines of this kind; unmeasured engines are left out.

    Reads every latency report of the version. Raises IntegrityError for a damaged one.
    """
    return newest_on(latencies(store, manifest), machine)


def newest_on(reports: Mapping[str, list[LatencyReport]], machine: Machine) -> dict[str, LatencyReport]:
    """Engine's digest -> its newest report on machines of this kind. reports: as `latencies` gives them."""
    alike = {digest: [item for item in each if _is_alike(item.machine, machine)] for digest, each in reports.items()}
    return {digest: found[0] for digest, found in alike.items() if found}


def _is_alike(kind: MachineKind, machine: Machine) -> bool:
    """Whether a report's machine is of the same kind: of CPU, or the same product of GPU."""
    if machine.compute_capability is None:
        return machine.cpu is not None and kind.kind == machine.cpu
    products = {product_of(machine.compute_capability, name.replace(" ", "-")) for name in kind.gpus}
    return machine.product is not None and products == {machine.product}


def _speed(report: LatencyReport, timed: Timed) -> MeasuredSpeed | None:
    """The speed by one report; None where a bucket lacks a time of this kind, or there are none."""
    times = {bucket.name: _median_s(bucket, timed) for bucket in report.buckets}
    known = [value for value in times.values() if value]
    if not known or len(known) != len(times):
        return None
    intervals = [bucket.interval(timed) for bucket in report.buckets]
    ends = [item for item in intervals if item]
    interval = (sum(low for low, _ in ends), sum(high for _, high in ends)) if len(ends) == len(intervals) else None
    return MeasuredSpeed(sum(known), tuple(sorted(times, key=version_order)), bool(report.busy), timed, interval)


def _median_s(bucket: BucketLatency, timed: Timed) -> float | None:
    """Seconds of the median run, or of the mean one where runs were too few; of the runtime's call only the median."""
    if timed == "runtime":
        value = bucket.runtime.value if bucket.runtime else None
    else:
        value = bucket.middle.value if bucket.middle else bucket.mean_s
    return value if value is not None and 0 < value < math.inf else None
