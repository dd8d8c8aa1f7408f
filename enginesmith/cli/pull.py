"""`enginesmith pull`: pulls the engine that fits a serving node, with the reason, or follows a channel."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from enginesmith.cli.layouts import FOR_KSERVE, FOR_TRITON, LayoutOptions, show_placed, write_objects
from enginesmith.cli.options import (
    COUNT,
    FOLDER,
    POSITIVE,
    TARGET,
    Option,
    command,
    emit,
    emit_json,
    optional_references_argument,
    precision_option,
    runtimes_option,
    say,
    takes,
)
from enginesmith.cli.tables import download_bar, echo, print_table
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import parse_reference
from enginesmith.registry.rollouts.rollout_state import ServingNode

if TYPE_CHECKING:
    from enginesmith.client.client import Client
    from enginesmith.client.layouts.base import AllGenerations
    from enginesmith.client.pull import Pulled
    from enginesmith.client.resolve import EngineRanking
    from enginesmith.client.watching.watch import Swap

# The value of --target for every compute capability that a version has engines for.
_ALL = "all"
# The value of --report that disables reports.
_NO_REPORT = "none"


@dataclass(frozen=True)
class MachineOptions:
    """The machines that the engine is for, and their stated properties."""

    targets: Annotated[
        tuple[str, ...],
        Option(
            f"{TARGET}; auto: this machine. With --layout triton, repeat it, or give all: every compute capability "
            "for which the version has an engine.",
            name="--target",
            metavar="TARGET",
        ),
    ] = ("auto",)
    precision: Annotated[str | None, precision_option("the precision that fits best")] = None
    driver: Annotated[
        str | None, Option("GPU driver version on the target machine, e.g. 580.65.06.", metavar="VERSION")
    ] = None
    cuda: Annotated[
        str | None, Option("Newest CUDA version that the target's driver supports, e.g. 13.0.", metavar="VERSION")
    ] = None
    runtimes: Annotated[Mapping[str, str], runtimes_option("on the target machine")] = field(default_factory=dict)
    memory: Annotated[float | None, Option("GPU memory of the target machine, in GiB.", type=POSITIVE)] = None

    def machines(self) -> "list[Machine] | AllGenerations":
        """The targets of a Triton repository. Raises click's usage error for 'all' together with others."""
        from enginesmith.client.layouts.base import ALL_GENERATIONS

        if _ALL not in self.targets:
            return [self.machine_of(target) for target in self.targets]
        if len(self.targets) > 1:
            raise click.UsageError("--target all includes every target; leave out the others")
        return ALL_GENERATIONS

    def one_machine(self) -> "Machine":
        """The single target, for a layout with one engine. Raises click's usage error for several."""
        if len(self.targets) > 1 or _ALL in self.targets:
            raise click.UsageError(
                "this layout holds the engine of one target; give --layout triton, or name one target"
            )
        return self.machine_of(self.targets[0])

    def machine_of(self, target: str) -> "Machine":
        """The machine with a target's name and the stated properties."""
        return Machine.from_name(target).with_facts(
            driver=self.driver,
            cuda=self.cuda,
            runtimes=self.runtimes,
            memory_bytes=None if self.memory is None else int(self.memory * (1 << 30)),
        )


@dataclass(frozen=True)
class FollowOptions:
    """The options to follow a channel, and to report the served engine."""

    follow: Annotated[
        bool, Option("Keep running: pull each new version of the channel REF; DEST/current links to its engine.")
    ] = False
    once: Annotated[bool, Option("With --follow: poll once and exit.")] = False
    interval: Annotated[
        float | None,
        Option("With --follow: seconds between polls.", type=click.FloatRange(0.05), shown="120, for each channel"),
    ] = None
    keep: Annotated[int, Option("With --follow: number of earlier engines to keep in DEST.", type=COUNT)] = 2
    hook: Annotated[
        str | None,
        Option(
            "With --follow: command to run, or URL to POST to, after each new engine; a command gets ENGINESMITH_... "
            "variables.",
            metavar="COMMAND|URL",
        ),
    ] = None
    hook_timeout: Annotated[
        float, Option("With --follow: time limit of --hook, in seconds.", type=click.FloatRange(0.05))
    ] = 30.0
    health: Annotated[
        str | None,
        Option(
            "With --follow: health check of the server: a command (0: healthy), or a URL (2xx: healthy).",
            metavar="COMMAND|URL",
        ),
    ] = None
    report: Annotated[
        str | None,
        Option(
            "With --follow: URL that receives this node's reports; none: send no reports.",
            metavar="URL|none",
            shown="the registry",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Settings of the client's watchers. Raises click's usage error for options that exclude each other."""
        from enginesmith.client.watching.server import Command, HealthCommand, HealthUrl, Post, ReportUrl

        line, timeout_s = self.hook, self.hook_timeout
        hook = None if line is None else Post(line, timeout_s) if _is_url(line) else Command(line, timeout_s)
        if self.report is None:
            receiver: ReportUrl | bool = True
        elif self.report == _NO_REPORT:
            receiver = False
            if self.health:
                raise click.UsageError("--health sends its results as reports; leave out --report none")
        else:
            receiver = ReportUrl(self.report)
        health = None if self.health is None else (HealthUrl if _is_url(self.health) else HealthCommand)(self.health)
        return {"hook": hook, "health": health, "report": receiver, "once": self.once, "keep": self.keep, "say": say}


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """All options of `pull`."""

    dest: Annotated[Path, Option("Folder for the engine.", shown="the current folder", type=FOLDER)] = Path()
    machine: MachineOptions
    proven_only: Annotated[bool, Option("Only proven engines.")] = False
    allow_unsigned: Annotated[bool, Option("Also pull unsigned attachments that contain code.")] = False
    fallback: Annotated[Literal["onnx"] | None, Option("Pull the ONNX model if no engine fits.")] = None
    layout: LayoutOptions
    rehash: Annotated[bool, Option("Hash every local file again, even if its size and time are unchanged.")] = False
    explain: Annotated[
        bool,
        Option(
            "Download nothing: list the engines that fit the target and --layout, best first, and why the others do "
            "not. Exit code 2 if none fits."
        ),
    ] = False
    node: Annotated[
        str | None,
        Option("Name of this node, for rollouts.", envvar="ENGINESMITH_NODE", show_envvar=True, shown="the host name"),
    ] = None
    region: Annotated[
        str, Option("Region of this node, for rollouts.", envvar="ENGINESMITH_REGION", show_envvar=True)
    ] = ""
    labels: Annotated[
        str,
        Option(
            "Labels of this node, for rollouts.", envvar="ENGINESMITH_LABELS", show_envvar=True, metavar="LABEL,..."
        ),
    ] = ""
    following: FollowOptions

    def uri_options(self) -> dict[str, str]:
        """Options of `pull` for a cluster's nodes, if given: driver, cuda, memory, fallback and proven-only."""
        node_options = {"driver": self.machine.driver, "cuda": self.machine.cuda, "fallback": self.fallback}
        node_options["memory"] = f"{self.machine.memory:g}" if self.machine.memory else None
        options = {name: value for name, value in node_options.items() if value}
        return {**options, "proven-only": ""} if self.proven_only else options

    def client(self, registry: str, trust: Path | None) -> "Client":
        """The client of a registry with these options."""
        from enginesmith.client.client import Client

        policy = Policy(
            precision=self.machine.precision,
            proven_only=self.proven_only,
            fallback=self.fallback,
            trust=trust,
            allow_unsigned=self.allow_unsigned,
        )
        variables = {"NODE": self.node, "REGION": self.region, "LABELS": self.labels}
        node = ServingNode.from_environment({f"ENGINESMITH_{name}": text for name, text in variables.items() if text})
        return Client(registry, policy=policy, rehash=self.rehash, say=say, node=node)


def follow(client: "Client", references: tuple[str, ...], options: PullOptions, as_json: bool) -> None:
    """Follow the channels until SIGTERM or Ctrl-C; the served engines stay. Raises click's usage error for a layout
    that cannot follow them, and without references."""
    from enginesmith.client.layouts.base import Plain
    from enginesmith.client.watching.server import INTERVAL_S

    layout, follow_options = options.layout.layout, options.following
    if layout == "kserve":
        raise click.UsageError("--layout kserve writes objects once and follows no channel; leave out --follow")
    if layout == "ortpackage":
        raise click.UsageError("--layout ortpackage writes the package of a version once; leave out --follow")
    is_single, is_triton = len(references) == 1, layout == "triton"
    if is_triton and not is_single:
        raise click.UsageError("--layout triton follows one channel; run pull for each channel, with its own --dest")
    if not references:
        raise click.UsageError("give a channel to follow, as in digits:stable")
    machine = options.machine.machines() if is_triton else options.machine.one_machine()
    settings: dict[str, Any] = {"target": machine, **follow_options.settings()}
    try:
        if is_single:
            interval_s = follow_options.interval or INTERVAL_S
            client_layout = options.layout.of_several() if is_triton else Plain()
            swap = client.watch(references[0], options.dest, layout=client_layout, interval_s=interval_s, **settings)
            swaps: tuple[Swap, ...] = () if swap is None else (swap,)
        else:
            swaps = client.watch_group(references, options.dest, interval_s=follow_options.interval, **settings)
    except KeyboardInterrupt:
        say("stopped")
        return
    if as_json and (swaps or not is_single):
        swap_rows = [{**swap.facts(), "swapped": swap.swapped, "origin": swap.origin} for swap in swaps]
        emit_json(swap_rows[0] if is_single else swap_rows)


def check_options(layout: str, *, follows: bool) -> None:
    """Raise click's usage error for options of another layout, and for options that require --follow."""
    context = click.get_current_context()
    for names, is_right, choice in (
        (FOR_TRITON, layout == "triton", "--layout triton"),
        (FOR_KSERVE, layout == "kserve", "--layout kserve"),
        ([option.name for option in fields(FollowOptions)], follows, "--follow"),
    ):
        for name in names:
            if not is_right and context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-')} needs {choice}")


@command()
@optional_references_argument
@takes(PullOptions)
def pull(
    references: tuple[str, ...], options: PullOptions, registry: str, trust: Path | None, quiet: bool, as_json: bool
) -> None:
    """Download and verify the engine of REF that fits the target best, and print the reason for the choice.

    With --follow, you may name several channels: the engine of each is then in DEST/MODEL/CHANNEL.
    """
    layout, dest = options.layout.layout, options.dest
    check_options(layout, follows=options.following.follow or options.explain)
    client = options.client(registry, trust)
    if options.following.follow:
        if options.explain:
            raise click.UsageError("--explain explains one REF once; leave out --follow")
        follow(client, references, options, as_json)
        return
    if len(references) != 1:
        raise click.UsageError("give one REF; only --follow takes several")
    reference = references[0]
    if layout == "kserve" and "auto" in options.machine.targets:
        raise click.UsageError("--layout kserve needs the --target of the cluster's nodes; 'auto' is this machine")
    if options.explain:
        _explain(_rank_targets(client, reference, options), as_json)
        return
    if layout == "kserve":
        (target,), machine = options.machine.targets, options.machine.one_machine()
        write_objects(client, reference, dest, target, machine, options.layout, options.uri_options(), as_json)
        return
    if layout != "plain":
        machines, client_layout = options.machine.machines(), options.layout.of_several()
        with download_bar(quiet) as progress:
            placement = client.place(reference, dest, client_layout, target=machines, progress=progress)
        show_placed(placement, "config.pbtxt" if layout == "triton" else "manifest.json", as_json)
        return
    with download_bar(quiet) as progress:
        engine = client.pull(reference, dest, target=options.machine.one_machine(), progress=progress)
    for line in (*engine.warnings, *(f"note: {remark}" for remark in engine.resolution.remarks)):
        say(line)
    emit(as_json, _pulled_json(engine), _print_pulled, engine)


def _rank_targets(client: "Client", reference: str, options: PullOptions) -> "list[EngineRanking]":
    """The ranking, for each target, of the engines that the layout's server opens. Raises as `Client.resolve`, and
    UnknownNameError for all generations if no engine is for a GPU."""
    if options.layout.layout == "plain":
        return [client.resolve(reference, options.machine.machine_of(name)) for name in options.machine.targets]
    from enginesmith.client.layouts.base import rank_each
    from enginesmith.client.locate import VersionLocator

    locator, machines = VersionLocator(client.store, checked=True, node=client.node), options.machine.machines()
    located_version = locator.locate(parse_reference(reference))
    return rank_each(client.store, located_version, machines, client.policy, options.layout.of_several())[1]


def _explain(answers: "list[EngineRanking]", as_json: bool) -> None:
    """Print the engines that fit each machine (with `as_json` as one document), and exit."""
    if as_json:
        rankings = [answer.to_json() for answer in answers]
        emit_json(rankings if len(rankings) > 1 else rankings[0])
    else:
        for answer in answers:
            rows = [
                [str(rank), engine.entry.unit, engine.entry.status, "; ".join((engine.fit, *engine.remarks))]
                for rank, engine in enumerate(answer.candidates, 1)
            ]
            rows += [["-", unit, "rejected", reason] for unit, reason in answer.rejected]
            machine_text = ", ".join(f"{name} {value}" for name, value in answer.machine.list_facts().items())
            echo(f"{answer.what} on {answer.machine.target.name}" + (f" ({machine_text})" if machine_text else ""))
            print_table(("rank", "engine", "status", "why"), rows)
    click.get_current_context().exit(0 if all(answer.candidates for answer in answers) else UnknownNameError.exit_code)


def _print_pulled(pulled: "Pulled") -> None:
    origin_text = {"there": " (was there already)", "cache": " (from this machine's cache)", "registry": ""}[
        pulled.origin
    ]
    echo(f"{pulled.path}{origin_text}")
    echo(f"chosen: {pulled.engine.unit} of {pulled.located.manifest.reference}")
    echo(f"why:    {pulled.resolution.why}")
    if pulled.located.signed_by:
        echo(f"signed: by {', '.join(pulled.located.signed_by)}")
    for unit, reason in pulled.resolution.rejected:
        echo(f"not:    {unit}: {reason}")
    for attachment in pulled.attachments:
        echo(f"with:   {attachment.path}: {attachment.attachment.kind}")
    for name, reason in pulled.left_out:
        echo(f"not:    attachment {name}: {reason}")


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
        "attachments": [
            {
                "path": str(attachment.path),
                "description": str(attachment.description),
                "kind": attachment.attachment.kind,
                "digest": attachment.attachment.digest,
                "signed_by": list(attachment.signed_by),
            }
            for attachment in pulled.attachments
        ],
        "left_out": [{"name": name, "reason": reason} for name, reason in pulled.left_out],
    }
