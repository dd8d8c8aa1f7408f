"""Which engine each kind of machine gets of a version, and why none: an inventory's groups, or every GPU known."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.core.hardware.gpu_generations import GENERATIONS
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.hardware.targets import parse_targets
from enginesmith.core.names import Reference
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attestations import JudgedEntry
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from pipeline.fleet.catalog import Catalog, Demand, Served, load_catalog, parse_spec_targets, read_served
from pipeline.fleet.coverage import Coverage, list_coverage
from pipeline.fleet.groups import Hardware, NodeGroup
from pipeline.fleet.inventory import read_inventory

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
    wanted = load_catalog(catalog) if catalog else Catalog(())
    if inventory is None:
        targets = (
            Target(product, item.compute_capability, product) for item in GENERATIONS for product in item.products
        )
        groups = tuple(NodeGroup(_hardware(target), 0, 0) for target in targets)
        source = ""
    else:
        groups, source = read_inventory(inventory).groups, inventory.name
    stated = dict(wanted.runtimes)
    groups = tuple(group.with_versions(runtimes={**stated, **group.machine.runtimes}) for group in groups)
    return KnownMachines(groups, wanted, source)


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
    wanted = item.served.targets or parse_spec_targets([entry.target for entry in item.served.engines])
    return wanted is None or item.group.hardware.is_one_of(wanted)


def _row(served: Served, items: list[Coverage], state: str, why: str) -> MachineRow:
    names = tuple(dict.fromkeys(_name(item.group) for item in items))
    first = items[0]
    nodes = sum(item.group.nodes for item in items)
    asked = (str(served.demand.reference), served.version or "")
    return MachineRow(names, nodes, state, first.engine, first.serves, why, first.precision or "", *asked)


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
