"""What a person does to a rollout: start, pause, resume, abort. Each is one write by compare-and-swap, or an error that
says what the other writer did."""

import secrets
from dataclasses import dataclass, replace
from datetime import datetime

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError
from enginesmith.registry.leases import hold_lease, secure_version
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.reports import clear_reports
from enginesmith.registry.rollouts.state import (
    MOST_BY,
    MOST_WHY,
    Decision,
    Rollout,
    RolloutPlan,
    format_time,
    open_wave,
)
from enginesmith.registry.rollouts.waves import check_waves
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions import channels, lookup, policies
from enginesmith.registry.versions.losses import list_losses
from enginesmith.registry.versions.rolling import begin_rollout, change_rollout, clear_marks
from enginesmith.registry.versions.state import Channel, read_channel
from pipeline.rollout.advance import passes_of
from pipeline.rollout.limits import count_nodes, with_limits


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
    accept_losses: bool = False,
) -> Rollout:
    """Start a rollout of a version to a channel, with its first wave open.

    Its waves are limits where it is known how many nodes there are (`limits`), by the plan or by the reports of the
    rollout before.
    accept_losses: whether nodes may lose engines that the channel serves; what they lose is recorded.
    Raises InputError where the channel's policy does not allow the version, serves it already or serves
    nothing to return to, and for a plan whose waves have too few nodes to be limits; ConflictError where another
    rollout runs or was started at the same time, IntegrityError for a version that has lost a blob.
    """
    check_waves(plan.waves)
    model = manifest.model
    serving = _serving(read_channel(store, model, channel), manifest, channel)
    nodes, counts = count_nodes(store, serving.rollout), require(store, manifest).counts

    def open_first(state: Channel | None) -> Rollout:
        serving = _serving(state, manifest, channel)
        losses = list_losses(store, serving, manifest, proven_only, counts) if accept_losses else ()
        waiting = replace(_waiting(manifest, serving, plan, who, proven_only), losses=losses)
        return open_wave(with_limits(waiting, nodes), 0, who.at)

    _check(store, manifest, open_first(serving))
    with hold_lease(store, f"starting a rollout of {model}@{manifest.version}") as guard:
        secure_version(guard, manifest)
        begun = begin_rollout(guard, model, channel, open_first)
    clear_marks(store, model, channel)
    clear_reports(store, begun)
    return begun


def _already(found: Rollout) -> str:
    by = found.history[0].by or "?"
    return (
        f"a rollout of {found.version} to {found.where} is {found.state}: {by} started it at {found.history[0].at}; "
        f"`enginesmith rollout status {found.where}` shows it, `enginesmith rollout abort {found.where}` ends it"
    )


def _serving(serving: Channel | None, manifest: Manifest, channel: str) -> Channel:
    """The state of a channel that a rollout of this version may begin in. Raises as `start`."""
    where, reference = f"{manifest.model}:{channel}", f"{manifest.model}@{manifest.version}"
    if serving is None:
        raise InputError(
            f"{where} serves nothing that nodes could return to; its first version comes at once: "
            f"`enginesmith promote {reference} {where}`"
        )
    if serving.manifest == manifest.digest:
        raise InputError(f"{where} serves {manifest.version} already; there is nothing to roll out")
    if running := serving.active_rollout:
        raise ConflictError(_already(running))
    return serving


def _waiting(manifest: Manifest, serving: Channel, plan: RolloutPlan, who: Operator, proven_only: bool) -> Rollout:
    time = format_time(who.at)
    return Rollout(
        id=secrets.token_hex(6),
        model=manifest.model,
        channel=serving.name,
        version=manifest.version,
        manifest=manifest.digest,
        proven_only=proven_only,
        base=serving.version,
        base_manifest=serving.manifest,
        plan=plan,
        state="running",
        wave=0,
        reach=(),
        opened=time,
        since=None,
        history=(Decision(time, f"started, wave {plan.waves[0]}", 1, who.by[:MOST_BY], who.why[:MOST_WHY]),),
    )


def _check(store: Store, manifest: Manifest, rollout: Rollout) -> None:
    """Raise what a promotion would be refused for."""
    refusal = channels.policy_refusal(
        store,
        manifest,
        rollout.channel,
        proven_only=rollout.proven_only,
        canaries=passes_of(store, rollout),
        counts=require(store, manifest).counts,
        in_waves=True,
        accepted_losses=rollout.losses,
    )
    if refusal:
        raise InputError(refusal)
    if lost := lookup.find_lost_of(store, manifest):
        reference = f"{manifest.model}@{manifest.version}"
        raise IntegrityError(
            f"{reference} has lost {len(lost)} blobs; `enginesmith registry fsck {reference}` names them"
        )


def plan_of(store: Store, model: str, channel: str, given: RolloutPlan | None) -> RolloutPlan:
    """The plan of a channel's policy, or the given one. Raises InputError where both are there, or neither."""
    ruled = policies.of_channel(store, model, channel).rollout
    where = f"{model}:{channel}"
    if ruled and given and given != ruled:
        raise InputError(
            f"the policy of {where} says how versions come to it; give no waves, or change it: `enginesmith registry "
            "policy set`"
        )
    if found := ruled or given:
        return found
    raise InputError(
        f"no waves: give --wave 1% --wave 100%, or set them with `enginesmith registry policy set {where} --waves`"
    )


def pause(store: Store, model: str, channel: str, who: Operator) -> Rollout:
    """Stop a rollout where it is: no further wave opens; gates that fail still halt it."""
    found = _unfinished(store, model, channel)
    if found.state != "running":
        raise InputError(f"the rollout of {found.where} is {found.state}, not running; there is nothing to pause")
    begun = found.paused or format_time(who.at)
    after = found.decide(who.at, "paused", who.by, who.why, state="paused", paused=begun)
    return _write(store, found, after)


def resume(store: Store, model: str, channel: str, who: Operator, *, without_data: bool = False) -> Rollout:
    """Let a paused rollout go on, its wave's time without the pause; or approve the open wave where a person must.

    without_data: approve the open wave whatever its gates wait for; those that fail still halt the rollout. Raises
    InputError where there is nothing to resume or to approve.
    """
    found = _unfinished(store, model, channel)
    if without_data:
        return _waive_data(store, found, who)
    if found.state == "paused":
        after = found.decide(who.at, "resumed", who.by, who.why, state="running")
        return _write(store, found, after)
    if found.state == "running" and found.plan.gates.approve and found.approved <= found.wave:
        after = found.decide(who.at, "approved", who.by, who.why, approved=found.wave + 1)
        return _write(store, found, after)
    raise InputError(
        f"the rollout of {found.where} is {found.state} and waits for nobody; there is nothing to resume "
        "(--without-data approves its open wave though gates lack data)"
    )


def _waive_data(store: Store, found: Rollout, who: Operator) -> Rollout:
    if found.state != "running" or found.waived > found.wave:
        reason = "needs no data in this wave already" if found.waived > found.wave else f"is {found.state}"
        raise InputError(f"the rollout of {found.where} {reason}; --without-data is for a wave that is open and waits")
    done = found.wave + 1
    after = found.decide(who.at, "approved without data", who.by, who.why, approved=done, waived=done)
    return _write(store, found, after)


def abort(store: Store, model: str, channel: str, who: Operator) -> Rollout:
    """End a rollout: every node returns to what the channel serves."""
    found = _unfinished(store, model, channel)
    return _write(store, found, found.decide(who.at, "aborted", who.by, who.why, state="aborted"))


def _write(store: Store, before: Rollout, after: Rollout) -> Rollout:
    change_rollout(store, before, after)
    clear_marks(store, after.model, after.channel)
    return after


def _unfinished(store: Store, model: str, channel: str) -> Rollout:
    """The rollout that runs. Raises UnknownNameError where there never was one, InputError where it is finished."""
    serving = read_channel(store, model, channel)
    found = serving.rollout if serving else None
    if found is None:
        raise UnknownNameError(f"{model}:{channel} has no rollout; `enginesmith rollout start REF {model}:{channel}`")
    if found.is_finished:
        last = found.history[-1]
        raise InputError(f"the last rollout of {found.where} is {found.state} since {last.at}: {last.why}")
    return found
