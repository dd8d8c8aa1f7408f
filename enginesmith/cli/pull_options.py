"""Options of `pull`, and what they ask for: machines, a policy, a node."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from enginesmith.cli.options import (
    TARGET,
    check_finite,
    engine_options,
    precision_option,
    runtime_options,
    say,
    stated_runtimes,
    trust_option,
)

if TYPE_CHECKING:
    from enginesmith.client.client import Client, Machine
    from enginesmith.client.layouts.ranking import AllGenerations

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
    from enginesmith.client.client import ALL_GENERATIONS

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
    from enginesmith.client.client import Client, Policy, ServingNode

    policy = Policy(**{name: given[name] for name in ("precision", "proven_only", "fallback", "trust", "kind")})
    stated = {name: given[name] for name in ("node", "region", "labels") if given[name]}
    node = ServingNode.from_environment({f"ENGINESMITH_{name.upper()}": text for name, text in stated.items()})
    return Client(registry, policy=policy, rehash=given.get("rehash", False), say=say, node=node)
