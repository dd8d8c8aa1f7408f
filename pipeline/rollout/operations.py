"""A person's actions on a rollout, its status, the engines that nodes serve, and the limit of a wave."""

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from enginesmith.core.codec import encode
from enginesmith.core.errors import ConflictError, EnginesmithError, InputError, IntegrityError, UnknownNameError
from enginesmith.core.types import Untyped
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.leases import hold_lease, secure_version
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.reports import (
    OUTSIDE,
    OUTSIDE_SILENT_S,
    Heard,
    NodeReport,
    clear_reports,
    read_newest,
    read_reports,
)
from enginesmith.registry.rollouts.rollout_state import (
    MOST_BY,
    MOST_WHY,
    WHOLE,
    Decision,
    EarlierRollout,
    Gates,
    Rollout,
    RolloutPlan,
    Slice,
    check_waves,
    format_time,
    open_wave,
    parse_time,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions import channel_state, channels, lookup, policies
from enginesmith.registry.versions.channel_state import Channel, read_channel, read_history
from enginesmith.registry.versions.channel_writes import begin_rollout, change_rollout, clear_marks, read_rollout
from enginesmith.registry.versions.policies import list_losses
from pipeline.rollout.advance import GateResult, judge_gates, passes_of
from validation.statistics.rates import lower

# Makes the share of a wave a limit: by how many nodes there are at least, the share of places that keeps within it.
#
# Nodes fall into a wave by a hash (`registry.rollouts`): a share p of places reaches a binomial number of nodes:
# 1 % of 10,000 are 100 on average, and 118 in one rollout of thirty. `limit_share` gives the greatest p with which more
# than the wave's share are reached with probability `LEVEL` at most. P(Binomial(n, p) > k) <= level just where p is not
# over the lower bound of Clopper & Pearson for k + 1 of n (Biometrika 26, 1934; `validation.statistics.rates`).
#
# It holds for more nodes than n as well, known or not: the more there are, the nearer a wave is to p, which is below
# its share. So the least number of nodes is enough, and the reports of the rollout before give one.

# Probability that a wave reaches more than its share.
LEVEL = 1e-6
# A wave with fewer nodes on average may contain no node, so gates would get no reports: one in 150 with this limit.
LEAST_MEAN = 5.0


def limit_waves(waves: Sequence[Slice], nodes: int) -> tuple[int, ...]:
    """Of each wave the share of places, in parts per million, that reaches at most its share of `nodes` nodes or more.

    A wave of a region or label keeps its own, as how many nodes those have is not known. Raises InputError where a
    wave has too few nodes to be limited by a hash.
    """
    return tuple(_limit_wave(wave, nodes) for wave in waves)


def _limit_wave(wave: Slice, nodes: int) -> int:
    if wave.region or wave.label or wave.share_ppm == WHOLE:
        return wave.share_ppm
    share = limit_share(wave.share_ppm, nodes)
    if share * nodes < LEAST_MEAN * WHOLE:
        raise InputError(
            f"wave {wave} of {nodes} nodes: a hash picks them: at most {wave.share_ppm * nodes // WHOLE} means "
            f"{share * nodes / WHOLE:.2g} on average, and often none; give a larger share, name the first nodes by a "
            "label (label=NAME), or leave --nodes out, so that the share is an average"
        )
    return share


def limit_share(share_ppm: int, nodes: int) -> int:
    """The greatest share of places, in parts per million, of which no more than `share_ppm` of `nodes` nodes or more
    are reached, but with probability `LEVEL`."""
    node_count = share_ppm * nodes // WHOLE
    # The number of nodes of which no more than `node_count` are the share.
    most_nodes = ((node_count + 1) * WHOLE - 1) // share_ppm
    return int(lower(node_count + 1, most_nodes, LEVEL) * WHOLE)


def count_nodes(store: Store, before: Rollout | None) -> int:
    """How many nodes there are at least, by the reports of the rollout before; 0 where they do not say.

    Nodes that had gone silent by the last report are not counted. The others are a sample: of the places that were
    reached, and of the nodes that report. The count is a lower bound, wrong with probability `LEVEL`.
    """
    if before is None:
        return 0
    reach_ppm = max((reach.share_ppm for reach in before.reach if not (reach.region or reach.label)), default=0)
    if not reach_ppm:
        return 0
    reports = read_reports(store, before).reports
    last_report_at = max((parse_time(report.at) for report in reports), default=None)
    alive_count = sum(not report.is_silent(last_report_at) for report in reports) if last_report_at else 0
    share = reach_ppm / WHOLE * before.reporters_ppm / WHOLE
    low, high = alive_count, max(alive_count, int(alive_count / share))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if share <= lower(alive_count, middle, LEVEL) else (low, middle - 1)
    return low if alive_count else 0


def with_limits(rollout: Rollout, heard_of: int) -> Rollout:
    """The rollout with waves that limit the number of nodes: of the plan's nodes, else of `heard_of` known nodes. With
    too few known nodes it is unchanged: its shares then hold on average. Raises InputError if the plan states its nodes
    and its waves cannot be limits."""
    plan_nodes, waves = rollout.plan.nodes, rollout.plan.waves
    if plan_nodes is None and not heard_of:
        return rollout
    try:
        shares = limit_waves(waves, plan_nodes or heard_of)
    except InputError:
        if plan_nodes:
            raise
        return rollout
    return replace(rollout, nodes=plan_nodes or heard_of, shares_ppm=shares)


# What a person does to a rollout: start, pause, resume, abort. Each is one write by compare-and-swap, or an error that
# says what the other writer did.


@dataclass(frozen=True)
class Operator:
    """Who decides, when (by the store's clock) and why."""

    by: str
    at: datetime
    why: str = ""


def start(
    store: Store,
    manifest: Manifest,
    channel: str,
    plan: RolloutPlan,
    who: Operator,
    *,
    proven_only: bool = False,
    random_inputs: bool = False,
    accept_losses: bool = False,
    decided_on: channel_state.Position | None = None,
) -> Rollout:
    """Start a rollout of a version to a channel, with its first wave open.

    Where the number of nodes is known, from the plan or from the reports of the rollout before, the waves are limits.
    proven_only: whether nodes get proven engines only.
    random_inputs: whether engines that are proven only on random inputs are accepted; the channel's history records it.
    accept_losses: whether nodes may lose engines that the channel serves; the rollout records which.
    decided_on: where the channel must be; None: where it is now.
    Raises InputError where the channel's policy refuses the version, where the channel serves it already or serves
    nothing to return to, and where the waves have too few nodes to be limits; ConflictError where another rollout runs
    or was started at the same time, or the channel was moved; IntegrityError for a version that has lost a blob.
    """
    check_waves(plan.waves)
    model = manifest.model
    channel_now = _serving(read_channel(store, model, channel), manifest, channel)
    position = decided_on or channel_state.position_of(channel_now)
    node_count, counts = count_nodes(store, channel_now.rollout), require(store, manifest).counts

    def open_first(state: Channel | None) -> Rollout:
        live_channel = _serving(state, manifest, channel)
        channel_state.check_unmoved(state, position)
        losses = list_losses(store, live_channel, manifest, proven_only, counts) if accept_losses else ()
        fields = {"proven_only": proven_only, "random_inputs": random_inputs, "losses": losses}
        return open_wave(with_limits(_new(live_channel, manifest, plan, who, **fields), node_count), 0, who.at)

    _check(store, manifest, open_first(channel_now))
    # The lease names the model: should this process die, the next collection brings late evidence into the snapshots.
    with hold_lease(store, f"starting a rollout of {model}@{manifest.version}", changes=(model,)) as guard:
        secure_version(guard, manifest)
        new_rollout = begin_rollout(guard, model, channel, open_first)
    clear_marks(store, model, channel)
    with suppress(EnginesmithError):  # the next start deletes the rest
        clear_reports(store, new_rollout, lambda: read_rollout(store, model, channel))
    return new_rollout


def _new(channel: Channel, manifest: Manifest, plan: RolloutPlan, who: Operator, **accepted: Untyped) -> Rollout:
    """A rollout of which no wave is open yet. accepted: what nodes may get, by the fields of a rollout."""
    started_at = format_time(who.at)
    return Rollout(
        id=secrets.token_hex(6),
        model=manifest.model,
        channel=channel.name,
        version=manifest.version,
        manifest=manifest.digest,
        base=channel.version,
        base_manifest=channel.manifest,
        plan=plan,
        state="running",
        wave=0,
        reach=(),
        opened=started_at,
        since=None,
        history=(Decision(started_at, f"started, wave {plan.waves[0]}", 1, who.by[:MOST_BY], who.why[:MOST_WHY]),),
        **accepted,
    )


def _already(rollout: Rollout) -> str:
    starter = rollout.history[0].by or "?"
    return (
        f"a rollout of {rollout.version} to {rollout.where} is {rollout.state}: {starter} started it at "
        f"{rollout.history[0].at}; `enginesmith rollout status {rollout.where}` shows it, "
        f"`enginesmith rollout abort {rollout.where}` ends it"
    )


def _serving(serving: Channel | None, manifest: Manifest, channel: str) -> Channel:
    """The state of a channel that a rollout of this version may begin in. Raises as `start`."""
    channel_text, reference = f"{manifest.model}:{channel}", f"{manifest.model}@{manifest.version}"
    if serving is None:
        raise InputError(
            f"{channel_text} serves no version to which nodes could return; promote its first version without waves: "
            f"`enginesmith promote {reference} {channel_text}`"
        )
    if serving.manifest == manifest.digest:
        raise InputError(f"{channel_text} serves {manifest.version} already; there is nothing to roll out")
    if active_rollout := serving.active_rollout:
        raise ConflictError(_already(active_rollout))
    return serving


def _check(store: Store, manifest: Manifest, rollout: Rollout) -> None:
    """Raise the error with which a promotion would be refused."""
    refusal = channels.policy_refusal(
        store,
        manifest,
        rollout.channel,
        proven_only=rollout.proven_only,
        random_inputs=rollout.random_inputs,
        canaries=passes_of(store, rollout),
        counts=require(store, manifest).counts,
        in_waves=True,
        accepted_losses=rollout.losses,
    )
    if refusal:
        raise InputError(refusal)
    if lost_blobs := lookup.find_lost_of(store, manifest):
        reference = f"{manifest.model}@{manifest.version}"
        raise IntegrityError(
            f"{reference} has lost {len(lost_blobs)} blobs; `enginesmith registry fsck {reference}` names them"
        )


def plan_of(store: Store, model: str, channel: str, stated_plan: RolloutPlan | None) -> RolloutPlan:
    """The plan of a channel's policy, or the given one. Raises InputError where both are there, or neither."""
    policy = policies.of_channel(store, model, channel).rollout
    label = f"{model}:{channel}"
    if policy and stated_plan and stated_plan != policy:
        raise InputError(
            f"the policy of {label} sets another plan; give no waves, or change the policy: `enginesmith registry "
            "policy set`"
        )
    if plan := policy or stated_plan:
        return plan
    raise InputError(
        f"no waves: give --wave 1% --wave 100%, or set them with `enginesmith registry policy set {label} --wave`"
    )


def pause(store: Store, model: str, channel: str, who: Operator) -> Rollout:
    """Stop a rollout: no further wave opens, and gates that fail still halt it. Raises InputError where none runs."""
    rollout = _unfinished(store, model, channel)
    if rollout.state != "running":
        raise InputError(f"the rollout of {rollout.where} is {rollout.state}, not running; there is nothing to pause")
    paused_at = rollout.paused or format_time(who.at)
    new_state = rollout.decide(who.at, "paused", who.by, who.why, state="paused", paused=paused_at)
    return _write(store, rollout, new_state)


def resume(store: Store, model: str, channel: str, who: Operator, *, without_data: bool = False) -> Rollout:
    """Let a paused rollout go on, its wave's time without the pause; or approve the open wave where a person must.

    without_data: approve the open wave whatever its gates wait for; those that fail still halt the rollout.
    Raises InputError where there is nothing to resume or to approve.
    """
    rollout = _unfinished(store, model, channel)
    if without_data:
        return _waive_data(store, rollout, who)
    if rollout.state == "paused":
        new_state = rollout.decide(who.at, "resumed", who.by, who.why, state="running")
        return _write(store, rollout, new_state)
    if rollout.state == "running" and rollout.plan.gates.approve and rollout.approved <= rollout.wave:
        new_state = rollout.decide(who.at, "approved", who.by, who.why, approved=rollout.wave + 1)
        return _write(store, rollout, new_state)
    raise InputError(
        f"the rollout of {rollout.where} is {rollout.state} and waits for no approval; there is nothing to resume "
        "(--without-data approves its open wave though gates lack data)"
    )


def _waive_data(store: Store, rollout: Rollout, who: Operator) -> Rollout:
    if rollout.state != "running" or rollout.waived > rollout.wave:
        reason = "already accepts this wave without data" if rollout.waived > rollout.wave else f"is {rollout.state}"
        raise InputError(
            f"the rollout of {rollout.where} {reason}; use --without-data only while an open wave waits for data"
        )
    wave_count = rollout.wave + 1
    new_state = rollout.decide(who.at, "approved without data", who.by, who.why, approved=wave_count, waived=wave_count)
    return _write(store, rollout, new_state)


def abort(store: Store, model: str, channel: str, who: Operator) -> Rollout:
    """End a rollout: every node returns to what the channel serves."""
    rollout = _unfinished(store, model, channel)
    return _write(store, rollout, rollout.decide(who.at, "aborted", who.by, who.why, state="aborted"))


def _write(store: Store, before: Rollout, after: Rollout) -> Rollout:
    change_rollout(store, before, after)
    clear_marks(store, after.model, after.channel)
    return after


def _unfinished(store: Store, model: str, channel: str) -> Rollout:
    """The rollout that runs. Raises UnknownNameError where there never was one, InputError where it is finished."""
    live_channel = read_channel(store, model, channel)
    rollout = live_channel.rollout if live_channel else None
    if rollout is None:
        raise UnknownNameError(f"{model}:{channel} has no rollout; `enginesmith rollout start REF {model}:{channel}`")
    if rollout.is_finished:
        event = rollout.history[-1]
        raise InputError(f"the last rollout of {rollout.where} is {rollout.state} since {event.at}: {event.why}")
    return rollout


def list_wave_states(rollout: Rollout) -> Iterator[tuple[Slice, int, str]]:
    """For each wave its nodes, the least seconds that it lasts, and its state: 'passed', 'opening', 'open', 'to come',
    'never', or that of a rollout which does not run in it."""
    for index, (wave, soak_s) in enumerate(zip(rollout.plan.waves, rollout.plan.soaks_s, strict=True)):
        state: str = rollout.state
        if state == "running":
            state = "open" if rollout.is_open else "opening"
        if index < rollout.wave or rollout.state == "done":
            state = "passed"
        elif index > rollout.wave:
            state = "never" if rollout.is_finished else "to come"
        yield wave, soak_s, state


def describe_gates(gates: Gates) -> list[str]:
    """'health 95% of at least 20 nodes', 'errors 1%', "a canary's PASS", 'approval': those that are set."""
    least_nodes_text = f" of at least {gates.least_reports} nodes" if gates.least_reports > 1 else ""
    texts = [f"health {gates.health_ppm / 10_000:g}%{least_nodes_text}"] if gates.health_ppm is not None else []
    texts += [f"errors {gates.errors_ppm / 10_000:g}%"] if gates.errors_ppm is not None else []
    return [*texts, *["a canary's PASS"] * gates.canary, *["approval"] * gates.approve]


@dataclass(frozen=True)
class RolloutStatus:
    """A rollout and its current state, by the store's clock. earlier: the channel's rollouts before it."""

    rollout: Rollout
    gates: tuple[GateResult, ...]
    heard: Heard
    earlier: tuple[EarlierRollout, ...]
    now: datetime

    def to_json(self) -> dict[str, object]:
        """For programs."""
        node_reports = self.heard.reports
        failed_reports = [encode(report) for report in node_reports if report.failure]
        regions = Counter(report.region for report in node_reports)
        report_fields = {
            "nodes": self.heard.nodes,
            "read": len(node_reports),
            "well": len(node_reports) - len(failed_reports),
            "failing": failed_reports[:50],
            "regions": dict(sorted(regions.items())),
            "silent": sum(report.is_silent(self.now) for report in node_reports),
        }
        list_fields = {"earlier": encode(self.earlier), "gates": encode(self.gates)}
        return {**encode(self.rollout), **list_fields, "reports": report_fields}

    def list_waves(self) -> list[list[str]]:
        """A row for each wave: number, who, least time in seconds, state."""
        return [
            [str(number), self._describe_wave(wave), f"{soak_s} s", self._describe_state(state)]
            for number, (wave, soak_s, state) in enumerate(list_wave_states(self.rollout), 1)
        ]

    def _describe_wave(self, wave: Slice) -> str:
        nodes = self.rollout.nodes
        if not nodes or wave.share_ppm == WHOLE or wave.region or wave.label:
            return str(wave)
        return f"{wave}, at most {wave.share_ppm * nodes // WHOLE} of {nodes}"

    def _describe_state(self, state: str) -> str:
        rollout = self.rollout
        if state == "opening":
            return f"opening: {', '.join(map(str, rollout.reach))}"
        if state != "open":
            return state
        if rollout.soaking is None:
            return "open; no controller has polled since"
        return f"open for {(self.now - parse_time(rollout.soaking)).total_seconds():.0f} s"


def read_status(store: Store, channel: Channel, now: datetime) -> RolloutStatus | None:
    """The status of a channel's rollout; None where it never had one. Raises IntegrityError for damaged documents."""
    rollout = channel.rollout
    if rollout is None:
        return None
    earlier_rollouts = tuple(entry for entry in read_history(store, channel).rollouts if entry.id != rollout.id)
    if rollout.is_finished:
        return RolloutStatus(rollout, (), Heard(), earlier_rollouts, now)
    node_reports, manifest = read_reports(store, rollout), lookup.load(store, rollout.model, rollout.version)
    gates = judge_gates(rollout, node_reports, canaries(store, manifest), now)
    return RolloutStatus(rollout, gates, node_reports, earlier_rollouts, now)


@dataclass(frozen=True)
class ServingStatus:
    """A channel, and what its nodes reported last. now: by the store's clock."""

    channel: Channel
    heard: Heard
    now: datetime

    def find_problem(self, report: NodeReport) -> str:
        """What is wrong with a node: 'silent', its failure, or a version that the channel does not lead to; else ''."""
        if report.is_silent(self.now, OUTSIDE_SILENT_S):
            return "silent"
        if report.failure or report.version in self.channel.served.values():
            return report.failure
        return "serves another version"

    def list_nodes(self) -> list[tuple[NodeReport, str]]:
        """The reports, each with its problem; those with a problem first."""
        rows = [(report, self.find_problem(report)) for report in self.heard.reports]
        return sorted(rows, key=lambda row: (not row[1], row[0].node))

    def count_engines(self) -> list[tuple[str, str, str, int, dict[str, int]]]:
        """Of each engine that nodes serve, the most frequent first: version, unit, digest, how many nodes, and how many
        of these have which problem."""
        counts: dict[tuple[str, str, str], Counter[str]] = {}
        for report, problem in self.list_nodes():
            counts.setdefault((report.version, report.unit, report.engine or ""), Counter())[problem] += 1
        rows = [
            (*engine, count.total(), {problem: nodes for problem, nodes in count.items() if problem})
            for engine, count in sorted(counts.items())
        ]
        return sorted(rows, key=lambda row: -row[3])

    def to_json(self) -> dict[str, object]:
        """For programs."""
        channel, rollout = self.channel, self.channel.active_rollout
        names = ("version", "unit", "engine", "nodes", "problems")
        return {
            "model": channel.model,
            "channel": channel.name,
            "version": channel.version,
            "since": channel.move.at,
            "rollout": rollout.version if rollout else None,
            "reporters_ppm": channel.reporters_ppm,
            "reports": {"nodes": self.heard.nodes, "read": len(self.heard.reports), "damaged": self.heard.damaged},
            "engines": [dict(zip(names, row, strict=True)) for row in self.count_engines()],
            "nodes": [{**encode(report), "problem": problem} for report, problem in self.list_nodes()],
        }


def read_serving(store: Store, channel: Channel, now: datetime) -> ServingStatus:
    """What the nodes of a channel serve. now: by the store's clock."""
    rollout = channel.active_rollout
    shares = {OUTSIDE: channel.reporters_ppm} | ({rollout.id: rollout.reporters_ppm} if rollout else {})
    return ServingStatus(channel, read_newest(store, channel.model, channel.name, shares), now)
