"""Parts of a page: engines by machine, rollouts, series of latencies."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.core.errors import IntegrityError
from enginesmith.core.hardware.machine import GENERATIONS, Machine, parse_targets
from enginesmith.core.names import Reference
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attestations import JudgedEntry
from enginesmith.registry.latency_series import LatencySeries, SeriesPoint, order_of, parse_series
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.rollouts.state import EarlierRollout, Gates, Rollout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import SERIES
from enginesmith.registry.versions.state import Channel, ChannelHistory
from pipeline.fleet.catalog import Catalog, Demand, Served, load_catalog, parse_spec_targets, read_served
from pipeline.fleet.coverage import Coverage, list_coverage
from pipeline.fleet.groups import Hardware, NodeGroup
from pipeline.fleet.inventory import read_inventory
from pipeline.regressions.trend import Value, describe_change, find_trend

# Which engine each kind of machine gets of a version, and why none: an inventory's groups, or every GPU known.

EVERYWHERE = parse_targets("all")
# State of a machine that neither an inventory, a catalog nor the spec asks for: no engine is missing there.
NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class KnownMachines:
    """The machines that engines are chosen for. groups: of the inventory, else a product each.  catalog: what must be
    served; without demands it is every model.  source: the inventory's file; '' for the list of products."""

    groups: tuple[NodeGroup, ...]
    catalog: Catalog = field(default_factory=lambda: Catalog(()))
    source: str = ""


@dataclass(frozen=True)
class MachineRow:
    """Machines that get the same engine of a version in the same way. names: of their groups.  nodes: how many; 0 where
    there is no inventory.  state: as in `Coverage`, or NOT_ASKED.  serves: whether they can pull the engine, which a
    channel may refuse as unproven.  why: the reason of the state, else how well the engine fits and what could not be
    checked.  asked: the reference that they ask for, 'digits:stable'.  version: that it names; '' for none."""

    names: tuple[str, ...]
    nodes: int
    state: str
    engine: EngineEntry | None
    serves: bool
    why: str
    precision: str = ""
    asked: str = ""
    version: str = ""


def known_machines(inventory: Path | None = None, catalog: Path | None = None) -> KnownMachines:
    """The machines of an inventory file, or of every product. Raises as `read_inventory` and `load_catalog`."""
    base_catalog = load_catalog(catalog) if catalog else Catalog(())
    if inventory is None:
        targets = (
            Target(product, item.compute_capability, product) for item in GENERATIONS for product in item.products
        )
        groups = tuple(NodeGroup(_hardware(target), 0, 0) for target in targets)
        source = ""
    else:
        groups, source = read_inventory(inventory).groups, inventory.name
    stated = dict(base_catalog.runtimes)
    groups = tuple(group.with_versions(runtimes={**stated, **group.machine.runtimes}) for group in groups)
    return KnownMachines(groups, base_catalog, source)


def _hardware(target: Target) -> Hardware:
    return Hardware(Machine.of(target), target.name, target.product)


def served_by(store: Store, known: KnownMachines, model: str) -> tuple[Served, ...]:
    """The demands of a model with the versions that they name; without a catalog that of its usual channel, on every
    machine. Raises UnavailableError when the registry is out of reach."""
    demands = [demand for demand in known.catalog.demands if demand.reference.model == model]
    if not known.catalog.demands:
        demands = [Demand(Reference(model), EVERYWHERE)]
    return read_served(store, demands)


def served_version(model: str, version: str, engines: Sequence[EngineEntry], targets: object) -> Served:
    """A version as if machines asked for it by name. engines: with their present status.  targets: as its spec has
    them."""
    demand = Demand(Reference(model, version), EVERYWHERE)
    return Served(demand, version, tuple(engines), targets=parse_spec_targets(targets))


def machine_rows(served: Served, known: KnownMachines) -> tuple[MachineRow, ...]:
    """What each machine gets, machines in the order of `known`; those alike are one row."""
    groups = (
        known.groups if known.source else [*_by_generation(known.groups, served.engines), *_cpu_groups(served.engines)]
    )
    alike: dict[tuple[str, ...], list[Coverage]] = {}
    for item in list_coverage(groups, [served], known.catalog):
        unit = item.engine.unit if item.engine else ""
        why = item.reason or "; ".join((item.fit, *item.remarks))
        state = NOT_ASKED if item.state == "missing" and not _is_asked(item, known) else item.state
        alike.setdefault((item.precision or "", state, unit, why), []).append(item)
    return tuple(_row(served, items, state, why) for (_, state, _, why), items in alike.items())


def _is_asked(item: Coverage, known: KnownMachines) -> bool:
    """Whether somebody wants an engine there: whoever has such nodes, the catalog, or the spec by its targets (of an
    ensemble, which has none: those of its engines)."""
    if known.source or known.catalog.demands:
        return True
    target_list = item.served.targets or parse_spec_targets([entry.target for entry in item.served.engines])
    return target_list is None or item.group.hardware.is_one_of(target_list)


def _row(served: Served, items: list[Coverage], state: str, why: str) -> MachineRow:
    names = tuple(dict.fromkeys(_name(item.group) for item in items))
    first = items[0]
    nodes = sum(item.group.nodes for item in items)
    demand_fields = (str(served.demand.reference), served.version or "")
    return MachineRow(names, nodes, state, first.engine, first.serves, why, first.precision or "", *demand_fields)


def _name(group: NodeGroup) -> str:
    """'l4 (sm_89)', 'l4 (sm_89), driver 570.124.06', 'cpu x86-64-v3'."""
    machine = group.machine
    if machine.is_cpu:
        return f"cpu {machine.cpu}" if machine.cpu else "cpu"
    sm = f" ({machine.target.sm})" if machine.target.sm != group.name else ""
    return f"{group.name}{sm}" + (f", driver {machine.driver}" if machine.driver else "")


def _by_generation(groups: Iterable[NodeGroup], engines: Iterable[EngineEntry]) -> Iterator[NodeGroup]:
    """The groups, where products of a generation that no engine was built for are one machine, which is judged once."""
    named = {entry.product for entry in engines}
    first: dict[object, Machine] = {}
    for group in groups:
        machine = group.machine
        alike = machine.product if machine.product in named else machine.compute_capability
        yield replace(group, hardware=replace(group.hardware, machine=first.setdefault(alike, machine)))


def _cpu_groups(engines: Iterable[EngineEntry]) -> list[NodeGroup]:
    """The kinds of CPU that engines were built for, or proven on."""
    entries = list(engines)
    kinds = {entry.cpu for entry in entries if entry.cpu}
    kinds |= {kind for entry in entries if isinstance(entry, JudgedEntry) for kind in entry.on}
    return [NodeGroup(_hardware(parse_targets(kind)[0]), 0, 0) for kind in sorted(kinds)]


# A channel's rollout as a page shows it: its waves, its gates and its decisions, without what changes by the second.
#
# What nodes report is not here: it changes all the time, and `enginesmith rollout status` reads it.


@dataclass(frozen=True)
class ShownWave:
    """A wave. who: its slice of the nodes, '5%'.  soak_s: least time that it lasts, in seconds.  state: in words."""

    who: str
    soak_s: int
    state: str


@dataclass(frozen=True)
class ShownRollout:
    """A rollout of a channel. earlier: those before it, oldest first."""

    channel: str
    rollout: Rollout
    earlier: tuple[EarlierRollout, ...]
    waves: tuple[ShownWave, ...]
    gates: tuple[str, ...]

    @property
    def state(self) -> str:
        """Its state."""
        return self.rollout.state

    @property
    def is_active(self) -> bool:
        """Whether nodes follow it."""
        return not self.rollout.is_finished

    @property
    def reach(self) -> str:
        """The share of the nodes that it leads to the new version: '5%', '25%, region=eu-west-1'."""
        return ", ".join(map(str, self.rollout.reach))


def show_rollout(channel: Channel, history: ChannelHistory) -> ShownRollout | None:
    """The rollout of a channel; None where it never had one."""
    rollout = channel.rollout
    if rollout is None:
        return None
    earlier = tuple(item for item in history.rollouts if item.id != rollout.id)
    waves, gates = tuple(_waves(rollout)), tuple(_gates(rollout.plan.gates))
    return ShownRollout(channel.name, rollout, earlier, waves, gates)


def _waves(rollout: Rollout) -> Iterable[ShownWave]:
    for index, (wave, soak_s) in enumerate(zip(rollout.plan.waves, rollout.plan.soaks_s, strict=True)):
        if index < rollout.wave or rollout.state == "done":
            state = "passed"
        elif index > rollout.wave:
            state = "never" if rollout.is_finished else "to come"
        elif rollout.state != "running":
            state = rollout.state
        else:
            state = "open" if rollout.soaking else "opening"
        yield ShownWave(str(wave), soak_s, state)


def _gates(gates: Gates) -> Iterable[str]:
    if gates.health_ppm is not None:
        reports = f", of at least {gates.least_reports}" if gates.least_reports > 1 else ""
        yield f"at least {gates.health_ppm / 10_000:g} % of the nodes that report are well{reports}"
    if gates.errors_ppm is not None:
        yield f"at most {gates.errors_ppm / 10_000:g} % of the requests failed"
    if gates.canary:
        yield "a canary's PASS"
    if gates.approve:
        yield "a person approves each wave"


# Series of latencies as a page shows them: points in a small picture of plain SVG, and what changed their level.

WIDTH, HEIGHT, _MARGIN = 600, 120, 6
# Newest points of a series that its table lists; `enginesmith profile --series --json` has all.
MOST_POINTS = 40


@dataclass(frozen=True)
class ShownPoint:
    """A point of the picture. x, y: its place.  hollow: whether it was measured on a busy machine."""

    x: float
    y: float
    hollow: bool
    title: str


@dataclass(frozen=True)
class ShownSeries:
    """A series. id: a part of its page's address.  series: None where it cannot be read, and `problem` says why.

    value: what the picture shows, the ratio to a reference or the median.  low, high: the ends of its axis.  changes:
    in words, newest first; None where change points cannot be computed here.  newest: points, newest first.
    """

    id: str
    series: LatencySeries | None = None
    problem: str = ""
    value: Value = "median"
    low: float = 0.0
    high: float = 0.0
    points: tuple[ShownPoint, ...] = ()
    changes: tuple[str, ...] | None = ()
    marks: tuple[float, ...] = ()
    newest: tuple[SeriesPoint, ...] = ()


def read_all_series(store: Store, model: str) -> tuple[ShownSeries, ...]:
    """Every series of a model, by unit, bucket and machine."""
    all_series = (_read(store, key) for key in store.list(f"{SERIES}{model}/"))
    return tuple(sorted((item for item in all_series if item), key=_order))


def _order(shown: ShownSeries) -> tuple[object, ...]:
    return (False, order_of(shown.series)) if shown.series else (True, shown.id)


def _read(store: Store, key: str) -> ShownSeries | None:
    name = f"series-{key.rpartition('/')[2].removesuffix('.json')[:16]}"
    data = store.read(key)
    if data is None:
        return None
    try:
        series = parse_series(data, key)
    except IntegrityError as error:
        return ShownSeries(name, problem=str(error))
    return _show(name, series)


def _show(name: str, series: LatencySeries) -> ShownSeries:
    value: Value = "relative" if any(point.relative for point in series.points) else "median"
    indexed_points = [
        (index, point, (point.relative if value == "relative" else point.median_s))
        for index, point in enumerate(series.points)
    ]
    numbers = [number for *_, number in indexed_points if number is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    trend, last = find_trend(series), max(len(series.points) - 1, 1)
    points = tuple(
        ShownPoint(_across(index, last), _down(number, low, high), bool(point.busy), _title(point, number, value))
        for index, point, number in indexed_points
        if number is not None
    )
    changes = trend.changes or ()
    return ShownSeries(
        name,
        series,
        value=value,
        low=low,
        high=high,
        points=points,
        changes=None if trend.changes is None else tuple(map(describe_change, reversed(changes))),
        marks=tuple(_across(change.index - 0.5, last) for change in changes if change.value == value),
        newest=series.points[: -MOST_POINTS - 1 : -1],
    )


def _title(point: SeriesPoint, number: float, value: Value) -> str:
    text = f"{number:.4f} times the reference" if value == "relative" else f"{number * 1e6:.1f} µs"
    return f"{point.at[:16].replace('T', ' ')} UTC, version {point.version}: {text}" + (", busy" if point.busy else "")


def _across(index: float, last: int) -> float:
    return round(_MARGIN + index / last * (WIDTH - 2 * _MARGIN), 1)


def _down(number: float, low: float, high: float) -> float:
    share = (number - low) / (high - low) if high > low else 0.5
    return round(HEIGHT - _MARGIN - share * (HEIGHT - 2 * _MARGIN), 1)


def line_of(points: Sequence[ShownPoint]) -> str:
    """The points as the path of an SVG polyline."""
    return " ".join(f"{point.x:g},{point.y:g}" for point in points)
