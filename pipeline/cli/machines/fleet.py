"""`enginesmith fleet` and `enginesmith fleet plan`: a cluster's nodes against the registry, as tables or JSON."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.options import (
    combine,
    emit_json,
    json_option,
    number_option,
    path_option,
    registry_option,
    runtime_options,
    say,
    stated_runtimes,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.text import format_bytes, join_first, pluralize
from pipeline.fleet.coverage import STATES, Coverage

if TYPE_CHECKING:
    from enginesmith.registry.store.base import Store
    from pipeline.fleet.coverage import FleetWork
    from pipeline.fleet.groups import Fleet, NodeGroup
    from pipeline.fleet.plan import FleetPlan
    from pipeline.orchestration.fleet import FleetSources, Reconciled

_COVERAGE_COLUMNS = ("model", "version", "state", "nodes", "on", "engine", "why")


# Which machines, which models, which registry, as `_open` takes them.
source_options = combine(
    path_option(
        "--inventory",
        "Groups of nodes as YAML, or the JSON of `kubectl get nodes -o json`; - is stdin.",
        shown="the cluster's nodes",
    ),
    click.option(
        "--catalog",
        type=click.Path(path_type=Path),
        envvar="ENGINESMITH_CATALOG",
        show_envvar=True,
        show_default="every model with a channel, on every GPU",
        help="Which models must be served where (YAML).",
    ),
    path_option(
        "--kubeconfig",
        "Kubernetes configuration.",
        shown="KUBECONFIG, else a pod's service account, else ~/.kube/config",
    ),
    click.option("--context", show_default="the current one", help="Context of the kubeconfig."),
    number_option("--timeout", click.FloatRange(0.1), 30.0, "Seconds that a request to the cluster may take."),
    registry_option,
    json_option,
)


@click.group(invoke_without_command=True)
@runtime_options("on the nodes, where the inventory does not say it")
@click.option("--apply", is_flag=True, help="Start builds and proofs of what is missing on the Prefect server.")
@source_options
@click.pass_context
def fleet(ctx: click.Context, /, apply: bool, as_json: bool, **chosen: Any) -> None:
    """Compare the nodes of a cluster with the registry: what is covered, missing, unproven or about to break.

    Exit code 1 if a model that must be served cannot be.
    """
    if ctx.invoked_subcommand is not None:
        command_line = click.core.ParameterSource.COMMANDLINE
        if given := [name for name in ctx.params if ctx.get_parameter_source(name) is command_line]:
            options = ", ".join(f"--{name.replace('_', '-').replace('as-json', 'json')}" for name in given)
            raise click.UsageError(f"{options}: give options after `fleet {ctx.invoked_subcommand}`")
        return
    from pipeline.fleet.coverage import predictor
    from pipeline.orchestration.fleet import reconcile

    store, sources = _open(chosen)
    found = reconcile(store, sources, predictor(store))
    if as_json:
        emit_json(found.to_json())
    else:
        print_reconciled(found)
    if apply:
        _send(found)
    ctx.exit(0 if found.good else 1)


@fleet.command()
@click.option("--driver", metavar="VERSION", help="New driver version of the GPU nodes, e.g. 590.44.")
@runtime_options("that the nodes get, e.g. 11.4")
@click.option("--on", metavar="TARGETS", show_default="all", help="Nodes that get the new versions, e.g. l4,hopper.")
@click.option("--add", multiple=True, metavar="PRODUCT=NODES", help="Nodes to be added, e.g. b200=16; repeat it.")
@click.option("--remove", multiple=True, metavar="PRODUCT=NODES", help="Nodes to be removed, e.g. t4=8; repeat it.")
@source_options
def plan(as_json: bool, **chosen: Any) -> None:
    """Show what a change of the fleet would break, and what must be rebuilt, in which order and in what time.

    Nothing is changed. Times are predicted from the builds on record.
    """
    from enginesmith.core.hardware.machine import parse_targets
    from pipeline.fleet.coverage import predictor
    from pipeline.fleet.inventory import check_version
    from pipeline.fleet.plan import StateChange, make_plan, parse_nodes
    from pipeline.orchestration.fleet import compare_deployments

    driver, runtimes = check_version("driver", chosen.pop("driver")), _runtimes(chosen)
    named = (chosen.pop("on") or "").replace(",", " ").split()
    change = StateChange(
        driver,
        runtimes,
        on=tuple(target for name in named for target in parse_targets(name)),
        add=tuple(map(parse_nodes, chosen.pop("add"))),
        remove=tuple(map(parse_nodes, chosen.pop("remove"))),
    )
    if change == StateChange(on=change.on):
        raise click.UsageError(
            "nothing changes: give --driver, --tensorrt, --tensorrt-rtx, --runtime, --add or --remove"
        )
    store, sources = _open(chosen)
    found = make_plan(*compare_deployments(store, sources), change, predictor(store))
    if as_json:
        emit_json(found.to_json())
    else:
        print_plan(found)


def _open(chosen: dict[str, Any]) -> "tuple[Store, FleetSources]":
    """The registry, and what to compare with it, of the options of `source_options` and `runtime_options`."""
    from enginesmith.registry.store.base import open_store
    from pipeline.fleet.inventory import Access
    from pipeline.orchestration.fleet import FleetSources

    access = Access(chosen["kubeconfig"], chosen["context"], chosen["timeout"])
    sources = FleetSources(chosen["inventory"], access, chosen["catalog"], _runtimes(chosen))
    return open_store(chosen["registry"]), sources


def _runtimes(chosen: dict[str, Any]) -> dict[str, str]:
    """The versions of runtimes by package. Raises InputError for what is no version."""
    from pipeline.fleet.inventory import check_version

    stated = stated_runtimes(chosen)
    for name, version in stated.items():
        check_version(name, version)
    return stated


def _send(found: "Reconciled") -> None:
    """Send the events for what is missing, each once the Prefect server has the one before."""
    from pipeline.orchestration.fleet import messages, send

    events = messages(found.work, found.registry)
    for message in events:
        say(f"sent {message.event} of {message.model}: {send(message)}")
    left = [item for item in found.work if not item.ready]
    if not events:
        say("nothing to send: " + ("what is missing needs a person first" if left else "nothing is missing"))


def print_reconciled(found: "Reconciled") -> None:
    """Print the groups of nodes, each model's coverage on them, the worst first, and what is to be done."""
    _print_fleet(found.fleet, found.unwanted)
    echo()
    if found.standings:
        print_table(_COVERAGE_COLUMNS, _coverage_rows(found.standings))
        counts = ", ".join(f"{count} {state}" for state, count in found.counts.items())
        echo(f"\n{pluralize(len(found.standings), 'pair')} of model and group: {counts}")
    else:
        echo(f"nothing must be served here by {found.catalog.source}")
    _print_work(found.work)


def print_plan(found: "FleetPlan") -> None:
    """Print the groups after a change, the engines that it stops or that are missing, what to do, and what is idle."""
    _print_fleet(found.after, found.unwanted)
    for title, items in (
        ("Breaks: serves now, and would not after the change", found.dying),
        ("Without an engine after the change: has none today, or the nodes are new", found.waiting),
    ):
        echo(f"\n{title}" + ("" if items else ": nothing"))
        if items:
            print_table(_COVERAGE_COLUMNS, _coverage_rows(items))
    _print_work(found.work)
    if found.work:
        echo(f"\nPredicted: {found.hours.words}; without the time of proofs")
    if found.idle:
        echo("\nNeeded by no node any more")
        print_table(("engine", "models"), [[item.unit, join_first(item.models)] for item in found.idle])


def _coverage_rows(standings: Iterable[Coverage]) -> list[list[str]]:
    """A row for the groups on which a model has the same coverage, the worst state first."""
    alike: dict[tuple[str, ...], list[Coverage]] = {}
    for item in standings:
        engine = item.engine.unit if item.engine else ""
        if not item.serves:
            engine = f"none; there is {engine}" if engine else "none"
        why = item.reason or "; ".join((item.fit, *item.remarks))
        name = str(item.demand.reference) + (f" {item.precision}" if item.precision else "")
        key = (name, item.served.version or "", item.state, engine, why)
        alike.setdefault(key, []).append(item)
    rows = [
        [
            *(name, version, state, str(sum(item.group.nodes for item in items))),
            *(", ".join(dict.fromkeys(item.group.name for item in items)), engine, why),
        ]
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
    """The predicted time of a build, with what it is predicted from."""
    if item.unit.kind == "prove" or item.refused:
        return ""
    if item.expected is None or item.expected.seconds is None:
        return "unknown"
    return f"{item.expected.seconds:.0f} s, from {item.expected.basis}"
