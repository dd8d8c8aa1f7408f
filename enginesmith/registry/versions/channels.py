"""Moves channels: promotes a version to a channel, and rolls a channel back. A move is one write of the channel's state
(`versions.channel_state`), which also ends a running rollout.

Channels other than `candidate` accept only versions whose engines are all proven, unless they are set to serve only the
proven ones; that is recorded with the move, and pulls through the channel then never yield an unproven engine. A move
forward by which nodes lose targets or precisions is refused unless the loss is accepted, and is recorded (`losses`).
Rolling back is exempt: it returns to a version that was served.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError
from enginesmith.registry.evidence.attestations import Attestation, judge_entries
from enginesmith.registry.leases import Guard, secure_version
from enginesmith.registry.manifest import Manifest, parse
from enginesmith.registry.rollouts.rollout_state import MOST_BY, MOST_WHY, Rollout, parse_time
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.versions import policies
from enginesmith.registry.versions.channel_state import (
    Channel,
    Move,
    Position,
    change_channel,
    check_unmoved,
    count_moves,
    position_of,
    read_channel,
    read_history,
)
from enginesmith.registry.versions.channel_writes import refresh_channel, with_snapshots
from enginesmith.registry.versions.index import hold_change
from enginesmith.registry.versions.lookup import find_lost_of
from enginesmith.registry.versions.policies import AcceptedLosses, CanaryPass, list_losses, loss_refusal


class MoveTerms(TypedDict, total=False):
    """Conditions and options of a move.

    proven_only: whether the channel then serves only the proven engines.
    random_inputs: whether engines proven only on random inputs are accepted, which the move records.
    canaries: passed canaries, whose reports are stored as blobs.  decided_on: the channel's position when the move was
    decided, from which it must start; without it the channel must serve the canaries' baseline.  counts: whether an
    attestation counts by a trust policy; None: all count.  ending: the rollout that this move ends, in its required
    state and in its final one. accepted_losses: losses of nodes that are accepted.
    """

    proven_only: bool
    random_inputs: bool
    canaries: Sequence[CanaryPass]
    decided_on: Position
    counts: Callable[[Attestation], bool] | None
    ending: tuple[Rollout, Rollout] | None
    accepted_losses: AcceptedLosses


def promote(
    store: Store, manifest: Manifest, name: str, *, by: str = "", why: str = "", **terms: Unpack[MoveTerms]
) -> Channel:
    """Point a channel at a version; nothing changes if it points there already.

    Raises InputError if the channel's policy forbids it or nodes lose engines and this was not accepted, ConflictError
    if somebody else moved the channel since `decided_on`, or since this began, or it serves another version than a
    canary's baseline, IntegrityError if the version was deleted or lacks a blob.
    """
    if not terms.get("ending") and "decided_on" not in terms:
        channel = read_channel(store, manifest.model, name)
        baselines = {canary.baseline for canary in terms.get("canaries", ())}
        if channel and channel.manifest != manifest.digest and not baselines <= {channel.manifest}:
            raise ConflictError(f"{channel.model}:{name} now serves {channel.version}, not the canary's baseline")
        terms["decided_on"] = position_of(channel)
    if refusal := policy_refusal(store, manifest, name, in_waves=bool(terms.get("ending")), **terms):
        raise InputError(refusal)
    with hold_change(store, [manifest.model], f"promoting {manifest.reference} to {name}") as guard:
        secure_version(guard, manifest)
        if losses := find_lost_of(store, manifest):
            lines = [f"  {manifest.blobs()[digest]} ({digest}): {loss}" for digest, loss in losses.items()]
            remedy = f"restore it, or build again; `enginesmith registry fsck {manifest.reference}` says more"
            raise IntegrityError("\n".join([f"channel {name!r}: {manifest.reference} is damaged; {remedy}:", *lines]))
        guard.secure(canary.report for canary in terms.get("canaries", ()))
        return point(guard, manifest, name, by, why, **terms)


def point(
    guard: Guard, manifest: Manifest, name: str, by: str = "", why: str = "", **terms: Unpack[MoveTerms]
) -> Channel:
    """Point a channel at a version like `promote`, but without its checks that do not depend on what the channel
    serves: the caller did them and holds the lease. Without `decided_on` it moves from any position.

    Raises as `promote` does.
    """
    store, ending, accepted_losses = guard.store, terms.get("ending"), terms.get("accepted_losses", ())
    reports = tuple(canary.report for canary in terms.get("canaries", ()))
    if lost_reports := [report for report in reports if not store.has(report)]:
        raise IntegrityError(f"canary report {lost_reports[0]} is not in {store.uri}; promote again with --canary")
    proven_only, random_inputs = terms.get("proven_only", False), terms.get("random_inputs", False)
    names = manifest.version, manifest.digest, _now(store), by, why
    move = Move(*names, proven_only, canary=reports, random_inputs=random_inputs)

    def next_move(channel: Channel | None) -> Move | None:
        if ending and (channel is None or channel.rollout != ending[0]):
            raise ConflictError(f"the rollout of {manifest.model}:{name} was changed by somebody else meanwhile")
        is_there = channel and (channel.manifest, channel.proven_only) == (move.manifest, proven_only)
        if is_there and not ending:
            return None
        check_unmoved(channel, terms.get("decided_on"))
        losses = list_losses(store, channel, manifest, proven_only, terms.get("counts"))
        if refusal := loss_refusal(losses, accepted_losses, manifest, channel):
            raise InputError(refusal)
        return replace(move, losses=losses)

    return _move(guard, manifest.model, name, next_move, ending[1] if ending else None)


def rollback(
    store: Store, model: str, name: str, *, by: str = "", why: str = "", decided_on: Position | None = None
) -> Channel:
    """Point a channel at the version it served before. Raises UnknownNameError if there is none or it was deleted, and
    ConflictError if somebody else moved it since `decided_on`; None: from any position.

    No policy is checked, so that a rollback is never refused in an emergency.
    """

    def next_move(channel: Channel | None) -> Move:
        check_unmoved(channel, decided_on)
        previous_move = read_history(store, channel).previous() if channel else None
        if previous_move is None:
            reason = f"served nothing before version {channel.version}" if channel else "does not exist"
            raise UnknownNameError(f"channel {model}:{name} {reason}; there is nothing to roll back to")
        manifest_bytes = store.read(manifest_key(model, previous_move.version))
        manifest = None if manifest_bytes is None else parse(manifest_bytes, model=model, version=previous_move.version)
        if manifest is None or manifest.digest != previous_move.manifest:
            raise UnknownNameError(
                f"channel {model}:{name} served version {previous_move.version} before, which was deleted since; "
                f"promote another one: `enginesmith list {model}` shows them"
            )
        secure_version(guard, manifest)
        return replace(previous_move, at=_now(store), by=by, why=why, action="rollback", canary=(), losses=())

    with hold_change(store, [model], f"rolling back {model}:{name}") as guard:
        return _move(guard, model, name, next_move)


def policy_refusal(
    store: Store, manifest: Manifest, name: str, *, in_waves: bool = False, **terms: Unpack[MoveTerms]
) -> str | None:
    """The reason why a channel does not accept a version, with the rule and the remedy; None if it does.

    in_waves: whether a rollout brings it; if not, a channel refuses whose policy requires one, or that has one.
    """
    counts, accepted_losses = terms.get("counts"), terms.get("accepted_losses", ())
    proven_only, random_inputs = terms.get("proven_only", False), terms.get("random_inputs", False)
    entries, canaries = judge_entries(store, manifest, counts), terms.get("canaries", ())
    policy, channel = policies.of_channel(store, manifest.model, name), read_channel(store, manifest.model, name)
    early_refusal = None if in_waves else policies.rollout_refusal(policy, manifest, name) or _busy(channel)
    refusal = (
        early_refusal
        or policies.common_refusal(manifest, entries, name, proven_only=proven_only, random_inputs=random_inputs)
        or policies.refusal(policy, manifest, name, entries, canaries, proven_only=proven_only)
        or policies.signature_refusal(store, policy, manifest, name)
    )
    if refusal or accepted_losses is None:
        return refusal
    return loss_refusal(list_losses(store, channel, manifest, proven_only, counts), accepted_losses, manifest, channel)


def _busy(channel: Channel | None) -> str | None:
    """The reason why a channel with a running rollout accepts no other version; None without a rollout."""
    rollout = channel.active_rollout if channel else None
    if rollout is None:
        return None
    return (
        f"a rollout of {rollout.version} to {rollout.where} is {rollout.state} (wave {rollout.wave + 1} of "
        f"{len(rollout.plan.waves)}): wait for its end, or `enginesmith rollout abort {rollout.where} --why TEXT`"
    )


def _move(
    guard: Guard,
    model: str,
    name: str,
    next_move: Callable[[Channel | None], Move | None],
    ended_rollout: Rollout | None = None,
) -> Channel:
    """Make the move that `next_move` returns for a channel's state (None: none), and return the new state.

    `next_move` is called again after a lost race, so that no move is lost. ended_rollout: the final state of the
    channel's rollout; None: a running one is aborted.
    """

    def make(channel: Channel | None) -> Channel | None:
        move = next_move(channel)
        if move is None:
            return None
        moves = channel.moves if channel else count_moves(guard.store, model, name)
        move = replace(move, by=move.by[:MOST_BY], why=move.why[:MOST_WHY])
        rollout = ended_rollout or (_end_rollout(channel.rollout, move) if channel and channel.rollout else None)
        old_channel = channel or Channel(model, name, moves, move)
        return with_snapshots(guard, replace(old_channel, moves=moves + 1, move=move, rollout=rollout))

    new_channel = change_channel(guard.store, model, name, make)
    if new_channel is None:  # without a channel, `next_move` makes a move or raises
        raise ConflictError(f"channel {model}:{name} was deleted at the same time; run again")
    refresh_channel(guard, model, name)  # a writer of evidence may have read the state before this move
    return new_channel


def _now(store: Store) -> str:
    """The time of a move, on the store's clock, like that of later evidence."""
    return store.now().isoformat(timespec="seconds")


def _end_rollout(rollout: Rollout, move: Move) -> Rollout:
    """A rollout after a move of its channel: a running one is aborted."""
    if rollout.is_finished:
        return rollout
    reason = f"the channel was moved to {move.version} by {move.by or '?'}"
    return rollout.decide(parse_time(move.at), "aborted", move.by, reason, state="aborted")
