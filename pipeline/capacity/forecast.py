"""How many machines recorded traffic needs, by a forecast and by a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith.core.errors import DataError, InputError
from enginesmith.core.text import format_plain
from enginesmith.core.types import Dim
from enginesmith.registry.evidence.attestations import JudgedEntry, judge_entries
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from pipeline.capacity.measured import (
    AskedWorkload,
    MachinePrices,
    TimedEngineKind,
    fits,
    read_prices,
    steady_workload,
    timed_engines,
    traffic_workload,
)
from pipeline.fleet.groups import Fleet
from pipeline.fleet.inventory import read_inventory
from pipeline.operations.validate import spec_of
from pipeline.spec.model import ModelSpec
from pipeline.traffic.place import read_place
from validation.capacity.greatest_rate import (
    BatchTimes,
    CostCurve,
    GreatestRate,
    LatencyLimit,
    batch_times,
    choose_policy,
    find_greatest_rate,
    policies_to_try,
)
from validation.capacity.machines import (
    MOST_MACHINES,
    CapacityDemand,
    FleetMix,
    MachineCount,
    MachineOffer,
    cheapest_mix,
    cost_per_million,
    machines_for,
)
from validation.data.batches import leading_dim
from validation.plotting import seconds_text

# Without a given batch, at most this many of the timed batch sizes are tried, and the largest.
MOST_BATCHES = 4


@dataclass(frozen=True)
class ServerOverhead:
    """Seconds that a server adds to the runs of its engine: per batch, and per request of the batch."""

    batch_s: float
    request_s: float


@dataclass(frozen=True)
class ServingTerms:
    """How a machine serves. batch: greatest number of samples in a batch; None: the best timed one.  wait_s: longest
    wait for other requests; None: the best of a grid.  server: its overhead; None: not counted."""

    batch: int | None = None
    wait_s: float | None = None
    server: ServerOverhead | None = None


@dataclass(frozen=True)
class FleetCost:
    """Cost of a million requests on the machines that a rate needs; high: None if possibly no number of machines is
    enough."""

    value: float
    low: float
    high: float | None


@dataclass(frozen=True)
class EngineCapacity:
    """Capacity of one engine on one kind of machine. price: the name of its price, None without one.

    greatest: None if the engine was not timed or misses the limit at every rate; `reason` says which.  server: the
    counted overhead, if any.  unit: the engine's name.  machines: their required number.  per_million: cost of a
    million requests.  busy: whether other work ran while the engine was timed.
    """

    unit: str
    machine: str
    engine: str | None
    price: str | None = None
    greatest: GreatestRate | None = None
    machines: MachineCount | None = None
    per_million: FleetCost | None = None
    reason: str = ""
    busy: bool = False
    server: ServerOverhead | None = None


@dataclass(frozen=True)
class CapacityForecast:
    """The answer to a demand. engines: the timed ones first.  mix: None without prices, or if `why_no_mix` is set.
    reference: the version.  limit: of latency.  arrivals: their description.  currency: of the prices.
    mix_per_million: cost of a million requests.  mix_units: machine -> the engine that it runs."""

    reference: str
    demand: CapacityDemand
    limit: LatencyLimit
    arrivals: str
    engines: tuple[EngineCapacity, ...]
    currency: str = ""
    mix: FleetMix | None = None
    mix_per_million: FleetCost | None = None
    mix_units: Mapping[str, str] | None = None
    why_no_mix: str = ""


@dataclass(frozen=True, eq=False)
class Forecaster:
    """Inputs of a forecast. dims: of the model.  counts: available machines, by name of price.  say: called with a line
    for each engine (its simulation takes seconds).  reference: the version.  demand, limit: requests per second, and
    their latency limit.  asked: the arrivals.  serving: how requests are batched.  prices: None if not given.
    kinds: engines with each machine that they were timed on.  engines: all that may be pulled."""

    reference: str
    demand: CapacityDemand
    limit: LatencyLimit
    asked: AskedWorkload
    serving: ServingTerms
    dims: Sequence[Dim]
    kinds: Sequence[TimedEngineKind]
    engines: Sequence[JudgedEntry]
    prices: MachinePrices | None = None
    counts: Mapping[str, int] | None = None
    say: Callable[[str], object] = str

    def forecast(self) -> CapacityForecast:
        """The capacity of each engine on each kind of machine, and the cheapest mix of machines."""
        rows = list[EngineCapacity]()
        for kind in self.kinds:
            self.say(f"simulating {kind.entry.unit} on {kind.machine.title}")
            rows.append(self.row(kind))
        rows += self._not_timed()
        capacity_forecast = CapacityForecast(
            self.reference, self.demand, self.limit, self.asked.words, tuple(rows),
            self.prices.currency if self.prices else "",
        )  # fmt: skip
        return self._with_mix(capacity_forecast) if self.prices else capacity_forecast

    def row(self, kind: TimedEngineKind) -> EngineCapacity:
        """The row of an engine on a kind of machine that it was timed on."""
        price = self.prices.name_of(kind.machine.names) if self.prices else None
        row = EngineCapacity(
            kind.entry.unit, kind.machine.title, kind.entry.digest, price, busy=kind.busy, server=self.serving.server
        )
        try:
            greatest_rate = self.greatest(kind, self.limit)
        except DataError as error:
            return replace(row, reason=f"not measured: {error}".replace("REF", self.reference))
        if greatest_rate is None:
            return replace(row, reason=self._why_no_rate(kind))
        machines = machines_for(greatest_rate.rate, self.demand)
        return replace(row, greatest=greatest_rate, machines=machines, per_million=self._cost(price, machines))

    def greatest(self, kind: TimedEngineKind, limit: LatencyLimit) -> GreatestRate | None:
        """The greatest rate of one machine; None if every rate misses the limit. Raises DataError for untimed sizes."""
        times, max_batches = self._times_of(kind)
        policies = policies_to_try(limit, max_batches, self.serving.wait_s)
        return find_greatest_rate(self.asked.workloads, times, limit, policies)

    def _why_no_rate(self, kind: TimedEngineKind) -> str:
        """Why an engine misses the limit at every rate: slow runs at the requested sizes, or waiting requests."""
        times, _ = self._times_of(kind)
        fastest_s = max(float(np.quantile(bucket_times.curves, self.limit.p, axis=1).min()) for bucket_times in times)
        p99_text = seconds_text(fastest_s)
        reason = f"misses {1e3 * self.limit.seconds:g} ms at every rate: p99 of its fastest run is {p99_text}"
        if len(times) > 1:
            reason += ", at the slowest of the sizes"
        if fastest_s > self.limit.seconds:
            return reason
        return f"{reason}, and requests also wait to be batched (--wait) or because several arrive at once"

    def cost_curves(self, forecast: CapacityForecast) -> list[CostCurve]:
        """For each price, the cost of a million requests by latency limit, not rounded to whole machines, with the
        engine that is best at the requested limit. Rates are accurate to some percent."""
        free_share, curves = 1.0 - self.demand.headroom, []
        for name, row in best_engines(forecast.engines).items():
            kind = next(
                kind for kind in self.kinds if kind.entry.digest == row.engine and kind.machine.title == row.machine
            )
            times, max_batches = self._times_of(kind)
            points = []
            for share in PICTURED:
                limit = LatencyLimit(share * self.limit.seconds, self.limit.p)
                policies = policies_to_try(limit, max_batches, self.serving.wait_s)
                rate, _ = choose_policy(self.asked.workloads[0], times, limit, policies)
                if rate > 0.0 and self.prices:
                    hourly_price = self.prices.machines[name].per_hour
                    points.append((limit.seconds, cost_per_million(1, hourly_price, free_share * rate)))
            curves.append(CostCurve(f"{name}: {row.unit}", tuple(points)))
        return curves

    def _times_of(self, kind: TimedEngineKind) -> tuple[list[BatchTimes], list[int]]:
        """Times for each queue, and the greatest batches to try."""
        batch = leading_dim(kind.entry.inputs)
        max_batches = self._mosts(kind, batch)
        return [self._times(kind, batch, sizes, max(max_batches)) for sizes in self.asked.queues], max_batches

    def _mosts(self, kind: TimedEngineKind, batch: str | None) -> list[int]:
        if batch is None:
            return [1]
        if self.serving.batch is not None:
            return [self.serving.batch]
        other_sizes = self.asked.queues[0]
        buckets = [
            bucket for bucket in kind.buckets if all(bucket.sizes.get(dim) == size for dim, size in other_sizes.items())
        ]
        sizes = sorted({bucket.sizes[batch] for bucket in buckets or kind.buckets})
        return sizes[:: -(-len(sizes) // MOST_BATCHES)] + sizes[-1:] if len(sizes) > MOST_BATCHES else sizes

    def _times(self, kind: TimedEngineKind, batch: str | None, sizes: Mapping[str, int], max_batch: int) -> BatchTimes:
        min_batch = next((dim.min for dim in self.dims if dim.name == batch), 1)
        times = batch_times(kind.buckets, batch, sizes, max_batch, min_batch)
        overhead = self.serving.server
        return times.with_overhead(overhead.batch_s, overhead.request_s) if overhead else times

    def _cost(self, price: str | None, machines: MachineCount) -> FleetCost | None:
        if price is None or self.prices is None:
            return None
        hourly_price, rate = self.prices.machines[price].per_hour, self.demand.rate
        value, low = (cost_per_million(count, hourly_price, rate) for count in (machines.value, machines.low))
        high = None if machines.high is None else cost_per_million(machines.high, hourly_price, rate)
        return FleetCost(value, low, high)

    def _not_timed(self) -> Iterator[EngineCapacity]:
        """Rows without a rate: engines on priced machines without times, and priced machines without an engine."""
        machine_names = list(self.prices.machines) if self.prices else []
        for entry in self.engines:
            timed_names = {
                name for kind in self.kinds if kind.entry.digest == entry.digest for name in kind.machine.names
            }
            names = [name for name in machine_names if name not in timed_names and fits(entry, name)]
            for name in names or ([] if timed_names or self.prices else [entry.target]):
                command = f"enginesmith validate {self.reference} --target {entry.target}"
                reason = f"not measured; run on this kind of machine: {command}"
                price = name if name in machine_names else None
                yield EngineCapacity(entry.unit, name, entry.digest, price, reason=reason)
        all_timed_names = {name for kind in self.kinds for name in kind.machine.names}
        for name in machine_names:
            if name not in all_timed_names and not any(fits(entry, name) for entry in self.engines):
                yield EngineCapacity("", name, None, name, reason=f"{self.reference} has no engine for {name}")

    def _with_mix(self, forecast: CapacityForecast) -> CapacityForecast:
        """The forecast with the cheapest mix, and its cost at the rates and at both ends of their intervals."""
        best_rows = best_engines(forecast.engines)
        if not best_rows:
            return replace(forecast, why_no_mix=self._why_no_mix(forecast))
        rates = {name: row.greatest.rate for name, row in best_rows.items() if row.greatest}
        bounds = zip(*((rate.value, rate.low, rate.high) for rate in rates.values()), strict=True)
        mixes = [self._mix(dict(zip(rates, bound_rates, strict=True))) for bound_rates in bounds]
        if mixes[0] is None:
            return replace(forecast, why_no_mix=self._why_too_few(best_rows))
        costs = [cost_per_million(1, mix.per_hour, self.demand.rate) if mix else None for mix in mixes]
        units = {name: row.unit for name, row in best_rows.items() if name in mixes[0].machines}
        cost = FleetCost(costs[0] or 0.0, costs[2] or 0.0, costs[1])
        return replace(forecast, mix=mixes[0], mix_per_million=cost, mix_units=units)

    def _mix(self, rates: Mapping[str, float]) -> FleetMix | None:
        free_share = 1.0 - self.demand.headroom
        offers = [
            MachineOffer(
                name, free_share * rate, self.prices.machines[name].per_hour if self.prices else 0.0, self._count(name)
            )
            for name, rate in rates.items()
            if rate > 0.0
        ]
        return cheapest_mix(offers, self.demand.rate, self.demand.spare)

    def _count(self, name: str) -> int | None:
        """The number of available machines of a name; None: no limit."""
        if self.counts is not None:
            return self.counts.get(name, 0)
        return self.prices.machines[name].count if self.prices else None

    def _why_no_mix(self, forecast: CapacityForecast) -> str:
        rated_rows = [row for row in forecast.engines if row.greatest]
        if not rated_rows:
            return "no engine that was timed keeps the limit"
        source = self.prices.source if self.prices else ""
        machine_names = ", ".join(dict.fromkeys(row.machine for row in rated_rows))
        return f"{source} has no price for {machine_names}, on which engines were timed; add it"

    def _why_too_few(self, rows: Mapping[str, EngineCapacity]) -> str:
        free_share = 1.0 - self.demand.headroom
        counts = {name: self._count(name) for name in rows}
        available_machines = [
            (name, MOST_MACHINES if (count := counts[name]) is None else count, free_share * _middle(row))
            for name, row in rows.items()
        ]
        total = sum(count * rate for _, count, rate in available_machines)
        lost_rate = self.demand.spare * max((rate for _, count, rate in available_machines if count), default=0.0)
        machine_text = ", ".join(f"{count} {name}" for name, count, _ in available_machines)
        missing_machines = "; ".join(
            f"{-(-(self.demand.rate - total + max(lost_rate, self.demand.spare * rate)) // rate):.0f} more {name}"
            for name, _, rate in available_machines
        )
        return (
            f"{machine_text} carry {format_plain(max(total - lost_rate, 0.0))} per second within the limit"
            f"{' when one is lost' if self.demand.spare else ''}, not {self.demand.rate:g}; it takes {missing_machines}"
        )


def best_engines(rows: Sequence[EngineCapacity]) -> dict[str, EngineCapacity]:
    """For each price, the engine with the highest rate. If machines of several kinds have that price, an engine's
    lowest rate counts."""
    slowest_rows: dict[tuple[str, str], EngineCapacity] = {}
    for row in rows:
        if row.price and row.greatest:
            key = (row.price, row.unit)
            if key not in slowest_rows or _middle(row) < _middle(slowest_rows[key]):
                slowest_rows[key] = row
    best_rows: dict[str, EngineCapacity] = {}
    for (price, _), row in slowest_rows.items():
        if price not in best_rows or _middle(row) > _middle(best_rows[price]):
            best_rows[price] = row
    return best_rows


def _middle(row: EngineCapacity) -> float:
    return row.greatest.rate.value if row.greatest else 0.0


# Latency limits in the plot, as shares of the requested limit.
PICTURED = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


@dataclass(frozen=True)
class CapacityTerms:
    """Options of a forecast. prices, fleet, traffic: files.  at: sizes of the dims except the batch, as 'length=64'.

    precision: of the engines; None: any.
    demand, limit: requests per second, and their latency limit.  serving: how requests are batched.
    """

    demand: CapacityDemand
    limit: LatencyLimit
    serving: ServingTerms
    prices: Path | None = None
    fleet: Path | None = None
    traffic: Path | None = None
    at: str | None = None
    precision: str | None = None


def prepare(store: Store, manifest: Manifest, terms: CapacityTerms, say: Callable[[str], object] = str) -> Forecaster:
    """Read prices, fleet, traffic and latency reports. say: as in `Forecaster`.

    Raises SpecError for prices or an inventory with mistakes, InputError if no engine was timed or a fleet has no
    prices, DataError for traffic that does not fit the model, IntegrityError for a damaged report.
    """
    spec, reference = spec_of(manifest), manifest.reference
    prices = read_prices(terms.prices) if terms.prices else None
    counts = _counts(read_inventory(terms.fleet), prices) if terms.fleet else None
    kinds = [kind for kind in timed_engines(store, manifest) if terms.precision in (None, kind.entry.precision)]
    if not kinds:
        precision = f" in {terms.precision}" if terms.precision else ""
        raise InputError(
            f"{reference} has no engine{precision} that was timed, on any machine; time its engines where they run:"
            f" enginesmith validate {reference}"
        )
    workload = _asked(spec, leading_dim(kinds[0].entry.inputs), terms)
    usable_engines = [entry for entry in judge_entries(store, manifest) if entry.usable]
    engines = [entry for entry in usable_engines if terms.precision in (None, entry.precision)]
    return Forecaster(
        reference=reference,
        demand=terms.demand,
        limit=terms.limit,
        asked=workload,
        serving=terms.serving,
        dims=spec.named_dims(),
        kinds=kinds,
        engines=engines,
        prices=prices,
        counts=counts,
        say=say,
    )


def _asked(spec: ModelSpec, batch: str | None, terms: CapacityTerms) -> AskedWorkload:
    dims = spec.named_dims()
    max_batch = next((dim.max for dim in dims if dim.name == batch), 1)
    if terms.serving.batch is not None and terms.serving.batch > max_batch:
        raise InputError(f"batch {terms.serving.batch}: {spec.model} accepts at most {max_batch} samples; give fewer")
    if (wait_s := terms.serving.wait_s or 0.0) >= terms.limit.seconds:
        times = f"{1e3 * wait_s:g} ms, and the limit is {1e3 * terms.limit.seconds:g} ms"
        raise InputError(f"requests wait {times}: a request that waits alone would exceed the limit; shorten the wait")
    if terms.traffic is None:
        return steady_workload(terms.at, dims, batch)
    if terms.at:
        raise InputError("the traffic already gives the sizes; leave out --at, or --traffic")
    trace = read_place(terms.traffic, spec.tensors(), spec.model).trace
    try:
        return traffic_workload(trace, dims, batch)
    except DataError as error:
        raise DataError(f"{terms.traffic}: {error}") from error


def _counts(fleet: Fleet, prices: MachinePrices | None) -> Mapping[str, int]:
    """The number of the fleet's machines by name of price. Raises InputError for a machine without a price."""
    if prices is None:
        raise InputError("the cheapest mix of a fleet needs prices; give --prices FILE")
    counts = dict.fromkeys(prices.machines, 0)
    for group in fleet.groups:
        hardware = group.hardware
        if hardware.mig or hardware.sharing:
            continue  # nothing is timed on a part of a GPU
        machine = group.machine
        names = (machine.cpu or "cpu", "cpu") if machine.is_cpu else (hardware.product or "", machine.target.sm)
        if (name := prices.name_of(names)) is None:
            unpriced_name = next(name for name in names if name)
            raise InputError(
                f"{prices.source} has no price for {unpriced_name}, of which {fleet.source} has {group.nodes};"
                f" add `{unpriced_name}: {{per_hour: ...}}`"
            )
        counts[name] += group.nodes if machine.is_cpu else group.gpus
    return counts
