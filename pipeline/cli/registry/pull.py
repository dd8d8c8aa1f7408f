"""The commands of a serving node: resolve says which engine fits it and why, pull brings it, or follows a channel.

The bar of a download: bytes, speed and time left on one line of stderr, however narrow it is, if a person looks.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from enginery.client.fetch import silent
from pipeline.cli.options import (
    TARGET,
    check_finite,
    emit_json,
    engine_options,
    json_option,
    optional_references_argument,
    precision_option,
    progress_options,
    reference_argument,
    registry_option,
    runtime_options,
    say,
    stated_runtimes,
    trust_option,
)
from pipeline.cli.registry.layouts import check_layout, layout_options, show_placed, triton_of, write_objects
from pipeline.cli.tables import echo, print_table

if TYPE_CHECKING:
    from enginery.client.client import Client, EngineRanking, Machine, Pulled, Swap
    from enginery.client.layouts.ranking import AllGenerations
if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from enginery.client.fetch import Progress


Command = TypeVar("Command", bound=Callable[..., object])

# Widths in characters of the columns of a download's bar: '1,023.9/1,023.9 MiB', ' 1023.9 MiB/s' and ' 0:00:00'.
_BYTES, _SPEED, _LEFT = 19, 13, 8
_WIDEST_BAR, _SHORTEST_BAR = 40, 4

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
_MACHINE = (engine_options, *_FACTS)
_MACHINES = (
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
_POLICY = (
    click.option("--proven-only", is_flag=True, help="Only proven engines."),
    trust_option,
    click.option(
        "--kind",
        type=click.Choice(["engine", "cache"]),
        default="engine",
        show_default=True,
        help="cache: a compile cache of torch, for enginery.warm_start.",
    ),
    click.option("--fallback", type=click.Choice(["onnx"]), help="Take the ONNX model if no engine fits."),
)
_WATCH = (
    click.option("--watch", is_flag=True, help="Follow the channel REF; DEST/current leads to its engine."),
    click.option(
        "--feed",
        help="With --watch: a feed that has the channels; without REF all of them, each in DEST/MODEL/CHANNEL.",
    ),
    click.option("--listen", metavar="HOST:PORT", help="With --watch: where notifications come that shorten the wait."),
    click.option("--once", is_flag=True, help="With --watch: look once and exit."),
    click.option(
        "--interval",
        type=click.FloatRange(0.05),
        callback=check_finite,
        show_default="120, for each request that a look takes",
        help="With --watch: seconds between two looks.",
    ),
    click.option(
        "--keep",
        default=2,
        type=click.IntRange(1),
        show_default=True,
        help="With --watch: engines to keep beside the current one.",
    ),
    click.option("--hook", help="With --watch: command to run after a swap, with ENGINERY_... variables."),
    click.option("--hook-url", help="With --watch: URL to post to after a swap."),
    click.option(
        "--hook-timeout",
        default=30.0,
        type=click.FloatRange(0.05),
        callback=check_finite,
        show_default=True,
        help="With --watch: seconds that a hook may take.",
    ),
)
_NODE = (
    click.option("--node", envvar="ENGINERY_NODE", show_envvar=True, show_default="the host's name", help="This node."),
    click.option("--region", envvar="ENGINERY_REGION", show_envvar=True, default="", help="Its region, for rollouts."),
    click.option(
        "--labels",
        envvar="ENGINERY_LABELS",
        show_envvar=True,
        default="",
        metavar="LABEL,...",
        help="Its labels, for rollouts.",
    ),
)
_REPORT = (
    click.option("--health-command", metavar="COMMAND", help="With --watch: exit code 0 while the server is well."),
    click.option("--health-url", metavar="URL", help="With --watch: a URL that answers 2xx while the server is well."),
    click.option("--report-url", metavar="URL", help="With --watch: post reports to rollouts there."),
    click.option("--no-report", is_flag=True, help="With --watch: report nothing to rollouts."),
)


def _options(*groups: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return add


@click.command()
@reference_argument
@_options(_MACHINE, _POLICY, _NODE)
@registry_option
@json_option
def resolve(reference: str, registry: str, as_json: bool, **given: Any) -> None:
    """Show which engines of REF a machine can use, best first, and why not the others. Downloads nothing.

    Exit code 1 if there is none.
    """
    answer = _client(registry, given).resolve(reference, _machine(given, given["target"]))
    _show(answer, as_json)
    if not answer.candidates:
        raise SystemExit(1)


@click.command()
@optional_references_argument
@click.option(
    "--dest", type=click.Path(path_type=Path), default=Path(), show_default="this folder", help="Folder for the engine."
)
@_options(_MACHINES, _POLICY, layout_options)
@click.option(
    "--rehash", is_flag=True, help="Hash files that are here already, instead of trusting that nothing changed them."
)
@click.option("--explain", is_flag=True, help="Only show what would be chosen, as `enginery resolve` does.")
@_options(_NODE, _WATCH, _REPORT)
@progress_options
@registry_option
@json_option
def pull(
    references: tuple[str, ...], dest: Path, registry: str, as_json: bool, quiet: bool, explain: bool, **given: Any
) -> None:
    """Download the engine of REF that fits the target best, verified, and say why that one.

    With --watch, REF may be several channels, each of which comes into DEST/MODEL/CHANNEL.
    """
    context, layout = click.get_current_context(), given["layout"]
    check_layout(context, layout)
    client = _client(registry, given)
    if given["watch"] and not explain:
        _watch(client, references, dest, given, as_json)
        return
    if len(references) != 1:
        raise click.UsageError("give one REF; several, or a --feed, go with --watch")
    reference = references[0]
    if explain:
        for target in given["targets"]:
            _show(client.resolve(reference, _machine(given, target)), as_json)
        return
    _only_with_watch(context)
    if layout == "kserve":
        write_objects(client, reference, dest, _one_machine(given), given, as_json)
        return
    if layout == "triton":
        with download_bar(quiet) as progress:
            placed = client.place(reference, dest, triton_of(given), machine=_machines(given), progress=progress)
        show_placed(placed, as_json)
        return
    with download_bar(quiet) as progress:
        pulled = client.pull(reference, dest, machine=_one_machine(given), progress=progress)
    for line in (*pulled.warnings, *(f"note: {remark}" for remark in pulled.resolution.remarks)):
        say(line)
    if as_json:
        emit_json(_pulled_json(pulled))
    else:
        _print_pulled(pulled)


def _machines(given: dict[str, Any]) -> "list[Machine] | AllGenerations":
    """What `pull` is asked for."""
    from enginery.client.client import ALL_GENERATIONS

    if not given["all_generations"]:
        return [_machine(given, target) for target in given["targets"]]
    if click.get_current_context().get_parameter_source("targets") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("give --target or --all-generations, not both")
    return ALL_GENERATIONS


def _one_machine(given: dict[str, Any]) -> "Machine":
    """The one target of a layout that holds one engine."""
    if len(given["targets"]) > 1:
        raise click.UsageError("engines of several targets lie together in Triton's layout alone; give --layout triton")
    return _machine(given, given["targets"][0])


def _machine(given: dict[str, Any], target: str) -> "Machine":
    from enginery.core.hardware.machine import Machine

    memory = given["memory_gib"]
    stated = {"driver": given["driver"], "cuda": given["cuda"], "runtimes": stated_runtimes(dict(given))}
    return Machine.from_name(target).with_facts(**stated, memory_bytes=memory and int(memory * (1 << 30)))


def _client(registry: str, given: dict[str, Any]) -> "Client":
    from enginery.client.client import Client, Policy, ServingNode

    policy = Policy(**{name: given[name] for name in ("precision", "proven_only", "fallback", "trust", "kind")})
    stated = {name: given[name] for name in ("node", "region", "labels") if given[name]}
    node = ServingNode.from_environment({f"ENGINERY_{name.upper()}": text for name, text in stated.items()})
    return Client(registry, policy=policy, rehash=given.get("rehash", False), say=say, node=node)


def _watch(client: "Client", references: tuple[str, ...], dest: Path, given: dict[str, Any], as_json: bool) -> None:
    """Follow the channels until SIGTERM or Ctrl-C; the engines that are served stay."""
    from enginery.client.client import Plain
    from enginery.client.hooks import Command, Post
    from enginery.client.looking import INTERVAL_S
    from enginery.client.notifications import NotificationListener

    if given["layout"] == "kserve":
        raise click.UsageError("--layout kserve writes objects once; a cluster follows no channel by them")
    one, in_triton = len(references) == 1 and given["feed"] is None, given["layout"] == "triton"
    if in_triton and not one:
        raise click.UsageError("--layout triton follows one channel for each folder; watch each into its own")
    line, url, timeout_s = given["hook"], given["hook_url"], given["hook_timeout"]
    if line and url:
        raise click.UsageError("give --hook or --hook-url, not both")
    if not references and given["feed"] is None:
        raise click.UsageError("give a channel to follow, as in digits:stable, or --feed NAME")
    options: dict[str, Any] = {
        "machine": _machines(given) if in_triton else _one_machine(given),
        "hook": Command(line, timeout_s) if line else Post(url, timeout_s) if url else None,
        **{name: given[name] for name in ("once", "keep")},
        "say": say,
        **_reporting(given),
    }
    try:
        with NotificationListener(given["listen"]) if given["listen"] else nullcontext() as wake:
            if one:
                interval_s = given["interval"] or INTERVAL_S
                layout = triton_of(given) if in_triton else Plain()
                swap = client.watch(references[0], dest, layout=layout, interval_s=interval_s, wake=wake, **options)
                swaps: tuple[Swap, ...] = () if swap is None else (swap,)
            else:
                interval_s = given["interval"]
                swaps = client.watch_group(
                    references, dest, feed=given["feed"], interval_s=interval_s, wake=wake, **options
                )
    except KeyboardInterrupt:
        say("stopped")
        return
    if as_json and (swaps or not one):
        found = [{**swap.facts(), "swapped": swap.swapped, "origin": swap.origin} for swap in swaps]
        emit_json(found[0] if one else found)


def _reporting(given: dict[str, Any]) -> dict[str, Any]:
    """How a watcher reports to rollouts."""
    from enginery.client.client import HealthCommand, HealthUrl, ReportUrl

    line, health, url = given["health_command"], given["health_url"], given["report_url"]
    if (line and health) or (url and given["no_report"]):
        raise click.UsageError("give --health-command or --health-url, and --report-url or --no-report, not both")
    report = ReportUrl(url) if url else not given["no_report"]
    return {"health": HealthCommand(line) if line else HealthUrl(health) if health else None, "report": report}


def _only_with_watch(context: click.Context) -> None:
    for name in (
        "once",
        "feed",
        "listen",
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
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --watch")


def _show(answer: "EngineRanking", as_json: bool) -> None:
    if as_json:
        emit_json(answer.to_json())
        return
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


@contextmanager
def download_bar(quiet: bool = False) -> Iterator["Progress"]:
    """A bar that is gone when it is done; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(*_columns(console.width), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda there, whole: bar.update(task, completed=there, total=whole)


def _columns(width: int) -> "list[ProgressColumn]":
    """The columns of the bar that fit into one line of `width` characters; the least needed are left out first."""
    from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TaskProgressColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    def whole() -> Column:
        return Column(no_wrap=True)

    class Speed(ProgressColumn):
        """MiB per second, the unit of the sizes beside it."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed / (1 << 20):.1f} MiB/s", style="progress.data.speed")

    size = DownloadColumn(binary_units=True, table_column=whole())
    left = TimeRemainingColumn(table_column=whole())
    bar = min(_WIDEST_BAR, width - _BYTES - _SPEED - _LEFT - 1)
    if bar >= _SHORTEST_BAR:
        return [BarColumn(bar), size, Speed(whole()), left]
    return [size, left] if width >= _BYTES + _LEFT else [TaskProgressColumn(table_column=whole())]
