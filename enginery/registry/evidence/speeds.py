"""How fast a version's engines were on machines of one kind, where latency reports of such a machine lie beside it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from enginery.core.hardware.machine import Machine
from enginery.core.hardware.targets import product_of
from enginery.core.reports.latency import BucketLatency, LatencyReport, MachineKind
from enginery.registry.evidence.latencies import latencies
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store

# Of the runtime's own call, or of `Session.run` with its checks.
Timed = Literal["runtime", "session"]


@dataclass(frozen=True)
class MeasuredSpeed:
    """The median time of a run in seconds, added up over `buckets`, which are named as in the report.

    busy: whether the machine was busy with other work meanwhile: then it ranks nothing.  timed: what was.
    """

    seconds: float
    buckets: tuple[str, ...]
    busy: bool = False
    timed: Timed = "session"


def measured_speeds(
    store: Store, manifest: Manifest, machine: Machine, engines: Iterable[EngineEntry]
) -> dict[str, MeasuredSpeed]:
    """By the engine's digest: its speed on machines of this kind, by the newest report; without those not measured.

    The times are the runtimes' own where every one of these reports has them, else those of `Session.run`.
    Reads every latency report of the version. Raises IntegrityError for a damaged one.
    """
    reports = latencies(store, manifest)
    newest: dict[str, LatencyReport] = {}
    for entry in engines:
        alike = (report for report in reports.get(entry.digest or "", []) if _is_alike(report.machine, machine))
        if report := next(alike, None):
            newest[str(entry.digest)] = report
    buckets = [bucket for report in newest.values() for bucket in report.buckets]
    timed: Timed = "runtime" if all(_runtime(bucket) for bucket in buckets) else "session"
    speeds = {digest: _speed(report, timed) for digest, report in newest.items()}
    return {digest: speed for digest, speed in speeds.items() if speed}


def _is_alike(kind: MachineKind, machine: Machine) -> bool:
    """Whether a report's machine is of the same kind: of CPU, or the same product of GPU."""
    if machine.compute_capability is None:
        return machine.cpu is not None and kind.kind == machine.cpu
    products = {product_of(machine.compute_capability, name.replace(" ", "-")) for name in kind.gpus}
    return machine.product is not None and products == {machine.product}


def _speed(report: LatencyReport, timed: Timed) -> MeasuredSpeed | None:
    median = _runtime if timed == "runtime" else _session
    times = {bucket.name: median(bucket) for bucket in report.buckets}
    known = [value for value in times.values() if value]
    if not known or len(known) != len(times):
        return None
    return MeasuredSpeed(sum(known), tuple(sorted(times)), bool(report.busy), timed)


def _session(bucket: BucketLatency) -> float | None:
    """Seconds of the median run; the mean where runs were too few for a median."""
    return _seconds(bucket.middle.value if bucket.middle else bucket.mean_s)


def _runtime(bucket: BucketLatency) -> float | None:
    """Seconds of the runtime's own median call."""
    return _seconds(bucket.runtime.value if bucket.runtime else None)


def _seconds(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None
