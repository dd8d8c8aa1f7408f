"""`enginesmith rollout`."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from enginesmith.cli.options import (
    COUNT,
    Group,
    Option,
    accept_loss_option,
    channel_argument,
    duration,
    emit_json,
    listen_option,
    number_option,
    random_inputs_option,
    reference_argument,
    say,
    takes,
    why_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.errors import HttpAddress, InputError, UnknownNameError
from enginesmith.core.names import STABLE, channel_of, parse_channel, parse_reference
from enginesmith.core.parsing import user
from enginesmith.core.text import format_age, pluralize
from enginesmith.registry.rollouts.reports import reporting_channels
from enginesmith.registry.rollouts.rollout_state import (
    WHOLE,
    Gates,
    Rollout,
    RolloutPlan,
    check_waves,
    parse_share,
    parse_time,
    parse_wave,
)
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.channel_writes import read_rollout, running_rollouts
from enginesmith.registry.versions.lookup import locate

if TYPE_CHECKING:
    from pipeline.rollout.operations import Operator, RolloutStatus, ServingStatus


def durations(value: object) -> tuple[timedelta, ...]:
    """'10m', '10m,1h'. Raises click's usage error for another text."""
    return value if isinstance(value, tuple) else tuple(duration(text.strip()) for text in str(value).split(","))


_GATES = (
    "health=95% (of the nodes that report, at least 95% are healthy), errors=1% (at most 1% of requests fail), canary "
    "(a canary's PASS), reports=20 (at least 20 nodes report)"
)


@dataclass(frozen=True)
class GivenPlan:
    """How a version comes to a channel, as options give it."""

    waves: Annotated[
        tuple[str, ...],
        Option(
            "Nodes of the next wave: 5%, region=NAME, label=NAME or label=NAME:5%; the last wave is 100%. Repeat it, "
            "or separate several with commas.",
            name="--wave",
            metavar="WAVE,...",
        ),
    ] = ()
    soak: Annotated[
        tuple[tuple[timedelta, ...], ...],
        Option(
            "Minimum duration of a wave: one value for all waves, or one for each.",
            type=durations,
            metavar="DURATION,...",
            shown="10m",
        ),
    ] = ()
    gates: Annotated[
        tuple[str, ...],
        Option(f"Condition for opening the next wave: {_GATES}; repeatable.", name="--gate", metavar="GATE"),
    ] = ()
    approve: Annotated[bool, Option("Wait at the end of each wave for `enginesmith rollout resume`.")] = False
    max_unavailable: Annotated[
        str | None,
        Option(
            "Maximum share of nodes that swap within one poll interval, e.g. 1%; with --nodes also a number of nodes.",
            metavar="N|SHARE",
            shown="all",
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            "Minimum number of nodes in the fleet; a wave of 5% then never gets more than 5% of them.",
            type=COUNT,
            shown="from the last rollout's reports",
        ),
    ] = None
    poll_interval: Annotated[
        timedelta, Option("Time between two polls of a node (`pull --interval`).", type=duration, shown="2m")
    ] = timedelta(minutes=2)

    def read(self) -> RolloutPlan | None:
        """The plan; None without waves. Raises InputError for an invalid plan, and for options without waves."""
        if not self.waves:
            if self.soak or self.gates or self.approve or self.max_unavailable or self.nodes:
                raise InputError("--soak, --gate, --approve, --max-unavailable and --nodes need waves; give --wave too")
            return None
        waves = tuple(parse_wave(text) for group in self.waves for text in group.replace(",", " ").split())
        check_waves(waves)
        soaks = [int(soak.total_seconds()) for group in self.soak for soak in group] or [600]
        if len(soaks) not in (1, len(waves)):
            raise InputError(f"--soak has {len(soaks)} durations for {len(waves)} waves: give one, or one for each")
        soaks_s = tuple(soaks if len(soaks) > 1 else soaks * len(waves))
        poll_s = max(1, int(self.poll_interval.total_seconds()))
        if self.nodes:
            from pipeline.rollout.operations import limit_waves

            limit_waves(waves, self.nodes)
        return RolloutPlan(waves, soaks_s, read_gates(self.gates, self.approve), poll_s, self._step(), self.nodes)

    def _step(self) -> int | None:
        """Parts per million of the nodes that may swap within one poll interval; None: all."""
        text = self.max_unavailable
        if text is None:
            return None
        if text.endswith("%"):
            return parse_share(text, "--max-unavailable")
        if not text.isdecimal() or not int(text) or self.nodes is None:
            raise InputError(f"--max-unavailable {text}: give a share (1%), or a number of nodes with --nodes")
        return max(1, min(WHOLE, int(text) * WHOLE // self.nodes))


def read_gates(texts: tuple[str, ...], approve: bool) -> Gates:
    """The gates of 'health=95%', 'errors=1%', 'canary', 'reports=20'. Raises InputError."""
    gate_settings: dict[str, Any] = {"approve": approve}
    for text in texts:
        name, _, value = text.partition("=")
        match name:
            case "health" | "errors" if value:
                gate_settings[f"{name}_ppm"] = parse_share(value, f"gate {name}")
            case "canary" if not value:
                gate_settings["canary"] = True
            case "reports" if value.isdecimal() and 0 < int(value) < 10**6:
                gate_settings["least_reports"] = int(value)
            case _:
                raise InputError(f"gate {text!r} is not valid; give one such as {_GATES}")
    if "least_reports" in gate_settings and "health_ppm" not in gate_settings:
        raise InputError("gate reports=N sets how many nodes must report for gate health; give health=SHARE too")
    return Gates(**gate_settings)


def describe_plan(plan: RolloutPlan) -> str:
    """A plan in a line: '1%, 5%, 100% with 10m each; gates: health 95%'."""
    from pipeline.rollout.operations import describe_gates

    soaks = [format_duration(seconds) for seconds in plan.soaks_s]
    soak_text = f"{soaks[0]} each" if len(set(soaks)) == 1 else ", ".join(soaks)
    pace = f"; at most {plan.step_ppm / 10_000:g}% of the nodes per poll interval" if plan.step_ppm else ""
    scope = f"; waves are limits of {plan.nodes} nodes" if plan.nodes else ""
    gate_text = ", ".join(describe_gates(plan.gates)) or "none"
    return f"{', '.join(map(str, plan.waves))} with {soak_text}; gates: {gate_text}{pace}{scope}"


def format_duration(seconds: int) -> str:
    """'10m', '2h', '45s': seconds in the largest whole unit."""
    size, unit = next(
        ((size, unit) for size, unit in ((3600, "h"), (60, "m")) if seconds % size == 0 < seconds), (1, "s")
    )
    return f"{seconds // size}{unit}"


# Nodes that `status --nodes` prints.
_MOST_ROWS = 50
_WHO_REPORTS = "nodes that cannot write to the registry report only with `pull --report URL`"


@click.group(cls=Group)
def rollout() -> None:
    """Roll out a version in waves; halt and roll back automatically if a gate fails."""


@dataclass(frozen=True, kw_only=True)
class _StartOptions:
    plan: GivenPlan
    proven_only: Annotated[bool, Option("Serve only the proven engines of REF.")] = False


@rollout.command("start")
@reference_argument
@click.argument("where", metavar="[[NAME:]CHANNEL]", required=False)
@takes(_StartOptions)
@random_inputs_option
@accept_loss_option
@why_option
def start_rollout(
    reference: str,
    where: str | None,
    options: _StartOptions,
    random_inputs: bool,
    accept_loss: bool,
    why: str,
    registry: str,
    trust: Path | None,
    as_json: bool,
) -> None:
    """Start a rollout of the version REF to a channel, and open its first wave.

    Without --wave, the channel's policy sets the waves. The channel serves its old version until the last wave ends;
    then REF is promoted. `enginesmith rollout watch`, or a Prefect flow, opens and ends the waves.

    NAME:CHANNEL: a channel of the same model; CHANNEL alone is enough (default: stable).
    """
    from enginesmith.registry.trust import require
    from pipeline.rollout import operations

    version_reference = parse_reference(reference)
    channel = channel_of(version_reference.model, where) if where else STABLE
    store = open_store(registry)
    manifest = locate(store, version_reference).manifest
    require(store, manifest, trust)
    plan = operations.plan_of(store, version_reference.model, channel, options.plan.read())
    new_rollout = operations.start(
        store,
        manifest,
        channel,
        plan,
        _operator(store, why),
        proven_only=options.proven_only,
        random_inputs=random_inputs,
        accept_losses=accept_loss,
    )
    _print(new_rollout, as_json)
    if not as_json:
        echo(describe_plan(plan))
        echo(_describe_limits(new_rollout))


@rollout.command("status")
@click.argument("where", metavar="[NAME:CHANNEL]", required=False)
@click.option("--nodes", is_flag=True, help="Show which version and engine each node serves instead.")
def show_status(where: str | None, nodes: bool, registry: str, as_json: bool) -> None:
    """Show a channel's rollout: its waves, node reports, gates and decisions. Or show what nodes serve.

    NAME:CHANNEL: a model and its channel (default: all rollouts that are not finished; with --nodes, all channels that
    nodes report).
    """
    from pipeline.rollout.operations import read_serving, read_status

    store = open_store(registry)
    now, list_channels = store.now(), reporting_channels if nodes else running_rollouts
    channel_keys = [parse_channel(where, STABLE)] if where else list_channels(store)
    channels = [channel for channel_key in channel_keys if (channel := read_channel(store, *channel_key))]
    if nodes:
        _show_nodes([read_serving(store, channel, now) for channel in channels], where, as_json)
        return
    rollout_channels = channels if where else [channel for channel in channels if channel.active_rollout]
    statuses = [status for channel in rollout_channels if (status := read_status(store, channel, now))]
    if where and not statuses:
        raise UnknownNameError(
            f"{where} has no rollout (--nodes shows what nodes serve); `enginesmith rollout start` starts one"
        )
    if as_json:
        emit_json([status.to_json() for status in statuses])
        return
    for status in statuses:
        _print_status(status)
    if not statuses:
        echo("no rollout is running")


@rollout.command("pause")
@channel_argument
@why_option
def pause_rollout(where: str, why: str, registry: str, as_json: bool) -> None:
    """Pause a rollout: no further wave opens, and failing gates still halt it."""
    from pipeline.rollout.operations import pause

    store = open_store(registry)
    _print(pause(store, *parse_channel(where, STABLE), _operator(store, why)), as_json)


@rollout.command("resume")
@channel_argument
@click.option(
    "--without-data", is_flag=True, help="Approve the open wave even if gates lack data; failing gates still halt it."
)
@why_option
def resume_rollout(where: str, without_data: bool, why: str, registry: str, as_json: bool) -> None:
    """Continue a paused rollout, or approve the open wave of a rollout that was started with --approve."""
    from pipeline.rollout.operations import resume

    store = open_store(registry)
    new_rollout = resume(store, *parse_channel(where, STABLE), _operator(store, why), without_data=without_data)
    _print(new_rollout, as_json)


@rollout.command("abort")
@channel_argument
@why_option
def abort_rollout(where: str, why: str, registry: str, as_json: bool) -> None:
    """End a rollout; all nodes return to the channel's version."""
    from pipeline.rollout.operations import abort

    store = open_store(registry)
    _print(abort(store, *parse_channel(where, STABLE), _operator(store, why)), as_json)


@rollout.command("watch")
@click.argument("where", metavar="[NAME:CHANNEL]", required=False)
@click.option("--once", is_flag=True, help="Poll once and exit.")
@number_option("--interval", click.FloatRange(0.05), 15.0, "Seconds between polls.")
def watch_rollout(where: str | None, once: bool, interval: float, registry: str, as_json: bool) -> None:
    """Open and end the waves of a rollout when they are due. Stops when the rollout ends.

    Several watchers may run at once, and you can kill them at any time. Exit code 1 if the rollout was halted or
    aborted.

    NAME:CHANNEL: a model and its channel (default: every rollout, also future ones; then the command does not stop).
    """
    from pipeline.rollout.advance import RolloutFollower

    store = open_store(registry)
    channels = [parse_channel(where, STABLE)] if where else None
    if channels and read_rollout(store, *channels[0]) is None:
        raise UnknownNameError(f"{where} has no rollout; `enginesmith rollout start` starts one")
    follower = RolloutFollower(store, channels, say)
    if once:
        follower.look()
    else:
        follower.run(interval, forever=channels is None)
    last_statuses = follower.last
    if as_json:
        names, documents = ("model", "channel", "version", "state"), []
        for status in last_statuses.values():
            fields = {name: getattr(status.rollout, name) for name in names}
            documents.append({**fields, "wave": status.rollout.wave + 1, "action": status.action, "why": status.why})
        emit_json(documents)
    if follower.failures or any(status.rollout.state in ("halted", "aborted") for status in last_statuses.values()):
        raise SystemExit(1)


@rollout.command("receive")
@listen_option("127.0.0.1:8470")
def receive_reports(listen: HttpAddress, registry: str) -> None:
    """Run a server that stores the reports of nodes that cannot write to the registry (`pull --follow --report URL`).

    Except over loopback, nodes must send a token: set the same ENGINESMITH_REPORT_TOKEN here and on the nodes.
    """
    from pipeline.rollout.receiving import make_server

    try:
        with make_server(open_store(registry), listen) as server:
            say(f"receiving reports on {server.url}/; Ctrl-C ends it")
            server.wait()
    except KeyboardInterrupt:
        say("stopped")


def _show_nodes(statuses: "list[ServingStatus]", where: str | None, as_json: bool) -> None:
    if where and not statuses:
        raise UnknownNameError(f"there is no channel {where}; `enginesmith list` shows the channels")
    if as_json:
        emit_json([status.to_json() for status in statuses])
        return
    for status in statuses:
        _print_serving(status)
    if not statuses:
        echo(f"no node has reported; {_WHO_REPORTS}")


def _print_serving(status: "ServingStatus") -> None:
    channel, node_reports, rollout = status.channel, status.heard, status.channel.active_rollout
    rollout_text = f"; a rollout to version {rollout.version} is in progress" if rollout else ""
    echo(f"{channel.model}:{channel.name} points to version {channel.version} since {channel.move.at}{rollout_text}")
    share_text = f", of {channel.reporters_ppm / 10_000:g}% that are asked to" if channel.reporters_ppm < WHOLE else ""
    unread_text = f"; {len(node_reports.reports)} were read" if len(node_reports.reports) < node_reports.nodes else ""
    unread_text += f", {node_reports.damaged} damaged or of a newer enginesmith" if node_reports.damaged else ""
    echo(f"{pluralize(node_reports.nodes, 'node')} reported{share_text}{unread_text}; {_WHO_REPORTS}")
    if not node_reports.reports:
        return
    engine_rows = []
    for version, unit, engine, nodes, problems in status.count_engines():
        problem_text = ", ".join(f"{count} {problem}" for problem, count in problems.items())
        engine_rows.append([version or "?", unit, engine[:12], str(nodes), problem_text])
    print_table(("version", "unit", "engine", "nodes", "problems"), engine_rows)
    reports, rows = status.list_nodes(), []
    for report, problem in reports[:_MOST_ROWS]:
        state = f"{problem}: {report.detail}" if report.detail else problem
        ages = [
            format_age(max(0.0, (status.now - parse_time(time)).total_seconds())) for time in (report.since, report.at)
        ]
        hardware = report.machine.partition(",")[0]  # `--json` also has the machine's runtimes
        rows.append([report.node, report.region, hardware, report.version or "?", state, *ages])
    more_note = f"{pluralize(len(reports) - len(rows), 'more node')}: --json" if len(reports) > len(rows) else ""
    print_table(("node", "region", "machine", "version", "problem", "for", "last report"), rows, note=more_note)


def _print(state: Rollout, as_json: bool) -> None:
    if as_json:
        from enginesmith.core.codec import encode

        emit_json(encode(state))
        return
    event_text = "" if state.history[-1].what == state.state else f"{state.history[-1].what}; "
    summary = f"{state.state} ({event_text}the channel serves version {state.base})"
    echo(f"{state.where}: rollout {state.id} of version {state.version} is {summary}")


def _describe_limits(state: Rollout) -> str:
    if not state.nodes:
        return "wave shares hold on average, because the number of nodes is unknown; to make them limits, pass --nodes"
    first_wave, node_text = state.plan.waves[0], pluralize(state.nodes, "node")
    if first_wave.region or first_wave.label or first_wave.share_ppm == WHOLE:
        return f"the shares of waves of all regions are limits for {node_text}; the first wave is {first_wave}"
    return f"first wave: {first_wave} of {node_text} at most; {state.aim} on average keeps this limit"


def _print_status(status: "RolloutStatus") -> None:
    rollout_state, node_reports = status.rollout, status.heard
    echo(
        f"{rollout_state.where}: rollout {rollout_state.id} from version {rollout_state.base} to version "
        f"{rollout_state.version}: {rollout_state.state}"
    )
    if rollout_state.random_inputs:
        echo("accepted: engines that are proven only on random inputs")
    if rollout_state.losses:
        echo(f"accepted losses: {', '.join(rollout_state.losses)}")
    print_table(("wave", "nodes", "soak", "state"), status.list_waves())
    if not rollout_state.is_finished:
        failing_count = sum(bool(report.failure) for report in node_reports.reports)
        read_text = f" of {len(node_reports.reports)} read" if len(node_reports.reports) < node_reports.nodes else ""
        echo(f"{pluralize(node_reports.nodes, 'report')}, {failing_count} failing{read_text}")
    if status.gates:
        print_table(("gate", "", "why"), [[gate.name, gate.verdict, gate.why] for gate in status.gates])
    rows = [[event.at, event.what, event.by, event.why] for event in rollout_state.history]
    print_table(("at", "what", "by", "why"), rows)
    if status.earlier:
        attempt_rows = [
            [attempt.began, attempt.version, attempt.state, attempt.by, attempt.why] for attempt in status.earlier
        ]
        print_table(("began", "version", "ended as", "by", "why"), attempt_rows, title="earlier rollouts")


def _operator(store: Store, why: str) -> "Operator":
    from pipeline.rollout.operations import Operator

    return Operator(user(), store.now(), why)
