"""The engines of a version on the kinds of machines that they were timed on, and those that they were not timed on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enginesmith.core.hardware.gpu_generations import GENERATIONS, generation_of
from enginesmith.core.hardware.targets import parse_targets
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, MachineKind
from enginesmith.registry.evidence.attestations import JudgedEntry, judge_entries
from enginesmith.registry.evidence.latencies import latency_reports
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from validation.capacity.batch_times import merge_buckets


@dataclass(frozen=True)
class MachineName:
    """A kind of machine. title: for people.  names: that prices may call it by, the narrowest first."""

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class TimedEngineKind:
    """An engine and its times on one kind of machine. buckets: the newest of each size.  busy: whether other work ran
    there while one of them was timed."""

    entry: JudgedEntry
    machine: MachineName
    buckets: tuple[BucketLatency, ...]
    busy: bool


def timed_engines(store: Store, manifest: Manifest) -> list[TimedEngineKind]:
    """Each usable engine of a version with each kind of machine that it was timed on, in the manifest's order.

    Raises IntegrityError for a damaged report.
    """
    entries = {entry.digest: entry for entry in judge_entries(store, manifest) if entry.usable and entry.digest}
    found: dict[tuple[str, MachineKind], list[LatencyReport]] = {}
    for report in sorted(latency_reports(store, manifest), key=lambda report: report.created_at):
        found.setdefault((report.engine, report.machine), []).append(report)
    return [
        TimedEngineKind(
            entry,
            _name(entry, machine),
            tuple(merge_buckets(report.buckets for report in reports)),
            any(report.busy for report in reports),
        )
        for digest, entry in entries.items()
        for (engine, machine), reports in found.items()
        if engine == digest
    ]


def usable_engines(store: Store, manifest: Manifest) -> list[JudgedEntry]:
    """The engines of a version that may be pulled."""
    return [entry for entry in judge_entries(store, manifest) if entry.usable]


def names_not_timed(entry: EngineEntry, wanted: Iterable[str], timed: Sequence[TimedEngineKind]) -> list[str]:
    """Of the names of machines in `wanted`, those that the engine was built for and was not timed on. timed: all of the
    version."""
    mine = {name for each in timed if each.entry.digest == entry.digest for name in each.machine.names}
    return [name for name in wanted if name not in mine and fits(entry, name)]


def fits(entry: EngineEntry, name: str) -> bool:
    """Whether an engine was built for the machines of a name, by its target."""
    target = parse_targets(name)[0]
    if target.compute_capability is None:
        return entry.compute_capability is None and target.name in ("cpu", entry.target, entry.cpu)
    return target.compute_capability == entry.compute_capability and entry.product in (None, target.product)


def _name(entry: EngineEntry, machine: MachineKind) -> MachineName:
    if entry.compute_capability is None:
        return MachineName(f"{machine.kind}, {machine.cores} cores", (machine.kind, "cpu"))
    labels = [gpu.strip().replace(" ", "-") for gpu in machine.gpus]
    for generation in GENERATIONS:
        for product, known in generation.products.items():
            if set(labels) & set(known):
                return MachineName(product, (product, generation.sm))
    own = generation_of(entry.compute_capability)
    names = (own.sm,) if own else (entry.target,)
    return MachineName(", ".join(machine.gpus) or entry.target, names)
