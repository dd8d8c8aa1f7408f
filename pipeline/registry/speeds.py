"""How fast a version's engines were on machines of one kind, where latency reports of such a machine lie beside it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from builders.targets import product_of
from pipeline.registry.latencies import latencies
from pipeline.registry.machine import Machine
from pipeline.registry.manifest import EngineEntry, Manifest
from pipeline.registry.store import Store


@dataclass(frozen=True)
class Speed:
    """The median time of a run in seconds, added up over `buckets`, which are named as in the report.

    busy: whether the machine was busy with other work meanwhile: then it ranks nothing.
    """

    seconds: float
    buckets: tuple[str, ...]
    busy: bool = False


def measured_speeds(
    store: Store, manifest: Manifest, machine: Machine, engines: Iterable[EngineEntry]
) -> dict[str, Speed]:
    """By the engine's digest: its speed on machines of this kind, by the newest report; without those not measured.

    Reads every latency report of the version. Raises IntegrityError for a damaged one.
    """
    reports = latencies(store, manifest)
    found = {}
    for entry in engines:
        alike = (report for report in reports.get(entry.digest or "", []) if _is_alike(report["machine"], machine))
        if (report := next(alike, None)) and (speed := _speed(report)):
            found[str(entry.digest)] = speed
    return found


def _is_alike(told: Mapping[str, Any], machine: Machine) -> bool:
    """Whether a report's machine is of the same kind: of CPU, or the same product of GPU."""
    if machine.compute_capability is None:
        return machine.cpu is not None and told.get("kind") == machine.cpu
    names = told.get("gpus")
    products = {product_of(machine.compute_capability, str(name).replace(" ", "-")) for name in names or ()}
    return machine.product is not None and products == {machine.product}


def _speed(report: Mapping[str, Any]) -> Speed | None:
    times = {str(item.get("name")): _median(item) for item in report["buckets"]}
    known = [value for value in times.values() if value]
    busy = any((item.get("surroundings") or {}).get("busy") for item in report["buckets"])
    return Speed(sum(known), tuple(sorted(times)), busy) if known and len(known) == len(times) else None


def _median(bucket: Mapping[str, Any]) -> float | None:
    """Seconds of the median run; the mean where runs were too few for a median."""
    quantiles = bucket.get("quantiles")
    middle = next((item.get("value") for item in quantiles or () if item.get("p") == 0.5), None)
    value = middle if middle is not None else bucket.get("mean_s")
    return float(value) if isinstance(value, int | float) and value > 0 else None
