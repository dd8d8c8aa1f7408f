"""The tables of `enginery fleet` and `enginery fleet plan`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from enginery.core.text import format_bytes, join_first, pluralize
from pipeline.cli.tables import echo, print_table
from pipeline.fleet.coverage import STATES, Coverage

if TYPE_CHECKING:
    from pipeline.fleet.groups import Fleet, NodeGroup
    from pipeline.fleet.plan import FleetPlan
    from pipeline.fleet.work import FleetWork
    from pipeline.orchestration.fleet.reconcile import Reconciled


def print_reconciled(found: "Reconciled") -> None:
    """Groups, standings with the worst first, and what would have to be done."""
    _print_fleet(found.fleet, found.unwanted)
    echo()
    if found.standings:
        print_table(("model", "version", "state", "nodes", "on", "engine", "why"), standing_rows(found.standings))
        counts = ", ".join(f"{count} {state}" for state, count in found.counts.items())
        echo(f"\n{pluralize(len(found.standings), 'pair')} of model and group: {counts}")
    else:
        echo(f"nothing must be served here by {found.catalog.source}")
    _print_work(found.work)


def print_plan(found: "FleetPlan") -> None:
    """Groups after the change, what dies, what does not serve then either, what to do, and what nobody needs."""
    _print_fleet(found.after, found.unwanted)
    columns = ("model", "version", "state", "nodes", "on", "engine", "why")
    for title, items in (
        ("Dies: serves now, and would not", found.dying),
        ("Lacks an engine then: it has none today, or the nodes are new", found.waiting),
    ):
        echo(f"\n{title}" + ("" if items else ": nothing"))
        if items:
            print_table(columns, standing_rows(items))
    _print_work(found.work)
    if found.work:
        echo(f"\nPredicted: {found.hours.words}; proving is not in it")
    if found.idle:
        echo("\nNeeded by no node any more")
        print_table(("engine", "models"), [[item.unit, join_first(item.models)] for item in found.idle])


def standing_rows(standings: Iterable[Coverage]) -> list[list[str]]:
    """A row for all groups on which a model stands alike, the worst first."""
    alike: dict[tuple[str, ...], list[Coverage]] = {}
    for item in standings:
        engine = item.engine.unit if item.engine else ""
        why = item.reason or "; ".join((item.fit, *item.remarks))
        name = str(item.demand.reference) + (f" {item.precision}" if item.precision else "")
        key = (name, item.served.version or "", item.state, engine, why)
        alike.setdefault(key, []).append(item)
    rows = [
        [name, version, state, str(sum(item.group.nodes for item in items)), _groups(items), engine, why]
        for (name, version, state, engine, why), items in alike.items()
    ]
    return sorted(rows, key=lambda row: (STATES.index(row[2]), row[0]))


def _print_fleet(fleet: "Fleet", unwanted: Sequence["NodeGroup"]) -> None:
    echo(f"{pluralize(len(fleet.groups), 'group')} of nodes ({fleet.source})")
    rows = [
        [
            group.name,
            group.machine.target.sm,
            str(group.nodes),
            str(group.gpus),
            group.machine.driver or "",
            group.machine.cuda or "",
            format_bytes(group.machine.memory_bytes),
            group.hardware.label,
            ", ".join(group.remarks),
        ]
        for group in fleet.groups
    ]
    if rows:
        print_table(("group", "target", "nodes", "gpus", "driver", "cuda", "memory", "label", "remarks"), rows)
    reasons: dict[str, list[str]] = {}
    for item in fleet.left_out:
        reasons.setdefault(item.reason, []).append(item.node)
    for reason, nodes in reasons.items():
        echo(f"left out: {join_first(nodes)}: {reason}")
    if unwanted:
        echo(f"no model must be served on: {', '.join(dict.fromkeys(group.name for group in unwanted))}")


def _print_work(work: Sequence["FleetWork"]) -> None:
    if not work:
        return
    echo("\nTo do, in this order (what most nodes wait for first, then channel stable, then the shorter)")
    rows = [
        [item.unit.kind, item.name, str(item.nodes), join_first(item.groups), _time(item), item.refused or item.first]
        for item in work
    ]
    print_table(("do", "unit", "nodes", "on", "predicted", "but first"), rows)


def _time(item: "FleetWork") -> str:
    if item.unit.kind == "prove" or item.refused:
        return ""
    if item.expected is None or item.expected.seconds is None:
        return "unknown"
    return f"{item.expected.seconds:.0f} s, from {item.expected.basis}"


def _groups(items: Sequence[Coverage]) -> str:
    return ", ".join(dict.fromkeys(item.group.name for item in items))
