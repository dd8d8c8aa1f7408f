"""`enginesmith pull`: the engine that fits a serving node, and why; or a channel that is followed."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from enginesmith.cli.layouts import check_layout, layout_options, show_placed, triton_of, write_objects
from enginesmith.cli.options import (
    TARGET,
    check_finite,
    emit_json,
    engine_options,
    json_option,
    optional_references_argument,
    precision_option,
    progress_options,
    registry_option,
    runtime_options,
    say,
    stated_runtimes,
    trust_option,
)
from enginesmith.cli.tables import download_bar, echo, print_table

if TYPE_CHECKING:
    from enginesmith.client.client import Client
    from enginesmith.client.layouts.base import AllGenerations
    from enginesmith.client.pull import Pulled
    from enginesmith.client.resolve import EngineRanking
    from enginesmith.client.watching.watch import Swap
    from enginesmith.core.hardware.machine import Machine


# Options of `pull`, and what they ask for: machines, a policy, a node.


Command = TypeVar("Command", bound=Callable[..., object])

_FACTS = (
    click.option("--driver", metavar="VERSION", help="GPU driver of that machine, e.g. 580.65.06."),
    click.option("--cuda", metavar="VERSION", help="Newest CUDA that this driver supports, e.g. 13.0."),
    runtime_options("on that machine"),
    click.option(
        "--memory",
        "memory_gib",
        type=click.FloatRange(0, min_open=True),
        callback=check_finite,
        help="GPU memory in GiB.",
    ),
)
MACHINE = (engine_options, *_FACTS)
MACHINES = (
    click.option(
        "--target",
        "targets",
        metavar="TARGET",
        multiple=True,
        default=("auto",),
        show_default="auto",
        help=f"{TARGET}; auto is this machine. Repeat it with --layout triton.",
    ),
    precision_option("the one that fits best"),
    *_FACTS,
)
POLICY = (
    click.option("--proven-only", is_flag=True, help="Only proven engines."),
    trust_option,
    click.option(
        "--kind",
        type=click.Choice(["engine", "cache"]),
        default="engine",
        show_default=True,
        help="cache: a compile cache of torch, for enginesmith.warm_start.",
    ),
    click.option("--fallback", type=click.Choice(["onnx"]), help="Take the ONNX model if no engine fits."),
)
WATCH = (
    click.option("--follow", "watch", is_flag=True, help="Follow the channel REF; DEST/current leads to its engine."),
    click.option("--once", is_flag=True, help="With --follow: look once and exit."),
    click.option(
        "--interval",
        type=click.FloatRange(0.05),
        callback=check_finite,
        show_default="120, for each channel",
        help="With --follow: seconds between two looks.",
    ),
    click.option(
        "--keep",
        default=2,
        type=click.IntRange(1),
        show_default=True,
        help="With --follow: engines to keep beside the current one.",
    ),
    click.option("--hook", help="With --follow: command to run after a swap, with ENGINESMITH_... variables."),
    click.option("--hook-url", help="With --follow: URL to post to after a swap."),
    click.option(
        "--hook-timeout",
        default=30.0,
        type=click.FloatRange(0.05),
        callback=check_finite,
        show_default=True,
        help="With --follow: seconds that a hook may take.",
    ),
)
NODE = (
    click.option(
        "--node", envvar="ENGINESMITH_NODE", show_envvar=True, show_default="the host's name", help="This node."
    ),
    click.option(
        "--region", envvar="ENGINESMITH_REGION", show_envvar=True, default="", help="Its region, for rollouts."
    ),
    click.option(
        "--labels",
        envvar="ENGINESMITH_LABELS",
        show_envvar=True,
        default="",
        metavar="LABEL,...",
        help="Its labels, for rollouts.",
    ),
)
REPORT = (
    click.option("--health-command", metavar="COMMAND", help="With --follow: exit code 0 while the server is well."),
    click.option("--health-url", metavar="URL", help="With --follow: a URL that answers 2xx while the server is well."),
    click.option("--report-url", metavar="URL", help="With --follow: post reports to rollouts there."),
    click.option("--no-report", is_flag=True, help="With --follow: report nothing to rollouts."),
)


def add_options(*groups: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """A decorator that adds groups of options, in their order."""

    def add(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return add


def machines_of(given: dict[str, Any]) -> "list[Machine] | AllGenerations":
    """What `pull` is asked for."""
    from enginesmith.client.layouts.base import ALL_GENERATIONS

    if not given["all_generations"]:
        return [machine_of(given, target) for target in given["targets"]]
    if click.get_current_context().get_parameter_source("targets") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("give --target or --all-generations, not both")
    return ALL_GENERATIONS


def one_machine(given: dict[str, Any]) -> "Machine":
    """The one target of a layout that holds one engine."""
    if len(given["targets"]) > 1:
        raise click.UsageError("engines of several targets lie together in Triton's layout alone; give --layout triton")
    return machine_of(given, given["targets"][0])


def machine_of(given: dict[str, Any], target: str) -> "Machine":
    """The machine of a target's name, with what was stated of it."""
    from enginesmith.core.hardware.machine import Machine

    memory = given["memory_gib"]
    stated = {"driver": given["driver"], "cuda": given["cuda"], "runtimes": stated_runtimes(dict(given))}
    return Machine.from_name(target).with_facts(**stated, memory_bytes=memory and int(memory * (1 << 30)))


def client_of(registry: str, given: dict[str, Any]) -> "Client":
    """The client of a registry for what was asked."""
    from enginesmith.client.client import Client
    from enginesmith.client.resolve import Policy
    from enginesmith.registry.rollouts.state import ServingNode

    policy = Policy(**{name: given[name] for name in ("precision", "proven_only", "fallback", "trust", "kind")})
    stated = {name: given[name] for name in ("node", "region", "labels") if given[name]}
    node = ServingNode.from_environment({f"ENGINESMITH_{name.upper()}": text for name, text in stated.items()})
    return Client(registry, policy=policy, rehash=given.get("rehash", False), say=say, node=node)


# `enginesmith pull --follow`: follows channels until it is told to end.


def follow(client: "Client", references: tuple[str, ...], dest: Path, given: dict[str, Any], as_json: bool) -> None:
    """Follow the channels until SIGTERM or Ctrl-C; the engines that are served stay."""
    from enginesmith.client.layouts.base import Plain
    from enginesmith.client.watching.server import INTERVAL_S, Command, Post

    if given["layout"] == "kserve":
        raise click.UsageError("--layout kserve writes objects once; a cluster follows no channel by them")
    one, in_triton = len(references) == 1, given["layout"] == "triton"
    if in_triton and not one:
        raise click.UsageError("--layout triton follows one channel for each folder; watch each into its own")
    line, url, timeout_s = given["hook"], given["hook_url"], given["hook_timeout"]
    if line and url:
        raise click.UsageError("give --hook or --hook-url, not both")
    if not references:
        raise click.UsageError("give a channel to follow, as in digits:stable")
    options: dict[str, Any] = {
        "machine": machines_of(given) if in_triton else one_machine(given),
        "hook": Command(line, timeout_s) if line else Post(url, timeout_s) if url else None,
        **{name: given[name] for name in ("once", "keep")},
        "say": say,
        **_reporting(given),
    }
    try:
        if one:
            interval_s = given["interval"] or INTERVAL_S
            layout = triton_of(given) if in_triton else Plain()
            swap = client.watch(references[0], dest, layout=layout, interval_s=interval_s, **options)
            swaps: tuple[Swap, ...] = () if swap is None else (swap,)
        else:
            swaps = client.watch_group(references, dest, interval_s=given["interval"], **options)
    except KeyboardInterrupt:
        say("stopped")
        return
    if as_json and (swaps or not one):
        found = [{**swap.facts(), "swapped": swap.swapped, "origin": swap.origin} for swap in swaps]
        emit_json(found[0] if one else found)


def _reporting(given: dict[str, Any]) -> dict[str, Any]:
    """How a watcher reports to rollouts."""
    from enginesmith.client.watching.server import HealthCommand, HealthUrl, ReportUrl

    line, health, url = given["health_command"], given["health_url"], given["report_url"]
    if (line and health) or (url and given["no_report"]):
        raise click.UsageError("give --health-command or --health-url, and --report-url or --no-report, not both")
    if (line or health) and given["no_report"]:
        raise click.UsageError("what --health-command and --health-url find is reported; leave out --no-report")
    report = ReportUrl(url) if url else not given["no_report"]
    return {"health": HealthCommand(line) if line else HealthUrl(health) if health else None, "report": report}


def refuse_without_watch(context: click.Context) -> None:
    """Raise click's usage error for an option that goes with --follow."""
    for name in (
        "once",
        "hook",
        "hook_url",
        "interval",
        "keep",
        "hook_timeout",
        "health_command",
        "health_url",
        "report_url",
        "no_report",
    ):
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --follow")


# `enginesmith pull`: the engine that fits a serving node, and why; or a channel that is followed.


@click.command()
@optional_references_argument
@click.option(
    "--dest", type=click.Path(path_type=Path), default=Path(), show_default="this folder", help="Folder for the engine."
)
@add_options(MACHINES, POLICY, layout_options)
@click.option(
    "--rehash", is_flag=True, help="Hash files that are here already, instead of trusting that nothing changed them."
)
@click.option(
    "--explain",
    is_flag=True,
    help="Only show which engines fit the machine, best first, and why not the others. Exit code 1 if none does.",
)
@add_options(NODE, WATCH, REPORT)
@progress_options
@registry_option
@json_option
def pull(
    references: tuple[str, ...], dest: Path, registry: str, as_json: bool, quiet: bool, explain: bool, **given: Any
) -> None:
    """Download the engine of REF that fits the target best, verified, and say why that one.

    With --follow, REF may be several channels, each of which comes into DEST/MODEL/CHANNEL.
    """
    context, layout = click.get_current_context(), given["layout"]
    check_layout(context, layout)
    client = client_of(registry, given)
    if given["watch"]:
        if explain:
            raise click.UsageError("--explain looks at one REF once: leave out --follow")
        follow(client, references, dest, given, as_json)
        return
    if len(references) != 1:
        raise click.UsageError("give one REF; several go with --follow")
    reference = references[0]
    if explain:
        _explain([client.resolve(reference, machine_of(given, target)) for target in given["targets"]], as_json)
        return
    refuse_without_watch(context)
    if layout == "kserve":
        write_objects(client, reference, dest, one_machine(given), given, as_json)
        return
    if layout == "triton":
        with download_bar(quiet) as progress:
            placed = client.place(reference, dest, triton_of(given), machine=machines_of(given), progress=progress)
        show_placed(placed, as_json)
        return
    with download_bar(quiet) as progress:
        pulled = client.pull(reference, dest, machine=one_machine(given), progress=progress)
    for line in (*pulled.warnings, *(f"note: {remark}" for remark in pulled.resolution.remarks)):
        say(line)
    if as_json:
        emit_json(_pulled_json(pulled))
    else:
        _print_pulled(pulled)


def _explain(answers: "list[EngineRanking]", as_json: bool) -> None:
    """Print what fits each machine, as one document in JSON, and exit."""
    if as_json:
        found = [answer.to_json() for answer in answers]
        emit_json(found if len(found) > 1 else found[0])
    else:
        for answer in answers:
            _show(answer)
    click.get_current_context().exit(0 if all(answer.candidates for answer in answers) else 1)


def _show(answer: "EngineRanking") -> None:
    rows = [
        [str(number), one.entry.unit, one.entry.status, "; ".join((one.fit, *one.remarks))]
        for number, one in enumerate(answer.candidates, 1)
    ]
    rows += [["-", unit, "rejected", reason] for unit, reason in answer.rejected]
    facts = ", ".join(f"{name} {value}" for name, value in answer.machine.list_facts().items())
    echo(f"{answer.what} on {answer.machine.target.name}" + (f" ({facts})" if facts else ""))
    print_table(("rank", "engine", "status", "why"), rows)


def _print_pulled(pulled: "Pulled") -> None:
    came = {"there": " (was there already)", "cache": " (from this machine's cache)", "registry": ""}[pulled.origin]
    echo(f"{pulled.path}{came}")
    echo(f"chosen: {pulled.engine.unit} of {pulled.located.manifest.model}@{pulled.located.manifest.version}")
    echo(f"why:    {pulled.resolution.why}")
    if pulled.located.signed_by:
        echo(f"signed: by {', '.join(pulled.located.signed_by)}")
    for unit, reason in pulled.resolution.rejected:
        echo(f"not:    {unit}: {reason}")


_ENGINE_FIELDS = ("target", "precision", "backend", "status", "reason", "digest", "size_bytes")


def _pulled_json(pulled: "Pulled") -> dict[str, Any]:
    engine, manifest = pulled.engine, pulled.located.manifest
    return {
        "path": str(pulled.path),
        "description": str(pulled.description),
        "model": manifest.model,
        "version": manifest.version,
        **{name: getattr(engine, name) for name in _ENGINE_FIELDS},
        "why": pulled.resolution.why,
        "rejected": [{"unit": unit, "reason": reason} for unit, reason in pulled.resolution.rejected],
        "lost": [{"unit": unit, "reason": reason} for unit, reason in pulled.resolution.lost],
        "remarks": list(pulled.resolution.remarks),
        "cached": pulled.cached,
        "origin": pulled.origin,
        "warning": pulled.warning,
        "signed_by": list(pulled.located.signed_by),
    }
