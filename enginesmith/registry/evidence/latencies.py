"""Latency reports of published engines, and their speeds on a kind of machine."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from enginesmith.core.codec import explain_damage, parse_as
from enginesmith.core.errors import IntegrityError, digest_of_bytes
from enginesmith.core.hardware.machine import Machine, product_of
from enginesmith.core.names import version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.reports.latency import BucketLatency, Interval, LatencyReport, MachineKind, Timed, timed_alike
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.layout import evidence_prefix, latency_key

# Latency reports of published engines, per kind of machine that timed them, and speeds from them.
#
# Like attestations they are stored beside the manifest, under the engine's digest and their own; the manifest does not
# change.

_MOST_BYTES = 16 << 20
_REMEDY = "time the engine again"


def attach_latency(store: Store, manifest: Manifest, report: str) -> None:
    """Store a report, given as a blob's digest, beside its version; nothing changes if it is stored already.

    Raises IntegrityError for a blob that is no latency report, or is about an engine that the version lacks.
    """
    engine = read_latency_report(store, report).engine
    if all(entry.digest != engine for entry in manifest.engines):
        raise IntegrityError(
            f"the latency report {report} is about engine {engine}, which {manifest.reference} does not have"
        )
    store.create(latency_key(manifest.model, manifest.version, engine, report), store.read_blob(report))


def read_latency_report(store: Store, report: str) -> LatencyReport:
    """The report with this blob digest. Raises IntegrityError if the blob is no latency report."""
    with explain_damage(f"blob {report} is not a latency report", _REMEDY):
        return _parse(store.read_blob(report))


def latency_reports(store: Documents, manifest: Manifest) -> Iterator[LatencyReport]:
    """All latency reports of a version, in the order of their keys. Raises IntegrityError for a damaged one."""
    prefix = evidence_prefix("latency", manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        report_bytes = store.read(key) or b""
        with explain_damage(f"{key} of {store.uri}", _REMEDY):
            report = _parse(report_bytes)
            if digest_of_bytes(report_bytes) != name.removesuffix(".json") or report.engine != engine:
                raise Malformed("its content does not match its path: it was edited by hand, moved or damaged")
        yield report


def _parse(data: bytes) -> LatencyReport:
    return parse_as(data, _MOST_BYTES, LatencyReport)


def latencies(store: Documents, manifest: Manifest) -> dict[str, list[LatencyReport]]:
    """Engine's digest -> the newest report of each kind of machine, newest first. Reports at sizes that a user chose
    count only if there is no other: engines are compared at the sizes that all are timed at.

    Raises IntegrityError for a damaged report.
    """
    engine_reports: dict[str, list[LatencyReport]] = {}
    newest_reports = newest_of_each(latency_reports(store, manifest))
    for report in sorted(newest_reports, key=lambda report: report.created_at, reverse=True):
        engine_reports.setdefault(report.engine, []).append(report)
    return engine_reports


def newest_of_each(reports: Iterable[LatencyReport]) -> list[LatencyReport]:
    """For each engine and kind of machine, the report that counts, as in `latencies`."""
    newest_reports: dict[tuple[str, MachineKind], LatencyReport] = {}
    for report in reports:
        key = (report.engine, report.machine)
        if key not in newest_reports or _rank(newest_reports[key]) <= _rank(report):
            newest_reports[key] = report
    return list(newest_reports.values())


def _rank(report: LatencyReport) -> tuple[bool, str]:
    return isinstance(report.asked.buckets, str), report.created_at


@dataclass(frozen=True)
class MeasuredSpeed:
    """The median time of a run in seconds, summed over `buckets`, which are named as in the report.

    busy: whether other work ran on the machine.  timed: the runtime's call, or `Session.run`.  interval: the 95 %
    intervals of the medians, summed; None if one of them had too few runs.
    """

    seconds: float
    buckets: tuple[str, ...]
    busy: bool = False
    timed: Timed = "session"
    interval: Interval | None = None


def measured_speeds(
    store: Documents, manifest: Manifest, machine: Machine, engines: Iterable[EngineEntry]
) -> dict[str, MeasuredSpeed]:
    """Engine's digest -> its speed on machines of this kind, from the newest report; unmeasured engines are left out.

    The times are the runtimes' own if all these reports have them, else those of `Session.run`.
    Reads every latency report of the version. Raises IntegrityError for a damaged one.
    """
    engine_digests = {entry.digest for entry in engines}
    machine_reports = measured_latencies(store, manifest, machine)
    return speeds_of({digest: report for digest, report in machine_reports.items() if digest in engine_digests})


def speeds_of(reports: Mapping[str, LatencyReport]) -> dict[str, MeasuredSpeed]:
    """Engine's digest -> its speed from its report, all on machines of one kind; unmeasured engines are left out."""
    timing_kind = timed_alike(reports.values())
    speeds = {digest: _speed(report, timing_kind) for digest, report in reports.items()}
    return {digest: speed for digest, speed in speeds.items() if speed}


def measured_latencies(store: Documents, manifest: Manifest, machine: Machine) -> dict[str, LatencyReport]:
    """Engine's digest -> its newest latency report on machines of this kind; unmeasured engines are left out.

    Reads every latency report of the version. Raises IntegrityError for a damaged one.
    """
    return newest_on(latencies(store, manifest), machine)


def newest_on(reports: Mapping[str, list[LatencyReport]], machine: Machine) -> dict[str, LatencyReport]:
    """Engine's digest -> its newest report on machines of this kind. reports: from `latencies`."""
    fitting_reports = {
        digest: [r for r in engine_reports if _is_alike(r.machine, machine)]
        for digest, engine_reports in reports.items()
    }
    return {digest: matching_reports[0] for digest, matching_reports in fitting_reports.items() if matching_reports}


def _is_alike(kind: MachineKind, machine: Machine) -> bool:
    """Whether a report's machine has the same kind of CPU, or the same product of GPU."""
    if machine.compute_capability is None:
        return machine.cpu is not None and kind.kind == machine.cpu
    products = {product_of(machine.compute_capability, name.replace(" ", "-")) for name in kind.gpus}
    return machine.product is not None and products == {machine.product}


def _speed(report: LatencyReport, timed: Timed) -> MeasuredSpeed | None:
    """The speed from one report; None if it has no buckets, or a bucket lacks a time of this kind."""
    median_by_bucket = {bucket.name: _median_s(bucket, timed) for bucket in report.buckets}
    medians = [value for value in median_by_bucket.values() if value]
    if not medians or len(medians) != len(median_by_bucket):
        return None
    intervals = [bucket.interval(timed) for bucket in report.buckets]
    spans = [span for span in intervals if span]
    interval = (sum(low for low, _ in spans), sum(high for _, high in spans)) if len(spans) == len(intervals) else None
    return MeasuredSpeed(
        sum(medians), tuple(sorted(median_by_bucket, key=version_order)), bool(report.busy), timed, interval
    )


def _median_s(bucket: BucketLatency, timed: Timed) -> float | None:
    """Seconds of the median run, or of the mean run if there were too few; for the runtime's call only the median."""
    if timed == "runtime":
        value = bucket.runtime.value if bucket.runtime else None
    else:
        value = bucket.middle.value if bucket.middle else bucket.mean_s
    return value if value is not None and 0 < value < math.inf else None
