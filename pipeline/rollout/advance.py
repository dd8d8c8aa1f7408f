"""The controller of rollouts: one look at a channel's rollout, which decides and writes at most one step.

A look changes the rollout's document by compare-and-swap and then writes the pointer, if that does not say the same. So
several controllers do no harm, and one that is killed anywhere leaves a state that the next look goes on from: a
document whose pointer is older is a pointer that the next look writes, and a rollout that was to be promoted is
promoted by it, or found promoted.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from enginery.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError
from enginery.core.text import join_first
from enginery.registry.evidence.canaries import canaries
from enginery.registry.rollouts.reports import MOST_REPORTERS, NOTHING_HEARD, Heard, read_reports
from enginery.registry.rollouts.state import (
    Rollout,
    open_wave,
    parse_time,
    raise_reach,
    read_rollout,
    remove_mark,
    write_rollout,
)
from enginery.registry.rollouts.waves import WHOLE
from enginery.registry.store.base import Store
from enginery.registry.trust import require
from enginery.registry.versions import channels, lookup
from enginery.registry.versions.lookup import Channel
from enginery.registry.versions.policies import CanaryPass, canary_pass
from enginery.registry.versions.refresh import refresh_rollout
from pipeline.rollout.gates import GateResult, judge_gates, moment_of

CONTROLLER = "controller"


@dataclass(frozen=True)
class Advance:
    """What a look did. action: 'waiting', 'raised', 'wave', 'promoting', 'done', 'halted', 'aborted', 'paused', or
    'beaten' where another writer was faster. why: in words.  gates, heard: what the look saw.  made: whether this look
    wrote a decision, which no other one did."""

    rollout: Rollout
    action: str
    why: str
    gates: tuple[GateResult, ...] = ()
    heard: Heard = NOTHING_HEARD
    made: bool = False


def advance(store: Store, model: str, channel: str, now: datetime, by: str = CONTROLLER) -> Advance | None:
    """Look at a channel's rollout and make the step that is due; None where there is none.

    Raises IntegrityError for a damaged document, UnavailableError where the registry is out of reach; both change
    nothing that nodes follow.
    """
    before = read_rollout(store, model, channel)
    if before is None:
        return None
    if before.is_finished:
        remove_mark(store, model, channel)  # of one that was killed between the end and this
    found = _decide(store, before, now, by)
    if found.rollout != before:
        written = write_rollout(store, found.rollout, before)
        if written is None:
            current = read_rollout(store, model, channel) or before
            return Advance(current, "beaten", f"another writer was faster: {current.history[-1].what}")
        found = replace(found, rollout=written, made=len(written.history) > len(before.history))
    refresh_rollout(store, model, channel)
    return _promote(store, found, now, by) if found.rollout.state == "promoting" else found


def _decide(store: Store, rollout: Rollout, now: datetime, by: str) -> Advance:
    """The step that is due, not written yet."""
    serving = lookup.read_channel(store, rollout.model, rollout.channel)
    if rollout.is_finished:
        return Advance(rollout, rollout.state, rollout.history[-1].why)
    if serving is None or len(serving.history) != rollout.base_moves:
        return _follow_channel(rollout, serving, now, by)
    if rollout.state == "promoting":
        return Advance(rollout, "promoting", "every wave is over")
    heard = read_reports(store, rollout)
    try:
        manifest = lookup.load(store, rollout.model, rollout.version)
        if manifest.digest != rollout.manifest:
            raise IntegrityError(f"{rollout.model}@{rollout.version} is another version by now")
        gates = judge_gates(rollout, heard, canaries(store, manifest), now)
    except (IntegrityError, UnknownNameError) as error:
        return _halt(rollout, now, by, f"what it brings cannot be read: {error}", (), heard)
    if failing := [gate for gate in gates if gate.verdict == "fail"]:
        why = "; ".join(f"{gate.name}: {gate.why}" for gate in failing)
        return _halt(rollout, now, by, why, gates, heard)
    if rollout.state == "paused":
        return Advance(rollout, "paused", rollout.history[-1].why, gates, heard)
    return _go_on(_bound_reports(rollout, heard), now, by, gates, heard)


def _follow_channel(rollout: Rollout, serving: Channel | None, now: datetime, by: str) -> Advance:
    """The end of a rollout whose channel was moved: by itself, or by somebody else, which ends it."""
    moves = serving.history[rollout.base_moves :] if serving else ()
    if moves and moves[0].manifest == rollout.manifest and moves[0].action == "promote":
        why = f"{rollout.where} serves {rollout.version}"
        return Advance(rollout.decide(now, "done", by, why, state="done"), "done", why)
    last = moves[-1] if moves else None
    why = f"the channel was moved to {last.version} by {last.by or '?'}" if last else "the channel is gone"
    return Advance(rollout.decide(now, "aborted", by, why, state="aborted"), "aborted", why)


def _halt(rollout: Rollout, now: datetime, by: str, why: str, gates: tuple[GateResult, ...], heard: Heard) -> Advance:
    """The rollout halted: its pointer leads every node back to what the channel serves."""
    return Advance(rollout.decide(now, "halted", by, why, state="halted"), "halted", why, gates, heard)


def _go_on(rollout: Rollout, now: datetime, by: str, gates: tuple[GateResult, ...], heard: Heard) -> Advance:
    """The next step of the open wave, the next wave, the promotion; or nothing, with what it waits for."""
    if rollout.soaking is None:
        due = parse_time(rollout.raised) + timedelta(seconds=rollout.plan.look_s)
        if now < due:
            why = f"{_reached(rollout)}; the next step is due at {due:%H:%M:%S}"
            return Advance(rollout, "waiting", why, gates, heard)
        raised = raise_reach(rollout, now)
        return Advance(raised, "raised", _reached(raised), gates, heard)
    if not moment_of(rollout, now).is_over:
        end = parse_time(rollout.soaking) + timedelta(seconds=rollout.plan.soaks_s[rollout.wave])
        return Advance(rollout, "waiting", f"wave {rollout.target} until {end:%H:%M:%S} at least", gates, heard)
    if waiting := [gate for gate in gates if gate.verdict == "wait"]:
        why = "; ".join(f"{gate.name}: {gate.why}" for gate in waiting)
        if any(gate.name != "person" for gate in waiting):
            why += f" (`enginery rollout resume {rollout.where} --without-data` ends the wave all the same)"
        return Advance(rollout, "waiting", why, gates, heard)
    why = join_first([f"{gate.name}: {gate.why}" for gate in gates], 4, "; ") or "its time is over"
    if rollout.wave + 1 == len(rollout.plan.waves):
        return Advance(rollout.decide(now, "promoting", by, why, state="promoting"), "promoting", why, gates, heard)
    opened = _foresee_reports(open_wave(rollout, rollout.wave + 1, now), rollout, heard)
    return Advance(opened.decide(now, f"wave {opened.target}", by, why), "wave", why, gates, heard)


def _reached(rollout: Rollout) -> str:
    return f"reached: {', '.join(map(str, rollout.reach)) or 'nobody'}"


def _bound_reports(rollout: Rollout, heard: Heard) -> Rollout:
    """The rollout with fewer nodes that report, where too many do."""
    if heard.nodes <= 1.25 * MOST_REPORTERS:
        return rollout
    return _with_reporters(rollout, rollout.reporters_ppm * MOST_REPORTERS // heard.nodes)


def _foresee_reports(opened: Rollout, before: Rollout, heard: Heard) -> Rollout:
    """The same before a wave that reaches more nodes: by the growth of its share, where that is known."""
    old, new = before.aim, opened.aim
    if (old.region, old.label) != (new.region, new.label) or not heard.nodes:
        return opened
    expected = heard.nodes * new.share_ppm / old.share_ppm
    most = int(opened.reporters_ppm * MOST_REPORTERS / expected)
    return _with_reporters(opened, most) if most < opened.reporters_ppm else opened


def _with_reporters(rollout: Rollout, ppm: int) -> Rollout:
    return replace(rollout, reporters_ppm=max(1, min(WHOLE, ppm)))


def _promote(store: Store, found: Advance, now: datetime, by: str) -> Advance:
    """Promote the channel at the end of the last wave, and record it; halted where a policy refuses it by now."""
    rollout = found.rollout
    why = f"rollout {rollout.id}: {rollout.history[-1].why}"[:500]
    try:
        manifest = lookup.load(store, rollout.model, rollout.version)
        counts = require(store, manifest).counts
        channels.promote(
            store,
            manifest,
            rollout.channel,
            by=rollout.history[0].by or by,
            why=why,
            proven_only=rollout.proven_only,
            canaries=passes_of(store, rollout),
            counts=counts,
            ending=rollout,
            accepted_losses=rollout.losses,
        )
    except ConflictError:
        pass  # somebody else moved the channel, or goes on: the next look says which
    except (InputError, IntegrityError) as error:
        after = rollout.decide(now, "halted", by, f"the promotion was refused: {error}", state="halted")
        return _write_end(store, rollout, after, found)
    serving = lookup.read_channel(store, rollout.model, rollout.channel)
    if serving and len(serving.history) == rollout.base_moves:
        return found
    return _write_end(store, rollout, _follow_channel(rollout, serving, now, by).rollout, found)


def _write_end(store: Store, before: Rollout, after: Rollout, found: Advance) -> Advance:
    written = write_rollout(store, after, before)
    after = written or read_rollout(store, before.model, before.channel) or after
    refresh_rollout(store, before.model, before.channel)
    return Advance(after, after.state, after.history[-1].why, found.gates, found.heard, made=written is not None)


def passes_of(store: Store, rollout: Rollout) -> list[CanaryPass]:
    """The canaries that a version passed against what the channel serves, for the policy and the channel's history."""
    manifest = lookup.load(store, rollout.model, rollout.version)
    found = [item for item in canaries(store, manifest) if item.baseline == rollout.base_manifest]
    failed = {item.target for item in found if item.verdict == "FAIL"}
    return [canary_pass(store, item.report) for item in found if item.verdict == "PASS" and item.target not in failed]
