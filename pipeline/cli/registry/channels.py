"""Commands about channels and the registry's metrics."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from enginesmith.cli.options import (
    COUNT,
    Group,
    Option,
    channel_argument,
    command,
    emit,
    emit_json,
    listen_option,
    number_option,
    path_option,
    say,
    takes,
    why_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.errors import HttpAddress, UnavailableError
from enginesmith.core.names import check_channel, parse_channel, parse_reference
from enginesmith.core.parsing import user
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import write_whole
from enginesmith.registry.trust.policy import public_key
from enginesmith.registry.versions import policies
from enginesmith.registry.versions.index import history as moves_of
from enginesmith.registry.versions.policies import ChannelPolicy
from pipeline.cli.serving.rollout import GivenPlan, describe_plan


@command()
@click.argument("where", metavar="NAME[:CHANNEL]")
@click.option("--limit", type=COUNT, show_default="all", help="Maximum number of moves of each channel, newest first.")
def history(where: str, limit: int | None, registry: str, as_json: bool) -> None:
    """Show who moved a channel, when, why, and with which canary.

    NAME:CHANNEL: a model and its channel; NAME alone: all channels of the model.
    """
    rows = moves_of(open_store(registry), parse_reference(where), limit)
    if as_json:
        emit_json([row.to_json() for row in rows])
        return
    cells = []
    for row in rows:
        move, canaries = row.move, ", ".join(digest[:12] for digest in row.move.canary)
        accepted_losses = [*move.losses, *["a proof on real inputs"] * move.random_inputs]
        report, losses = (row.report or "")[:12], ", ".join(accepted_losses)
        cells.append([move.at, row.channel, move.action, move.version, move.by, move.why, losses, report, canaries])
    print_table(("at", "channel", "action", "version", "by", "why", "losses", "report", "canary"), cells)


@click.group(cls=Group)
def policy() -> None:
    """Show and set what a channel requires of a version.

    '*:CHANNEL' means CHANNEL of every model that has no policy for it.
    """


@policy.command("show")
@channel_argument
def show_policy(where: str, registry: str, as_json: bool) -> None:
    """Show the policy that applies to a channel, and where it was set."""
    model, channel = _where(where)
    store = open_store(registry)
    own_policy = policies.read(store, model, channel) if model else None
    effective_policy = own_policy or policies.read(store, None, channel)
    origin = None if effective_policy is None else f"{model}:{channel}" if own_policy else f"*:{channel}"
    if as_json:
        built_in_rules = policies.describe_built_in(channel)
        emit_json(
            {"policy": encode(effective_policy) if effective_policy else None, "of": origin, "built_in": built_in_rules}
        )
        return
    rule_text = (
        _words(effective_policy) + f" (set for {origin} by {effective_policy.by}, {effective_policy.at})"
        if effective_policy
        else "no policy is set"
    )
    echo(f"{where}: {rule_text}")
    echo(f"built-in rules for every channel of this name: {policies.describe_built_in(channel)}")


@dataclass(frozen=True, kw_only=True)
class _PolicyOptions:
    proven: Annotated[
        str,
        Option(
            "Targets for which a version needs a proven engine, e.g. l4,sm_90,cpu.", metavar="TARGETS", shown="none"
        ),
    ] = ""
    canary: Annotated[bool, Option("Require a canary's PASS.", name="--canary/--no-canary")] = False
    canary_on: Annotated[
        str,
        Option(
            "GPU generations and kinds of CPU on each of which a canary must pass, e.g. sm_89,sm_90,cpu.",
            metavar="TARGETS",
            shown="none; for automatic moves: the targets that the channel serves",
        ),
    ] = ""
    signed_by: Annotated[
        tuple[Path, ...],
        Option(
            "Public key that must have signed the version; if you repeat it, one of the keys is enough.",
            metavar="KEY.pub",
        ),
    ] = ()
    plan: GivenPlan


@policy.command("set")
@channel_argument
@takes(_PolicyOptions)
@why_option
def set_policy(where: str, options: _PolicyOptions, why: str, registry: str, as_json: bool) -> None:
    """Replace the policy of a channel.

    Without options, only the built-in rules apply (`enginesmith registry policy show`).

    Creates the registry if there is none, so that you can set policies before you publish the first version.
    """
    model, channel = _where(where)
    keys = tuple(public_key(path).public_key.decode() for path in options.signed_by)
    proven_names, canary_names = (tuple(text.replace(",", " ").split()) for text in (options.proven, options.canary_on))
    new_policy = policies.normalize(
        ChannelPolicy(proven_names, options.canary, canary_names, keys, rollout=options.plan.read()),
        f"the policy of {where}",
    )
    try:
        store = open_store(registry)
    except UnavailableError:  # absent, or out of reach: then the next line says so
        store = open_store(registry, create=True)
        say(f"created the registry {store.uri}")
    stored_policy = policies.write(store, model, channel, new_policy, by=user(), why=why)
    emit(as_json, encode(stored_policy), echo, f"{where}: {_words(stored_policy)}")


def _where(text: str) -> tuple[str | None, str]:
    """The model and the channel of 'NAME:CHANNEL'; the model of '*:CHANNEL' is None."""
    return (None, check_channel(text[2:])) if text.startswith("*:") else parse_channel(text)


def _words(terms: ChannelPolicy) -> str:
    rules: list[str] = [f"proven engines for {', '.join(terms.proven)}"] if terms.proven else []
    rules += ["a canary's PASS"] if terms.canary else []
    rules += [f"a canary's PASS on each of {', '.join(terms.canary_on)}"] if terms.canary_on else []
    rules += (
        ["a signature by " + ("its key" if len(terms.signed_by) == 1 else f"one of {len(terms.signed_by)} keys")]
        if terms.signed_by
        else []
    )
    text = "requires " + " and ".join(rules) if rules else "requires nothing more than the built-in rules"
    return f"{text}; rollout waves: {describe_plan(terms.rollout)}" if terms.rollout else text


@command()
@listen_option("127.0.0.1:9464")
@number_option("--every", click.FloatRange(1), 60.0, "Seconds between polls of the registry.")
@click.option("--once", is_flag=True, help="Print the metrics on stdout and exit.")
@path_option("--textfile", "Write the metrics to this file (for node_exporter) and exit.", dir_okay=False)
def metrics(listen: HttpAddress, every: float, once: bool, textfile: Path | None, registry: str) -> None:
    """Serve metrics of a registry to Prometheus: builds, runs, cache, unproven engines, drift.

    The metrics are read from the registry, so one exporter covers the runs of all machines. In a cluster, the command
    also writes the version of each channel to the ConfigMap that ENGINESMITH_CHANNELS_CONFIGMAP names (NAMESPACE/NAME).
    """
    from pipeline.orchestration.metrics.channel_status import writer_of_environment
    from pipeline.orchestration.metrics.live import Exporter, serve_metrics

    store = open_store(registry)
    exporter = Exporter(store, say, writer_of_environment(store, say))
    if once or textfile is not None:
        from prometheus_client import generate_latest

        is_whole = exporter.refresh_all()
        text = generate_latest(exporter.registry())
        if textfile is None:
            echo(text.decode(), nl=False)
        else:
            write_whole(textfile, text)
        raise SystemExit(0 if is_whole else 3)
    exporter.refresh()
    try:
        with serve_metrics(exporter.registry(), listen) as server:
            say(f"metrics of {registry}: {server.url}/metrics; Ctrl-C ends it")
            exporter.run(every, server.ended)
            server.wait()
    except KeyboardInterrupt:
        say("stopped")
