"""From a version and what is asked of it to a forecast of its capacity, and the picture of its costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginesmith.core.errors import DataError, InputError
from enginesmith.core.types import Dim
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from pipeline.capacity.forecast import CapacityForecast, Forecaster, ServingTerms, best_engines
from pipeline.capacity.measured import TimedEngineKind, timed_engines, usable_engines
from pipeline.capacity.prices import MachinePrices, read_prices
from pipeline.capacity.workloads import AskedWorkload, sizes_of_request, steady_workload, traffic_workload
from pipeline.fleet.groups import Fleet
from pipeline.fleet.inventory import read_inventory
from pipeline.operations.revalidate import spec_of
from pipeline.spec.model import ModelSpec
from pipeline.traffic.place import read_place
from validation.capacity.greatest_rate import LatencyLimit
from validation.capacity.machines import CapacityDemand, cost_per_million
from validation.capacity.picture import CostCurve
from validation.data.batches import leading_dim

# Limits of the picture, as shares of the one that was asked for.
PICTURED = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


@dataclass(frozen=True)
class CapacityTerms:
    """What is asked. prices, fleet, traffic: files.  at: sizes of the dims but the batch, as 'length=64'.

    precision: only engines of this one.
    """

    demand: CapacityDemand
    limit: LatencyLimit
    serving: ServingTerms
    prices: Path | None = None
    fleet: Path | None = None
    traffic: Path | None = None
    at: str | None = None
    precision: str | None = None


@dataclass(frozen=True, eq=False)
class PreparedForecast:
    """A forecaster and the engines that it is about."""

    forecaster: Forecaster
    timed: Sequence[TimedEngineKind]
    manifest: Manifest
    store: Store
    precision: str | None

    def forecast(self) -> CapacityForecast:
        """The forecast. Raises IntegrityError for a damaged report."""
        engines = [one for one in usable_engines(self.store, self.manifest) if self.precision in (None, one.precision)]
        return self.forecaster.forecast(self.timed, engines)

    def cost_curves(self, found: CapacityForecast) -> list[CostCurve]:
        """For each price the cost of a million requests against the limit, without rounding to whole machines, with the
        engine that is best at the limit asked for."""
        prices, free = self.forecaster.prices, 1.0 - self.forecaster.demand.headroom
        curves = []
        for name, row in best_engines(found.engines).items():
            timed = next(
                one for one in self.timed if one.entry.digest == row.engine and one.machine.title == row.machine
            )
            points = []
            for share in PICTURED:
                limit = LatencyLimit(share * self.forecaster.limit.seconds, self.forecaster.limit.p)
                rate = self.forecaster.quick_rate(timed, limit)
                if rate > 0.0 and prices:
                    points.append((limit.seconds, cost_per_million(1, prices.machines[name].per_hour, free * rate)))
            curves.append(CostCurve(f"{name}: {row.unit}", tuple(points)))
        return curves


def prepare(
    store: Store, manifest: Manifest, terms: CapacityTerms, say: Callable[[str], object] = str
) -> PreparedForecast:
    """Read prices, fleet, traffic and latency reports. say: as of `Forecaster`.

    Raises SpecError for prices or an inventory with mistakes, InputError where nothing was timed, and for a fleet
    without prices, DataError for traffic that is none of the model's.
    """
    spec, reference = spec_of(manifest), f"{manifest.model}@{manifest.version}"
    prices = read_prices(terms.prices) if terms.prices else None
    counts = _counts(read_inventory(terms.fleet), prices) if terms.fleet else None
    timed = [one for one in timed_engines(store, manifest) if terms.precision in (None, one.entry.precision)]
    if not timed:
        words = f" in {terms.precision}" if terms.precision else ""
        raise InputError(
            f"{reference} has no engine{words} that was timed, on any machine; time its engines where they run:"
            f" enginesmith validate {reference}"
        )
    asked = _asked(spec, leading_dim(timed[0].entry.inputs), terms)
    forecaster = Forecaster(
        reference, terms.demand, terms.limit, asked, terms.serving, spec.named_dims(), prices, counts, say
    )
    return PreparedForecast(forecaster, timed, manifest, store, terms.precision)


def _asked(spec: ModelSpec, batch: str | None, terms: CapacityTerms) -> AskedWorkload:
    dims = spec.named_dims()
    if terms.serving.batch is not None and terms.serving.batch > (most := _most(dims, batch)):
        raise InputError(f"batch {terms.serving.batch}: {spec.model} takes {most} samples at most; give fewer")
    if (wait_s := terms.serving.wait_s or 0.0) >= terms.limit.seconds:
        words = f"{1e3 * wait_s:g} ms, and the limit is {1e3 * terms.limit.seconds:g} ms"
        raise InputError(f"requests wait {words}: one that no other joins would break the limit; let them wait less")
    if terms.traffic is None:
        sizes = sizes_of_request(terms.at, dims, batch)
        return steady_workload({name: size for name, size in sizes.items() if name != batch})
    if terms.at:
        raise InputError("the traffic says the sizes; leave out --at, or --traffic")
    trace = read_place(terms.traffic, spec.tensors(), spec.model).trace
    try:
        return traffic_workload(trace, dims, batch)
    except DataError as error:
        raise DataError(f"{terms.traffic}: {error}") from error


def _most(dims: Sequence[Dim], batch: str | None) -> int:
    return next((dim.max for dim in dims if dim.name == batch), 1)


def _counts(fleet: Fleet, prices: MachinePrices | None) -> Mapping[str, int]:
    """Machines of the fleet by the name of their price. Raises InputError for one without a price."""
    if prices is None:
        raise InputError("a fleet's cheapest mix takes prices; give --prices FILE")
    counts = dict.fromkeys(prices.machines, 0)
    for group in fleet.groups:
        hardware = group.hardware
        if hardware.mig or hardware.sharing:
            continue  # nothing is timed on a part of a GPU
        machine = group.machine
        names = (machine.cpu or "cpu", "cpu") if machine.is_cpu else (hardware.product or "", machine.target.sm)
        if (name := prices.name_of(names)) is None:
            wanted = next(name for name in names if name)
            raise InputError(
                f"{prices.source} has no price for {wanted}, of which {fleet.source} has {group.nodes};"
                f" add `{wanted}: {{per_hour: ...}}`"
            )
        counts[name] += group.nodes if machine.is_cpu else group.gpus
    return counts
