"""Engines that a change of a fleet's drivers, runtimes and machines would break, and the builds it would need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.types import Target
from pipeline.fleet.catalog import Catalog, Served
from pipeline.fleet.coverage import (
    Coverage,
    FleetWork,
    Hours,
    Known,
    Predictor,
    find_unwanted_groups,
    list_coverage,
    total,
    work_for,
)
from pipeline.fleet.groups import Fleet, Hardware, NodeGroup


@dataclass(frozen=True)
class StateChange:
    """A change of a fleet. runtimes: new versions on nodes.  driver: new version on nodes with GPUs.  on: the hardware
    with new versions; empty: all.  add, remove: numbers of nodes by product or generation."""

    driver: str | None = None
    runtimes: Mapping[str, str] = field(default_factory=dict)
    on: tuple[Target, ...] = ()
    add: tuple[tuple[Target, int], ...] = ()
    remove: tuple[tuple[Target, int], ...] = ()

    def apply(self, group: NodeGroup) -> NodeGroup:
        """The group after the change of versions."""
        if self.on and not group.hardware.is_one_of(self.on):
            return group
        driver = None if group.machine.is_cpu else self.driver
        new_group = group.with_versions(driver=driver, runtimes=self.runtimes)
        if driver is None:
            return new_group
        # `cuda` is the newest CUDA version of the old driver; the new driver's is unknown.
        return replace(new_group, hardware=replace(new_group.hardware, machine=replace(new_group.machine, cuda=None)))


@dataclass(frozen=True)
class FleetPlan:
    """A change and its effects.

    dying: demands that a group meets now and would not meet after the change.  waiting: other demands that would not be
    met: on new nodes, or not met today.  work: builds and proofs, in order.  hours: of the builds for GPUs.
    unwanted: groups that no demand names.
    """

    before: Fleet
    after: Fleet
    dying: tuple[Coverage, ...]
    waiting: tuple[Coverage, ...]
    work: tuple[FleetWork, ...]
    hours: Hours
    unwanted: tuple[NodeGroup, ...]

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return {
            "before": [group.to_json() for group in self.before.groups],
            "after": [group.to_json() for group in self.after.groups],
            "dying": [coverage.to_json() for coverage in self.dying],
            "waiting": [coverage.to_json() for coverage in self.waiting],
            "work": [task.to_json() for task in self.work],
            "unwanted": [group.name for group in self.unwanted],
            "predicted": asdict(self.hours),
        }


def make_plan(
    fleet: Fleet, versions: Sequence[Served], catalog: Catalog, change: StateChange, predict: Predictor
) -> FleetPlan:
    """Compare the fleet before and after a change. Raises InputError for more nodes to remove than exist."""
    present_catalog = replace(catalog, planned=())
    remaining_groups: Sequence[NodeGroup] = fleet.groups
    for target, count in change.remove:
        remaining_groups = tuple(_remove_nodes(remaining_groups, target, count))
    changed_groups = [change.apply(group) for group in remaining_groups]
    new_groups = []
    for target, count in change.add:
        hardware = Hardware(Machine.of(target), target.name, target.product)
        group = NodeGroup(hardware, count, 0 if target.is_cpu else count).with_versions(runtimes=dict(catalog.runtimes))
        new_groups.append(replace(change, on=()).apply(group))
    new_fleet = fleet.with_groups([*changed_groups, *new_groups])
    coverage_cache: Known = {}

    def judge_groups(groups: Sequence[NodeGroup]) -> tuple[Coverage, ...]:
        return list_coverage(groups, versions, present_catalog, coverage_cache)

    new_standings = judge_groups(new_fleet.groups)
    # Equal groups are not merged yet, so both results have the same length and order.
    pairs = zip(judge_groups(remaining_groups), judge_groups(changed_groups), strict=True)
    losses = tuple(new_state for old_state, new_state in pairs if old_state.serves and not new_state.serves)
    lost_keys = {(id(coverage.served), coverage.group.hardware, coverage.precision) for coverage in losses}
    gaps = tuple(
        coverage
        for coverage in new_standings
        if not coverage.serves and (id(coverage.served), coverage.group.hardware, coverage.precision) not in lost_keys
    )
    work = work_for(new_standings, predict)
    builds = [task for task in work if task.unit.kind == "build" and not task.refused]
    hours = total(task.expected for task in builds if not task.unit.target.is_cpu)
    unwanted_groups = find_unwanted_groups(new_fleet.groups, catalog.demands)
    return FleetPlan(fleet, new_fleet, losses, gaps, work, hours, unwanted_groups)


def _remove_nodes(groups: Sequence[NodeGroup], target: Target, count: int) -> Iterator[NodeGroup]:
    """The groups without `count` nodes of a target, taken from the first groups, which have the oldest drivers."""
    node_count = sum(group.nodes for group in groups if group.hardware.is_one_of([target]))
    if count > node_count:
        raise InputError(f"--remove {target.name}={count}: there are {node_count} nodes of {target.name}")
    remaining_count = count
    for group in groups:
        removed_count = min(remaining_count, group.nodes) if group.hardware.is_one_of([target]) else 0
        remaining_count -= removed_count
        if removed_count < group.nodes:
            gpus = group.gpus * (group.nodes - removed_count) // group.nodes
            yield replace(group, nodes=group.nodes - removed_count, gpus=gpus) if removed_count else group


def parse_nodes(text: str) -> tuple[Target, int]:
    """The product or generation and the number of nodes in a text such as 'b200=16'. Raises InputError."""
    name, separator, count = text.partition("=")
    if not (separator and count.isascii() and count.isdecimal() and 0 < int(count) <= 1_000_000):
        raise InputError(f"{text[:80]!r} is not PRODUCT=NODES, as in b200=16")
    targets = parse_targets(name)
    if len(targets) > 1:
        raise InputError(f"{name!r} stands for several: {', '.join(target.name for target in targets)}; name one")
    return targets[0], int(count)
