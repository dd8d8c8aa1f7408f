"""A cluster's nodes against the registry, for `enginesmith fleet` and its flow, and the events for what they lack.

On the events a Prefect server's deployments build (`enginesmith.model.registered`) and prove
(`enginesmith.engine.unproven`) what is missing; `pipeline.orchestration.gpu_workers` has their fields.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.registry.store.base import Store
from pipeline.fleet.catalog import Catalog, Served, load_catalog, read_served, whole_registry
from pipeline.fleet.coverage import (
    STATES,
    Coverage,
    FleetWork,
    Predictor,
    find_unwanted_groups,
    list_coverage,
    work_for,
)
from pipeline.fleet.groups import Fleet, NodeGroup
from pipeline.fleet.inventory import Access, read_cluster, read_inventory
from pipeline.orchestration.gpu_workers import REGISTERED, UNPROVEN


@dataclass(frozen=True)
class Message:
    """An event to send. payload: JSON."""

    event: str
    model: str
    payload: Mapping[str, object]


def messages(work: Iterable[FleetWork], registry: str) -> tuple[Message, ...]:
    """One event for each model to build, and for each version and generation to prove, in the order of the work.

    registry: its URI, which holds no credentials. Work that cannot be done as things are is left out.
    """
    builds: dict[str, list[str]] = {}
    proofs: dict[tuple[str, str, str], list[str]] = {}
    for task in work:
        unit = task.unit
        if not task.ready:
            continue
        if unit.kind == "build":
            builds.setdefault(unit.model, []).append(task.name)
        elif unit.version and task.engine:
            proofs.setdefault((unit.model, unit.version, unit.target.sm), []).append(task.engine)
    sender_name = "enginesmith fleet"
    event_messages = []
    for model, units in builds.items():
        payload = {"spec": f"registered:{model}", "registry": registry, "units": units, "by": sender_name}
        event_messages.append(Message(REGISTERED, model, payload))
    for (model, version, target), engines in proofs.items():
        payload = {"version": version, "target": target, "engines": engines, "registry": registry, "by": sender_name}
        event_messages.append(Message(UNPROVEN, model, payload))
    return tuple(event_messages)


@dataclass(frozen=True)
class FleetSources:
    """Inputs of a comparison. inventory: a file, '-' for standard input; None reads the cluster.  catalog: a file;
    None: every model with a channel.  runtimes: versions on nodes by package, unless the inventory states them."""

    inventory: Path | None = None
    access: Access = field(default_factory=Access)
    catalog: Path | None = None
    runtimes: Mapping[str, str] = field(default_factory=dict)

    def fleet(self, catalog: Catalog) -> Fleet:
        """The nodes by groups. Runtimes of the inventory count before the options', and those before the catalog's.

        Raises as `read_inventory` and `read_cluster`.
        """
        base_fleet = read_inventory(self.inventory) if self.inventory else read_cluster(self.access)
        runtime_versions = {**dict(catalog.runtimes), **self.runtimes}
        return base_fleet.with_groups(
            group.with_versions(runtimes={**runtime_versions, **group.machine.runtimes}) for group in base_fleet.groups
        )

    def wanted(self, store: Store) -> Catalog:
        """The catalog, with the runtimes that the options state. Raises SpecError."""
        base_catalog = load_catalog(self.catalog) if self.catalog else whole_registry(store)
        return replace(base_catalog, runtimes=tuple({**dict(base_catalog.runtimes), **self.runtimes}.items()))


@dataclass(frozen=True)
class Reconciled:
    """The fleet, the coverage of each demand on each group of nodes, and the work that is missing."""

    fleet: Fleet
    catalog: Catalog
    standings: tuple[Coverage, ...]
    work: tuple[FleetWork, ...]
    registry: str

    @property
    def good(self) -> bool:
        """Whether every demand can be met on every group."""
        return all(coverage.serves for coverage in self.standings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of standings by state, from worst to best."""
        state_counts = Counter(coverage.state for coverage in self.standings)
        return {state: state_counts[state] for state in STATES if state_counts[state]}

    @property
    def unwanted(self) -> tuple[NodeGroup, ...]:
        """Groups on which nothing must be served."""
        return find_unwanted_groups(self.fleet.groups, self.catalog.demands)

    def to_json(self) -> dict[str, object]:
        """What `enginesmith fleet --json` prints."""
        return {
            "fleet": {
                "source": self.fleet.source,
                "groups": [group.to_json() for group in self.fleet.groups],
                "left_out": [vars(omission) for omission in self.fleet.left_out],
            },
            "catalog": self.catalog.source,
            "registry": self.registry,
            "good": self.good,
            "counts": self.counts,
            "unwanted": [group.name for group in self.unwanted],
            "standings": [coverage.to_json() for coverage in self.standings],
            "work": [task.to_json() for task in self.work],
            "events": [vars(message) for message in messages(self.work, self.registry)],
        }


def compare_deployments(store: Store, sources: FleetSources) -> tuple[Fleet, tuple[Served, ...], Catalog]:
    """The nodes, what the registry serves of the demands, and the catalog of demands; each read once."""
    catalog = sources.wanted(store)
    return sources.fleet(catalog), read_served(store, catalog.demands), catalog


def reconcile(store: Store, sources: FleetSources, predict: Predictor) -> Reconciled:
    """Compare the nodes with the registry. predict: gives the time of a build.

    Raises InputError and SpecError for what cannot be read, UnavailableError for what is out of reach.
    """
    fleet, served_versions, catalog = compare_deployments(store, sources)
    coverage = list_coverage(fleet.groups, served_versions, catalog)
    return Reconciled(fleet, catalog, coverage, work_for(coverage, predict), store.uri)
