"""The controller of rollouts: gates, and one decision a poll."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from threading import Event
from time import monotonic
from typing import Literal

from enginesmith.core.errors import ConflictError, EnginesmithError, InputError, IntegrityError, UnknownNameError
from enginesmith.core.text import join_first, pluralize
from enginesmith.registry.evidence.canaries import CanaryVerdict, canaries
from enginesmith.registry.rollouts.reports import MOST_REPORTERS, Heard, NodeReport, next_share, read_reports
from enginesmith.registry.rollouts.rollout_state import Rollout, count_time, open_wave, parse_time, raise_reach
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.channel_writes import change_rollout, clear_marks, read_rollout, running_rollouts
from enginesmith.registry.versions.policies import CanaryPass, canary_pass
from validation.canary.judging.judge import level_of
from validation.statistics import rates

# Judges the gates of a wave: each passes, fails (the rollout is halted), or waits, with the reason in words.
#
# A share of failing nodes or requests fails its gate as soon as it is shown to be over the limit: by the exact lower
# bound of Clopper and Pearson (`validation.statistics.rates`), at the level that alpha spending allows for this look of
# the wave (`judging.judge.level_of`: Lan & DeMets, with the boundaries of O'Brien & Fleming); and where every node that
# reports fails, as soon as so many do not by chance. The first nodes of these are among the later ones, so that one
# level holds for all looks. Together a version at its limit is halted in at most 5 % of waves. At the wave's end the
# share itself decides, and as long as it is over the limit the gate waits. Requests of
# one node fail together, so errors are divided by their design effect between nodes (Korn & Graubard, 1998).

# The error of looks, and of waves in which all that report fail: 5 % together.
ALPHA, ALL_ALPHA = 0.045, 0.005
# Fewer nodes have too much in common to be taken for all.
LEAST_ALL = 3
# Looks of a wave that the error is spent on; more looks within one of these parts share its level.
MOST_LOOKS = 10


@dataclass(frozen=True)
class GateResult:
    """The result of a gate.  name: health, errors, canary or person."""

    name: str
    verdict: Literal["pass", "wait", "fail"]
    why: str


@dataclass(frozen=True)
class Moment:
    """How far a wave is. level: of the test at this look.  is_over: whether it has lasted as long as it must."""

    now: datetime
    level: float
    is_over: bool


def moment_of(rollout: Rollout, now: datetime) -> Moment:
    """The state of the open wave at `now`; as at its first look before all of the wave is reached."""
    soak_s = rollout.plan.soaks_s[rollout.wave]
    looks = min(MOST_LOOKS, max(1, soak_s // max(1, rollout.plan.look_s)))
    passed_s = (now - parse_time(rollout.soaking)).total_seconds() if rollout.soaking else 0.0
    is_over = rollout.soaking is not None and passed_s >= soak_s
    look_number = looks if is_over else min(looks, 1 + int(max(0.0, passed_s) / soak_s * looks)) if soak_s else 1
    return Moment(now, level_of([number / looks for number in range(1, look_number + 1)], ALPHA), is_over)


def judge_gates(
    rollout: Rollout, heard: Heard, verdicts: Sequence[CanaryVerdict], now: datetime
) -> tuple[GateResult, ...]:
    """The result of each gate of the open wave. verdicts: all canaries of the version.  rollout: the open one.  heard:
    reports of nodes.  now: by the store's clock."""
    gates, moment = rollout.plan.gates, moment_of(rollout, now)
    gate_results = list[GateResult]()
    if gates.health_ppm is not None:
        gate_results.append(_health(rollout, heard, moment, gates.health_ppm))
    if gates.errors_ppm is not None:
        gate_results.append(_errors(heard.reports, moment, gates.errors_ppm))
    if gates.canary:
        gate_results.append(_canary(rollout, verdicts))
    if gates.approve:
        is_approved = rollout.approved > rollout.wave
        reason = "approved" if is_approved else f"waits for `enginesmith rollout resume {rollout.where}`"
        gate_results.append(GateResult("person", "pass" if is_approved else "wait", reason))
    if rollout.waived <= rollout.wave:
        return tuple(gate_results)
    # A user has approved the open wave without data: waiting gates pass. Failing gates still fail.
    return tuple(
        replace(gate, verdict="pass", why=f"{gate.why} (waived)") if gate.verdict == "wait" else gate
        for gate in gate_results
    )


def _health(rollout: Rollout, heard: Heard, moment: Moment, least_ppm: int) -> GateResult:
    failures = [report for report in heard.reports if report.failure]
    silent_count = sum(report.is_silent(moment.now) for report in heard.reports if not report.failure)
    count, limit = len(heard.reports), 1 - least_ppm / 1e6
    if count == 0:
        return GateResult("health", "wait", "no reports from nodes of the wave")
    lower_bound, limit_text = rates.lower(len(failures), count, moment.level), f"at most {limit:.4g} may"
    failing_text = f"{len(failures)} of {count} reporting nodes failed"
    all_fail = len(failures) == count >= LEAST_ALL and limit**count <= ALL_ALPHA
    too_many = len(failures) > limit * count
    if failures and (lower_bound > limit or all_fail or (moment.is_over and too_many)):
        details = join_first([f"{report.node} {report.failure}: {report.detail}" for report in failures], 3, "; ")
        return GateResult("health", "fail", f"{failing_text}, {limit_text}: {details}")
    if count < rollout.plan.gates.least_reports:
        return GateResult("health", "wait", f"{failing_text}; {rollout.plan.gates.least_reports} must report")
    if too_many:
        return GateResult("health", "wait", f"{failing_text}, {limit_text}; more reports or the wave's end decide")
    if silent_count > limit * count:
        return GateResult(
            "health", "wait", f"{failing_text}, and {pluralize(silent_count, 'node')} went silent; {limit_text}"
        )
    return GateResult("health", "pass", failing_text)


def _errors(reports: Sequence[NodeReport], moment: Moment, most_ppm: int) -> GateResult:
    pairs = [(report.errors, report.requests) for report in reports if report.requests and report.errors is not None]
    request_count = sum(total for _, total in pairs)
    if not request_count:
        return GateResult("errors", "wait", "no node says how many requests it answered")
    error_count, limit = sum(min(count, total) for count, total in pairs), most_ppm / 1e6
    effect = design_effect([(min(count, total), total) for count, total in pairs])
    lower_bound = rates.lower(error_count / effect, request_count / effect, moment.level)
    error_text = (
        f"{error_count} of {request_count} requests failed on {pluralize(len(pairs), 'node')}; at most {limit:.4g} may"
    )
    too_many = error_count > limit * request_count
    if error_count and (lower_bound > limit or (moment.is_over and too_many)):
        return GateResult("errors", "fail", error_text)
    return GateResult("errors", "wait" if too_many else "pass", error_text)


def design_effect(pairs: Sequence[tuple[int, int]]) -> float:
    """The variance of failures between nodes over that of independent requests, at least 1. pairs: failed, all."""
    failure_count, total = (sum(pair[index] for pair in pairs) for index in (0, 1))
    share = failure_count / total if total else 0.0
    if len(pairs) < 2 or share in (0.0, 1.0):
        return 1.0
    squares = sum((count - share * size) ** 2 / (size * share * (1 - share)) for count, size in pairs)
    return max(1.0, squares / (len(pairs) - 1))


def _canary(rollout: Rollout, verdicts: Sequence[CanaryVerdict]) -> GateResult:
    base_verdicts = [verdict for verdict in verdicts if verdict.baseline == rollout.base_manifest]
    for verdict in base_verdicts:
        if verdict.verdict == "FAIL":
            return GateResult("canary", "fail", f"FAIL on {verdict.target} against {verdict.against}: {verdict.reason}")
    passed_targets = [verdict.target for verdict in base_verdicts if verdict.verdict == "PASS"]
    if passed_targets:
        return GateResult("canary", "pass", f"PASS on {', '.join(passed_targets)}")
    return GateResult("canary", "wait", f"there is no PASS of {rollout.version} against {rollout.base}")


# The controller of rollouts: one poll of a channel's rollout, which decides and writes at most one step.
#
# A step is one write of the channel's state, by compare-and-swap, and that is what nodes read. So several controllers
# do no harm, and one that is killed anywhere leaves the state before its step or after it.

CONTROLLER = "controller"


@dataclass(frozen=True)
class Advance:
    """The result of a poll. action: 'waiting', 'raised', 'wave', 'done', 'halted', 'aborted', 'paused', or 'beaten' if
    another writer was faster. why: in words.  gates, heard: results of gates and reports of nodes at this poll.
    is_made: whether this poll wrote a decision; no other poll wrote the same one.  rollout: as it is afterwards."""

    rollout: Rollout
    action: str
    why: str
    gates: tuple[GateResult, ...] = ()
    heard: Heard = field(default_factory=Heard)
    is_made: bool = False


def advance(store: Store, model: str, channel: str, who: str = CONTROLLER) -> Advance | None:
    """Poll a channel's rollout and make the step that is due, by the store's clock; None where there is none.

    Raises IntegrityError for a damaged document, UnavailableError where the registry is out of reach; both change
    nothing that nodes follow.
    """
    old_rollout = read_rollout(store, model, channel)
    if old_rollout is None:
        clear_marks(store, model, channel)
        return None
    now = store.now()  # after the rollout was read (`count_time`)
    decision = _decide(store, old_rollout, now, who)
    if decision.rollout != old_rollout:
        try:
            if decision.action == "done" and (refusal := _promote(store, old_rollout, decision, who)):
                decision = _halt(
                    old_rollout, now, who, f"the promotion was refused: {refusal}", decision.gates, decision.heard
                )
            if decision.action != "done":
                change_rollout(store, old_rollout, decision.rollout)
        except ConflictError:
            stored_rollout = read_rollout(store, old_rollout.model, old_rollout.channel) or old_rollout
            return Advance(stored_rollout, "beaten", f"another writer was first: {stored_rollout.history[-1].what}")
        decision = replace(decision, is_made=decision.rollout.history != old_rollout.history)
    clear_marks(store, model, channel)
    return decision


def _promote(store: Store, before: Rollout, step: Advance, who: str) -> str:
    """Promote the channel, which ends its rollout; returns the reason of a refusal, '' if it is done.

    Raises ConflictError where another writer was faster, UnavailableError.
    """
    try:
        manifest = lookup.load(store, before.model, before.version)
        channels.promote(
            store,
            manifest,
            before.channel,
            by=before.history[0].by or who,
            why=f"rollout {before.id}: {step.why}"[:500],
            proven_only=before.proven_only,
            random_inputs=before.random_inputs,
            canaries=passes_of(store, before),
            counts=require(store, manifest).counts,
            ending=(before, step.rollout),
            accepted_losses=before.losses,
        )
    except (InputError, IntegrityError) as error:
        return str(error)
    return ""


def _decide(store: Store, rollout: Rollout, now: datetime, who: str) -> Advance:
    """The step that is due, not written yet."""
    if rollout.is_finished:
        return Advance(rollout, rollout.state, rollout.history[-1].why)
    rollout = count_time(rollout, now)
    node_reports = read_reports(store, rollout)
    try:
        manifest = lookup.load(store, rollout.model, rollout.version)
        if manifest.digest != rollout.manifest:
            raise IntegrityError(f"{rollout.model}@{rollout.version} has another manifest now")
        gates = judge_gates(rollout, node_reports, canaries(store, manifest), now)
    except (IntegrityError, UnknownNameError) as error:
        return _halt(rollout, now, who, f"the new version or its canaries cannot be read: {error}", (), node_reports)
    if failed_gates := [gate for gate in gates if gate.verdict == "fail"]:
        reason = "; ".join(f"{gate.name}: {gate.why}" for gate in failed_gates)
        return _halt(rollout, now, who, reason, gates, node_reports)
    if rollout.state == "paused":
        return Advance(rollout, "paused", rollout.history[-1].why, gates, node_reports)
    share_ppm = rollout.reporters_ppm  # fewer nodes report, where too many do
    rollout = replace(rollout, reporters_ppm=min(share_ppm, next_share(share_ppm, node_reports.nodes)))
    return _go_on(rollout, now, who, gates, node_reports)


def _halt(rollout: Rollout, now: datetime, who: str, why: str, gates: tuple[GateResult, ...], heard: Heard) -> Advance:
    """The halted rollout: every node returns to what the channel serves."""
    return Advance(rollout.decide(now, "halted", who, why, state="halted"), "halted", why, gates, heard)


def _go_on(rollout: Rollout, now: datetime, who: str, gates: tuple[GateResult, ...], heard: Heard) -> Advance:
    """The next step of the open wave, the next wave, the promotion; or nothing, with what it waits for."""
    if not rollout.is_open:
        due_at = _since(rollout, now) + timedelta(seconds=rollout.plan.look_s)
        if now < due_at:
            reason = f"{_reached(rollout)}; the next step is due at {due_at:%H:%M:%S}"
            return Advance(rollout, "waiting", reason, gates, heard)
        raised_rollout = raise_reach(rollout)
        return Advance(raised_rollout, "raised", _reached(raised_rollout), gates, heard)
    if not moment_of(rollout, now).is_over:
        wave_end = _since(rollout, now) + timedelta(seconds=rollout.plan.soaks_s[rollout.wave])
        return Advance(rollout, "waiting", f"wave {rollout.target} until {wave_end:%H:%M:%S} at least", gates, heard)
    if waiting_gates := [gate for gate in gates if gate.verdict == "wait"]:
        reason = "; ".join(f"{gate.name}: {gate.why}" for gate in waiting_gates)
        if any(gate.name != "person" for gate in waiting_gates):
            reason += f" (`enginesmith rollout resume {rollout.where} --without-data` ends the wave without data)"
        return Advance(rollout, "waiting", reason, gates, heard)
    reason = join_first([f"{gate.name}: {gate.why}" for gate in gates], 4, "; ") or "its time is over"
    if rollout.wave + 1 == len(rollout.plan.waves):
        return Advance(rollout.decide(now, "done", who, reason, state="done"), "done", reason, gates, heard)
    next_rollout = _foresee_reports(open_wave(rollout, rollout.wave + 1, now), rollout, heard)
    return Advance(next_rollout.decide(now, f"wave {next_rollout.target}", who, reason), "wave", reason, gates, heard)


def _since(rollout: Rollout, now: datetime) -> datetime:
    return parse_time(rollout.since) if rollout.since else now


def _reached(rollout: Rollout) -> str:
    return f"reached: {', '.join(map(str, rollout.reach)) or 'nobody'}"


def _foresee_reports(next_rollout: Rollout, before: Rollout, heard: Heard) -> Rollout:
    """The same before a wave that reaches more nodes: by the growth of its share, where that is known."""
    old_aim, new_aim = before.aim, next_rollout.aim
    if (old_aim.region, old_aim.label) != (new_aim.region, new_aim.label) or not heard.nodes:
        return next_rollout
    node_count = heard.nodes * new_aim.share_ppm / old_aim.share_ppm
    max_ppm = max(1, int(next_rollout.reporters_ppm * MOST_REPORTERS / node_count))
    return replace(next_rollout, reporters_ppm=min(next_rollout.reporters_ppm, max_ppm))


def passes_of(store: Store, rollout: Rollout) -> list[CanaryPass]:
    """The canaries that a version passed against what the channel serves, for the policy and the channel's history."""
    manifest = lookup.load(store, rollout.model, rollout.version)
    base_verdicts = [verdict for verdict in canaries(store, manifest) if verdict.baseline == rollout.base_manifest]
    failed_targets = {verdict.target for verdict in base_verdicts if verdict.verdict == "FAIL"}
    return [
        canary_pass(store, verdict.report)
        for verdict in base_verdicts
        if verdict.verdict == "PASS" and verdict.target not in failed_targets
    ]


# Follows rollouts: polls each repeatedly, and says what was done. A model that is damaged stops no other.

Where = tuple[str, str]
# Seconds between two polls.
INTERVAL_S = 15.0


@dataclass
class RolloutFollower:
    """Polls the rollouts of `chosen` (model, channel); None: all that are not finished.

    say: called with what is new.  on_step: called with each step that this process made.
    """

    store: Store
    chosen: Sequence[Where] | None
    say: Callable[[str], object]
    on_step: Callable[[Advance], object] = lambda _: None
    last: dict[Where, Advance] = field(default_factory=dict)
    failures: dict[Where, str] = field(default_factory=dict)

    def look(self) -> bool:
        """Poll each once; whether one is not finished. Raises UnavailableError where the store does not answer."""
        is_running = False
        for channel_key in self.chosen or running_rollouts(self.store):
            try:
                decision = advance(self.store, *channel_key)
            except EnginesmithError as error:
                is_running = True
                self._tell(channel_key, f"cannot be read: {error}")
                self.failures[channel_key] = str(error)
                continue
            self.failures.pop(channel_key, None)
            if decision is not None:
                is_running = is_running or not decision.rollout.is_finished
                self._take(channel_key, decision)
        return is_running

    def _take(self, place: Where, step: Advance) -> None:
        last_step = self.last.get(place)
        if last_step is None or (last_step.action, last_step.why) != (step.action, step.why):
            self._tell(place, f"{step.action}: {step.why}")
        self.last[place] = step
        if step.is_made:
            self.on_step(step)

    def _tell(self, place: Where, text: str) -> None:
        if self.failures.get(place) is None or not text.endswith(self.failures[place]):
            self.say(f"{place[0]}:{place[1]}: {text}")

    def run(self, interval_s: float, lasts_s: float | None = None, forever: bool = False) -> None:
        """Poll until all are finished, or `lasts_s` seconds have passed. forever: wait for what starts later."""
        end = None if lasts_s is None else monotonic() + lasts_s
        while True:
            try:
                is_running = self.look()
            except EnginesmithError as error:
                is_running = True
                self.say(f"rollouts cannot be read: {error}")
            is_over = end is not None and monotonic() + interval_s > end
            if is_over or not (is_running or forever):
                return
            Event().wait(interval_s)
