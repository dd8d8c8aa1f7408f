"""`enginesmith fleet` and `enginesmith fleet plan`: a cluster's nodes against the registry, as tables or JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from enginesmith.cli.options import Group, Option, emit, runtimes_option, say, takes
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.text import format_bytes, join_first, pluralize
from enginesmith.registry.builds.build_history import History
from enginesmith.registry.store.base import open_store
from pipeline.fleet.coverage import STATES, Coverage
from pipeline.fleet.inventory import Access, check_version

if TYPE_CHECKING:
    from enginesmith.registry.store.base import Store
    from pipeline.fleet.coverage import FleetWork
    from pipeline.fleet.groups import Fleet, NodeGroup
    from pipeline.fleet.plan import FleetPlan, StateChange
    from pipeline.orchestration.fleet import FleetSources, Reconciled

_COVERAGE_COLUMNS = ("model", "version", "state", "nodes", "groups", "engine", "why")


@dataclass(frozen=True)
class _Sources:
    """Which machines, and which models."""

    inventory: Annotated[
        Path | None,
        Option(
            "File with the nodes: groups of nodes as YAML, or the JSON of `kubectl get nodes -o json`; -: stdin.",
            shown="the nodes of the cluster",
        ),
    ] = None
    catalog: Annotated[
        Path | None,
        Option(
            "Catalog (YAML file): which models must be served on which nodes.",
            envvar="ENGINESMITH_CATALOG",
            show_envvar=True,
            shown="every model with a channel, on every GPU",
        ),
    ] = None
    kubeconfig: Annotated[
        Path | None,
        Option("Kubernetes configuration.", shown="KUBECONFIG, else a pod's service account, else ~/.kube/config"),
    ] = None
    context: Annotated[str | None, Option("Context of the kubeconfig.", shown="the current one")] = None
    timeout: Annotated[
        float, Option("Time limit of a request to the cluster, in seconds.", type=click.FloatRange(0.1))
    ] = 30.0

    def open(self, registry: str, runtimes: Mapping[str, str]) -> "tuple[Store, FleetSources]":
        """The registry, and what to compare with it. runtimes: by package, where the inventory does not say it."""
        from pipeline.orchestration.fleet import FleetSources

        access = Access(self.kubeconfig, self.context, self.timeout)
        return open_store(registry), FleetSources(self.inventory, access, self.catalog, _checked(runtimes))


@dataclass(frozen=True, kw_only=True)
class _FleetOptions:
    runtimes: Annotated[Mapping[str, str], runtimes_option("on the nodes, if the inventory does not say it")] = field(
        default_factory=dict
    )
    apply: Annotated[bool, Option("Have the Prefect server start the missing builds and proofs.")] = False
    sources: _Sources


@click.group(cls=Group, invoke_without_command=True)
@takes(_FleetOptions)
@click.pass_context
def fleet(ctx: click.Context, /, options: _FleetOptions, registry: str, as_json: bool) -> None:
    """Compare a cluster's nodes with the registry: which models have a proven engine on each node, and what is missing.

    Exit code 1 if a node has no usable engine for a model that it must serve.
    """
    if ctx.invoked_subcommand is not None:
        command_line = click.core.ParameterSource.COMMANDLINE
        if set_options := [name for name in ctx.params if ctx.get_parameter_source(name) is command_line]:
            set_flags = ", ".join(f"--{name.replace('_', '-').replace('runtimes', 'runtime')}" for name in set_options)
            raise click.UsageError(f"{set_flags}: give options after `fleet {ctx.invoked_subcommand}`")
        return
    from pipeline.orchestration.fleet import reconcile

    store, sources = options.sources.open(registry, options.runtimes)
    reconciliation = reconcile(store, sources, History(store).predict)
    emit(as_json, reconciliation.to_json(), print_reconciled, reconciliation)
    if options.apply:
        _send(reconciliation)
    ctx.exit(0 if reconciliation.good else 1)


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    driver: Annotated[str | None, Option("New driver version of the GPU nodes, e.g. 590.44.", metavar="VERSION")] = None
    runtimes: Annotated[Mapping[str, str], runtimes_option("that the nodes will get")] = field(default_factory=dict)
    on: Annotated[
        str, Option("GPUs of the nodes that get the new versions, e.g. l4,hopper.", metavar="TARGETS", shown="all")
    ] = ""
    add: Annotated[
        tuple[str, ...], Option("Number of new nodes with this GPU, e.g. b200=16; repeatable.", metavar="PRODUCT=NODES")
    ] = ()
    remove: Annotated[
        tuple[str, ...],
        Option("Number of nodes with this GPU to remove, e.g. t4=8; repeatable.", metavar="PRODUCT=NODES"),
    ] = ()
    sources: _Sources

    def change(self) -> "StateChange":
        """The change of the fleet. Raises click's usage error without one, InputError for an invalid version."""
        from pipeline.fleet.plan import StateChange, parse_nodes

        change = StateChange(
            check_version("driver", self.driver),
            _checked(self.runtimes),
            on=tuple(target for name in self.on.replace(",", " ").split() for target in parse_targets(name)),
            add=tuple(map(parse_nodes, self.add)),
            remove=tuple(map(parse_nodes, self.remove)),
        )
        if change == StateChange(on=change.on):
            raise click.UsageError("nothing changes: give --driver, --runtime, --add or --remove")
        return change


@fleet.command()
@takes(_PlanOptions)
def plan(options: _PlanOptions, registry: str, as_json: bool) -> None:
    """Show which engines a change of the fleet would break, and the builds that the change needs.

    The builds are listed in order, with times predicted from recorded builds. The command changes nothing.
    """
    from pipeline.fleet.plan import make_plan
    from pipeline.orchestration.fleet import compare_deployments

    change = options.change()
    store, sources = options.sources.open(registry, {})
    fleet_plan = make_plan(*compare_deployments(store, sources), change, History(store).predict)
    emit(as_json, fleet_plan.to_json(), print_plan, fleet_plan)


def _checked(runtimes: Mapping[str, str]) -> dict[str, str]:
    """The versions of runtimes by package. Raises InputError for an invalid version."""
    for name, version in runtimes.items():
        check_version(f"runtime {name}", version)
    return {**runtimes}


def _send(fleet_state: "Reconciled") -> None:
    """Send an event for each missing engine or proof, one after the other."""
    from pipeline.orchestration.fleet import messages

    events = messages(fleet_state.work, fleet_state.registry)
    if not events:
        is_blocked = any(not work.ready for work in fleet_state.work)
        remedy = "do what the column 'do first' says" if is_blocked else "no build and no proof is missing"
        say(f"nothing to send: {remedy}")
        return
    from pipeline.orchestration.watch import send_event  # only now, as it loads Prefect

    for message in events:
        sent_event = send_event(message.event, message.model, message.payload)
        say(f"sent {message.event} of {message.model}: {sent_event.id}")


def print_reconciled(fleet_state: "Reconciled") -> None:
    """Print the groups of nodes, each model's coverage on them, the worst first, and the actions to take."""
    _print_fleet(fleet_state.fleet, fleet_state.unwanted)
    echo()
    if fleet_state.standings:
        print_table(_COVERAGE_COLUMNS, _coverage_rows(fleet_state.standings))
        counts = ", ".join(f"{count} {state}" for state, count in fleet_state.counts.items())
        echo(f"\n{pluralize(len(fleet_state.standings), 'pair')} of model and group: {counts}")
    else:
        echo(f"no model must be served on these nodes (catalog: {fleet_state.catalog.source})")
    _print_work(fleet_state.work)


def print_plan(fleet_plan: "FleetPlan") -> None:
    """Print the groups after a change, the engines that it stops or that are missing, and what to do."""
    _print_fleet(fleet_plan.after, fleet_plan.unwanted)
    for title, coverages in (
        ("Engines that fit now, but not after the change", fleet_plan.dying),
        ("Nodes without an engine, today and after the change; and new nodes without an engine", fleet_plan.waiting),
    ):
        echo(f"\n{title}" + ("" if coverages else ": nothing"))
        if coverages:
            print_table(_COVERAGE_COLUMNS, _coverage_rows(coverages))
    _print_work(fleet_plan.work)
    if fleet_plan.work:
        echo(f"\nPredicted time of builds, without proofs: {fleet_plan.hours.words}")


def _coverage_rows(standings: Iterable[Coverage]) -> list[list[str]]:
    """A row for the groups on which a model has the same coverage, the worst state first."""
    rows_by_text: dict[tuple[str, ...], list[Coverage]] = {}
    for coverage in standings:
        engine = coverage.engine.unit if coverage.engine else ""
        if not coverage.serves:
            engine = f"not usable: {engine}" if engine else "none"
        reason = coverage.reason or "; ".join((coverage.fit, *coverage.remarks))
        name = str(coverage.demand.reference) + (f" {coverage.precision}" if coverage.precision else "")
        key = (name, coverage.served.version or "", coverage.state, engine, reason)
        rows_by_text.setdefault(key, []).append(coverage)
    rows = [
        [
            *(name, version, state, str(sum(coverage.group.nodes for coverage in coverages))),
            *(", ".join(dict.fromkeys(coverage.group.name for coverage in coverages)), engine, reason),
        ]
        for (name, version, state, engine, reason), coverages in rows_by_text.items()
    ]
    return sorted(rows, key=lambda row: (STATES.index(row[2]), row[0]))


def _print_fleet(fleet: "Fleet", groups: Sequence["NodeGroup"]) -> None:
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
    for omission in fleet.left_out:
        reasons.setdefault(omission.reason, []).append(omission.node)
    for reason, nodes in reasons.items():
        echo(f"left out: {join_first(nodes)}: {reason}")
    if groups:
        echo(f"groups on which no model must be served: {', '.join(dict.fromkeys(group.name for group in groups))}")


def _print_work(work: Sequence["FleetWork"]) -> None:
    if not work:
        return
    echo("\nTo do, in this order (ready units first; then most waiting nodes, channel stable, shorter builds)")
    rows = [
        [task.unit.kind, task.name, str(task.nodes), join_first(task.groups), _time(task), task.refused or task.remedy]
        for task in work
    ]
    print_table(("action", "unit", "nodes", "groups", "predicted time", "do first"), rows)


def _time(work: "FleetWork") -> str:
    """The predicted time of a build, with what it is predicted from."""
    if work.unit.kind == "prove" or work.refused:
        return ""
    if work.expected is None or work.expected.seconds is None:
        return "unknown"
    return f"{work.expected.seconds:.0f} s, from {work.expected.basis}"
