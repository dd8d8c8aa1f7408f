"""The controller of rollouts: one look at a channel's rollout, which decides and writes at most one step.

A step is one write of the channel's state, by compare-and-swap, and that is what nodes read. So several controllers do
no harm, and one that is killed anywhere leaves the state before its step or after it.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError
from enginesmith.core.text import join_first
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.rollouts.reports import MOST_REPORTERS, NOTHING_HEARD, Heard, read_reports
from enginesmith.registry.rollouts.state import Rollout, count_time, open_wave, parse_time, raise_reach
from enginesmith.registry.rollouts.waves import WHOLE
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.policies import CanaryPass, canary_pass
from enginesmith.registry.versions.rolling import change_rollout, clear_marks, read_rollout
from pipeline.rollout.gates import GateResult, judge_gates, moment_of

CONTROLLER = "controller"


@dataclass(frozen=True)
class Advance:
    """What a look did. action: 'waiting', 'raised', 'wave', 'done', 'halted', 'aborted', 'paused', or
    'beaten' where another writer was faster. why: in words.  gates, heard: what the look saw.  made: whether this look
    wrote a decision, which no other one did."""

    rollout: Rollout
    action: str
    why: str
    gates: tuple[GateResult, ...] = ()
    heard: Heard = NOTHING_HEARD
    made: bool = False


def advance(store: Store, model: str, channel: str, by: str = CONTROLLER) -> Advance | None:
    """Look at a channel's rollout and make the step that is due, by the store's clock; None where there is none.

    Raises IntegrityError for a damaged document, UnavailableError where the registry is out of reach; both change
    nothing that nodes follow.
    """
    before = read_rollout(store, model, channel)
    if before is None:
        clear_marks(store, model, channel)
        return None
    now = store.now()  # after the rollout was read (`count_time`)
    found = _decide(store, before, now, by)
    if found.rollout != before:
        try:
            if found.action == "done" and (refusal := _promote(store, before, found, by)):
                found = _halt(before, now, by, f"the promotion was refused: {refusal}", found.gates, found.heard)
            if found.action != "done":
                change_rollout(store, before, found.rollout)
        except ConflictError:
            return _describe_loss(store, before)
        found = replace(found, made=found.rollout.history != before.history)
    clear_marks(store, model, channel)
    return found


def _promote(store: Store, before: Rollout, found: Advance, by: str) -> str:
    """Promote the channel, which ends its rollout; why that is refused, '' where it is done.

    Raises ConflictError where another writer was faster, UnavailableError.
    """
    try:
        _point(store, before, found, by)
    except (InputError, IntegrityError) as error:
        return str(error)
    return ""


def _point(store: Store, before: Rollout, found: Advance, by: str) -> None:
    manifest = lookup.load(store, before.model, before.version)
    channels.promote(
        store,
        manifest,
        before.channel,
        by=before.history[0].by or by,
        why=f"rollout {before.id}: {found.why}"[:500],
        proven_only=before.proven_only,
        canaries=passes_of(store, before),
        counts=require(store, manifest).counts,
        ending=(before, found.rollout),
        accepted_losses=before.losses,
    )


def _describe_loss(store: Store, before: Rollout) -> Advance:
    current = read_rollout(store, before.model, before.channel) or before
    return Advance(current, "beaten", f"another writer was faster: {current.history[-1].what}")


def _decide(store: Store, rollout: Rollout, now: datetime, by: str) -> Advance:
    """The step that is due, not written yet."""
    if rollout.is_finished:
        return Advance(rollout, rollout.state, rollout.history[-1].why)
    rollout = count_time(rollout, now)
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


def _halt(rollout: Rollout, now: datetime, by: str, why: str, gates: tuple[GateResult, ...], heard: Heard) -> Advance:
    """The rollout halted, which leads every node back to what the channel serves."""
    return Advance(rollout.decide(now, "halted", by, why, state="halted"), "halted", why, gates, heard)


def _go_on(rollout: Rollout, now: datetime, by: str, gates: tuple[GateResult, ...], heard: Heard) -> Advance:
    """The next step of the open wave, the next wave, the promotion; or nothing, with what it waits for."""
    if not rollout.is_open:
        due = _since(rollout, now) + timedelta(seconds=rollout.plan.look_s)
        if now < due:
            why = f"{_reached(rollout)}; the next step is due at {due:%H:%M:%S}"
            return Advance(rollout, "waiting", why, gates, heard)
        raised = raise_reach(rollout)
        return Advance(raised, "raised", _reached(raised), gates, heard)
    if not moment_of(rollout, now).is_over:
        end = _since(rollout, now) + timedelta(seconds=rollout.plan.soaks_s[rollout.wave])
        return Advance(rollout, "waiting", f"wave {rollout.target} until {end:%H:%M:%S} at least", gates, heard)
    if waiting := [gate for gate in gates if gate.verdict == "wait"]:
        why = "; ".join(f"{gate.name}: {gate.why}" for gate in waiting)
        if any(gate.name != "person" for gate in waiting):
            why += f" (`enginesmith rollout resume {rollout.where} --without-data` ends the wave all the same)"
        return Advance(rollout, "waiting", why, gates, heard)
    why = join_first([f"{gate.name}: {gate.why}" for gate in gates], 4, "; ") or "its time is over"
    if rollout.wave + 1 == len(rollout.plan.waves):
        return Advance(rollout.decide(now, "done", by, why, state="done"), "done", why, gates, heard)
    opened = _foresee_reports(open_wave(rollout, rollout.wave + 1, now), rollout, heard)
    return Advance(opened.decide(now, f"wave {opened.target}", by, why), "wave", why, gates, heard)


def _since(rollout: Rollout, now: datetime) -> datetime:
    return parse_time(rollout.since) if rollout.since else now


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


def passes_of(store: Store, rollout: Rollout) -> list[CanaryPass]:
    """The canaries that a version passed against what the channel serves, for the policy and the channel's history."""
    manifest = lookup.load(store, rollout.model, rollout.version)
    found = [item for item in canaries(store, manifest) if item.baseline == rollout.base_manifest]
    failed = {item.target for item in found if item.verdict == "FAIL"}
    return [canary_pass(store, item.report) for item in found if item.verdict == "PASS" and item.target not in failed]
