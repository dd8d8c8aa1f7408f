"""The inputs of a capacity plan: measured run times, workloads, prices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, InputError, UnknownNameError
from enginesmith.core.hardware.machine import GENERATIONS, generation_of, parse_targets
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, MachineKind
from enginesmith.core.types import Dim
from enginesmith.registry.evidence.attestations import JudgedEntry, judge_entries
from enginesmith.registry.evidence.latencies import latency_reports
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from pipeline.spec.document import Kind, load_document
from pipeline.spec.source import Loc, Mistakes, SpecPart
from validation.capacity.greatest_rate import (
    REQUESTS,
    SIMULATIONS,
    Workload,
    merge_buckets,
    poisson_workload,
    recorded_workload,
)
from validation.latency.measurement.loop import parse_sizes, tuned_for
from validation.traffic.trace import Trace


@dataclass(frozen=True)
class MachineName:
    """A kind of machine. title: for people.  names: that prices may use for it, the narrowest first."""

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class TimedEngineKind:
    """An engine and its times on one kind of machine. buckets: the newest of each size.  busy: whether other work ran
    during one of the measurements.  entry: the engine in the version's manifest."""

    entry: JudgedEntry
    machine: MachineName
    buckets: tuple[BucketLatency, ...]
    busy: bool


def timed_engines(store: Store, manifest: Manifest) -> list[TimedEngineKind]:
    """Each usable engine of a version with each kind of machine that it was timed on, in the manifest's order.

    Raises IntegrityError for a damaged report.
    """
    entries = {entry.digest: entry for entry in judge_entries(store, manifest) if entry.usable and entry.digest}
    reports_by_engine: dict[tuple[str, MachineKind], list[LatencyReport]] = {}
    for report in sorted(latency_reports(store, manifest), key=lambda report: report.created_at):
        reports_by_engine.setdefault((report.engine, report.machine), []).append(report)
    return [
        TimedEngineKind(
            entry,
            _name(entry, machine),
            tuple(merge_buckets(report.buckets for report in reports)),
            any(report.busy for report in reports),
        )
        for digest, entry in entries.items()
        for (engine, machine), reports in reports_by_engine.items()
        if engine == digest
    ]


def fits(entry: EngineEntry, name: str) -> bool:
    """Whether an engine's target includes the machines of a name."""
    target = parse_targets(name)[0]
    if target.compute_capability is None:
        return entry.compute_capability is None and target.name in ("cpu", entry.target, entry.cpu)
    return target.compute_capability == entry.compute_capability and entry.product in (None, target.product)


def _name(entry: EngineEntry, machine: MachineKind) -> MachineName:
    if entry.compute_capability is None:
        return MachineName(f"{machine.kind}, {machine.cores} cores", (machine.kind, "cpu"))
    labels = [gpu.strip().replace(" ", "-") for gpu in machine.gpus]
    for generation in GENERATIONS:
        for product, product_labels in generation.products.items():
            if set(labels) & set(product_labels):
                return MachineName(product, (product, generation.sm))
    engine_generation = generation_of(entry.compute_capability)
    names = (engine_generation.sm,) if engine_generation else (entry.target,)
    return MachineName(", ".join(machine.gpus) or entry.target, names)


# Prices of machines per hour, and numbers of machines (docs/guides/traffic.md).

EXAMPLE = "write such as `l4: {per_hour: 0.71, count: 40}`"


class MachinePrice(SpecPart):
    """The price of one machine: a GPU with its host resources, or a node without a GPU."""

    per_hour: float = Field(gt=0, le=1e9)
    count: int | None = Field(None, ge=0, le=1_000_000, strict=True, description="default: as many as are wanted")


class PriceFile(SpecPart):
    """The content of a file of prices: names of machines, each with its price, and the currency."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, MachinePrice]
    currency: str = Field("", max_length=12)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        mistakes: list[tuple[Loc, str]] = [
            ((name,), reason) for name in self.__pydantic_extra__ if (reason := _why_no_machine(name))
        ]
        if not self.__pydantic_extra__:
            mistakes = [((), f"has no price; {EXAMPLE}")]
        if mistakes:
            raise Mistakes(mistakes)
        return self


def _why_no_machine(name: str) -> str:
    """Why a name does not mean one kind of machine; '' if it does."""
    try:
        targets = parse_targets(name)
    except UnknownNameError as error:
        return str(error)
    target_text = ", ".join(target.name for target in targets)
    return f"{name} stands for several: {target_text}; give a price for each" if len(targets) > 1 else ""


@dataclass(frozen=True)
class MachinePrices:
    """Prices by the name of the machine. source: the file's name."""

    machines: Mapping[str, MachinePrice]
    currency: str
    source: str

    def name_of(self, names: Sequence[str]) -> str | None:
        """The first of a machine's names that has a price; None without one. names: narrowest first ('l4', 'sm_89')."""
        return next((name for name in names if name in self.machines), None)


KIND = Kind(PriceFile, "a list of prices", "l4 and currency", EXAMPLE)


def read_prices(path: Path) -> MachinePrices:
    """The prices in a YAML file, by the names of targets ('L4' becomes 'l4', '8.9' becomes 'sm_89').

    Raises SpecError with a line for each mistake.
    """
    price_document, _ = load_document(path, KIND)
    machines = {parse_targets(name)[0].name: price for name, price in price_document.__pydantic_extra__.items()}
    return MachinePrices(machines, price_document.currency, str(path))


# The workloads of one machine: Poisson or recorded arrivals, and the sizes of dims other than the batch.

# The least number of recorded requests from which p99 can be estimated.
LEAST_REQUESTS = 100


@dataclass(frozen=True, eq=False)
class AskedWorkload:
    """Independent workloads. queues: for each of their queues, the sizes of the dims except the batch.  words: a
    description of the arrivals."""

    workloads: tuple[Workload, ...]
    queues: tuple[Mapping[str, int], ...]
    words: str


def steady_workload(text: str | None, dims: Sequence[Dim], batch: str | None) -> AskedWorkload:
    """Poisson arrivals of one sample each, with the sizes in 'length=64' and the tuned sizes of other dims. Raises
    InputError as `parse_sizes`, and for several samples per request, which a batcher would join.
    """
    sizes = parse_sizes(text, dims) if text else tuned_for(dims)
    stated_dims = {item.partition("=")[0].strip() for item in (text or "").split(",")}
    if batch in stated_dims and sizes[batch] != 1:
        raise InputError(
            f"--at {batch}={sizes[batch]}: a request has one sample, and the batcher joins requests (--batch);"
            " for requests of several samples, give --traffic"
        )
    other_sizes = {name: size for name, size in sizes.items() if name != batch}
    sizes_text = ", ".join(f"{dim}={size}" for dim, size in other_sizes.items())
    arrival_text = "Poisson arrivals of one sample" + (f" at {sizes_text}" if sizes_text else "")
    return AskedWorkload(tuple(poisson_workload(seed) for seed in range(SIMULATIONS)), (other_sizes,), arrival_text)


def traffic_workload(trace: Trace, dims: Sequence[Dim], batch: str | None) -> AskedWorkload:
    """Arrivals and sizes of recorded requests; Poisson arrivals if the requests have no times.

    If the spec has buckets for a dim, a size is raised to the edge of its bucket.
    Raises DataError for too few requests, and for a size outside of the spec's range.
    """
    if len(trace) < LEAST_REQUESTS:
        raise DataError(f"the traffic has {len(trace)} requests; p99 takes at least {LEAST_REQUESTS}: record more")
    ones = np.ones(len(trace), np.int64)
    samples = trace.sizes.get(batch, ones) if batch else ones
    rows = [_raise_to_edges(dim, trace.sizes[dim.name]) for dim in dims if dim.name != batch]
    names = [dim.name for dim in dims if dim.name != batch]
    size_sets, queues = np.unique(np.array(rows, np.int64).reshape(len(rows), len(trace)), axis=1, return_inverse=True)
    sizes = tuple(dict(zip(names, column, strict=True)) for column in size_sets.T.tolist()) or ({},)
    queues = np.asarray(queues, np.int64).ravel()
    seeds = range(SIMULATIONS)
    if trace.timed:
        workloads = tuple(recorded_workload(trace.at, samples, queues, seed) for seed in seeds)
    else:
        workloads = tuple(poisson_workload(seed, REQUESTS, (samples, queues)) for seed in seeds)
    arrival_text = "recorded arrivals, scaled in time" if trace.timed else "Poisson arrivals of recorded sizes"
    return AskedWorkload(workloads, sizes, f"{arrival_text} ({len(trace)} requests)")


def _raise_to_edges(dim: Dim, sizes: Array) -> Array:
    if outliers := sizes[(sizes < dim.min) | (sizes > dim.max)].tolist():
        raise DataError(
            f"the traffic has {dim.name}={outliers[0]}, but the model accepts {dim.words}; record other traffic"
        )
    edges = np.array(dim.edges, np.int64)
    return edges[np.searchsorted(edges, sizes)] if len(edges) else sizes
