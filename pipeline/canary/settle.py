"""Automatic actions of canary verdicts on a channel: promote, roll back, or no change.

A version is promoted once it has a PASS, against what the channel serves, on each target that counts for the channel.
If the channel's policy requires waves, a rollout of it is started, once.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from enginesmith.core.errors import ConflictError, InputError, UnknownNameError
from enginesmith.core.names import check_channel, check_model, check_version
from enginesmith.core.parsing import user
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.canaries import (
    UNKNOWN,
    CanaryVerdict,
    attach_canary,
    canaries,
    canary_target,
    covers,
    list_served,
    verdict_on,
)
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.rollout_state import parse_time
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import canary_key, evidence_prefix
from enginesmith.registry.trust import require
from enginesmith.registry.versions import channel_state, channels, lookup, policies
from enginesmith.registry.versions.channel_state import Channel, position_of, read_history
from pipeline.canary.verdicts import canary_passes, roll_back
from pipeline.rollout.operations import Operator, start
from validation.canary.report import MOST_BYTES, CanaryReport, read_report

MISSING = "MISSING"
Say = Callable[[str], None]


@dataclass(frozen=True)
class TargetVerdict:
    """A target and the verdict on it: PASS, FAIL, INSUFFICIENT or MISSING. report: digest of the report's blob."""

    target: str
    verdict: str
    reason: str
    report: str | None = None

    def __str__(self) -> str:
        return f"{self.target} {self.verdict}: {self.reason}"


def attach(store: Store, report: CanaryReport, blob: str) -> CanaryVerdict:
    """Attach a canary's verdict to the version that it is about. blob: digest of its report's blob.

    Raises UnknownNameError for a version that is not there, InputError for an engine that it does not have, or a report
    that does not say what was compared.
    """
    identity = report.candidate
    manifest = lookup.load(store, check_model(identity.model or ""), check_version(identity.version or ""))
    unit = " ".join(name or "?" for name in (identity.target, identity.precision, identity.backend))
    verdict = CanaryVerdict(
        target=report.target or UNKNOWN,
        verdict=report.verdict,
        reason=report.reason[:1000],
        engine=identity.engine or "",
        unit=unit,
        baseline=report.baseline.manifest or "",
        against=report.baseline.version or "",
        report=blob,
        created_at=report.created_at,
    )
    attach_canary(store, manifest, verdict)
    return verdict


def targets_that_count(store: Store, channel: Channel) -> tuple[str, ...]:
    """Targets whose verdicts count for a channel: the targets in its policy, else all that it serves now."""
    if canary_targets := policies.of_channel(store, channel.model, channel.name).canary_on:
        return canary_targets
    return _targets(store, lookup.load(store, channel.model, channel.version), channel.proven_only)


def target_verdicts(store: Store, candidate: Manifest, channel: Channel) -> list[TargetVerdict]:
    """The verdict on each target that counts, of the candidate against what the channel serves now."""
    verdicts = canaries(store, candidate)
    served_manifest = lookup.load(store, channel.model, channel.version)
    targets = [_targets(store, manifest, channel.proven_only) for manifest in (candidate, served_manifest)]
    return [_target_verdict(name, candidate, channel, verdicts, targets) for name in targets_that_count(store, channel)]


def _target_verdict(
    target: str, candidate: Manifest, channel: Channel, verdicts: list[CanaryVerdict], sides: list[tuple[str, ...]]
) -> TargetVerdict:
    """The verdict on one target, or MISSING with the remedy.

    sides: targets that the candidate has an engine for, and those that the version in service has one for.
    """
    if verdict := verdict_on(target, channel.manifest, verdicts):
        return TargetVerdict(target, verdict.verdict, verdict.reason, verdict.report)
    status = " proven" if channel.proven_only else ""
    reference, channel_text = candidate.reference, f"{channel.model}:{channel.name}"
    has_engine, has_baseline = (
        any(covers(name, target) or (name == "cpu" and covers(target, name)) for name in targets) for targets in sides
    )
    if not has_engine:
        reason = (
            f"{reference} has no{status} engine for it; build one, promote by hand, or name the targets that count: "
            f"`enginesmith registry policy set {channel_text} --canary-on TARGETS`"
        )
    elif not has_baseline:
        reason = (
            f"{channel_text} serves {channel.model}@{channel.version}, which has no{status} engine for it, so there is "
            "nothing to compare with; promote by hand under a policy that does not name it"
        )
    else:
        reason = (
            f"no canary ran there against {channel.version}; a deployment `canary` for that hardware brings it "
            "(`enginesmith prefect deploy --only canary`, for Ray with `--on`; in the chart a group of `gpuGroups`), "
            "or on such a "
            f"node `enginesmith canary run --candidate {reference} --baseline {channel_text} --traffic FILE --attach`"
        )
    return TargetVerdict(target, MISSING, reason)


def _targets(store: Store, manifest: Manifest, proven_only: bool) -> tuple[str, ...]:
    entries = list_served(judge_entries(store, manifest), proven_only)
    return tuple(sorted({canary_target(entry.hardware) for entry in entries}))


def settle(store: Store, model: str, channel: str, report: str, say: Say) -> str:
    """Act on a new verdict and the verdicts on the other targets. Returns a line that describes the action.

    A FAIL rolls its candidate back where it is served already. A PASS promotes the candidate once every target that
    counts (`targets_that_count`) has one. report: digest of the blob of the canary's report.

    Raises IntegrityError for a report that is lost or damaged, InputError for one about another model, UntrustedError
    where the trust policy asks for more.
    """
    canary_report = read_report(store.read_blob(report, MOST_BYTES))
    if (report_model := canary_report.candidate.model) != model:
        raise InputError(f"canary report {report} is about {report_model}, not about {model}; no channel was moved")
    hardware = attach(store, canary_report, report).target
    live_channel = channel_state.read_channel(store, check_model(model), check_channel(channel))
    if live_channel is None:
        return f"{model}:{channel} serves nothing; there is nothing to move"
    candidate = lookup.load(store, model, str(canary_report.candidate.version))
    if canary_report.verdict == "FAIL" and live_channel.manifest == candidate.digest:
        targets = targets_that_count(store, live_channel)
        if any(covers(hardware, target) for target in targets):
            return _roll_back(store, report, channel)
        return f"FAIL on {hardware}, which does not count for {model}:{channel} ({', '.join(targets)} do); not moved"
    return _advance(store, candidate, live_channel, say)


def settle_newest(store: Store, model: str, channel: str, say: Say) -> str:
    """Act on verdicts in the registry whose events were lost. Returns a line that describes the action.

    What the channel serves is rolled back where it has a FAIL (`_find_fail`); else the newest version is promoted as in
    `settle`: one that could not be promoted when its verdict came may be promotable by now.

    Raises UnknownNameError for no such model, UntrustedError as `settle`.
    """
    live_channel = channel_state.read_channel(store, check_model(model), check_channel(channel))
    versions = lookup.versions(store, model)
    if not versions:
        raise UnknownNameError(f"no model {model!r} in {store.uri}; `enginesmith list` shows what there is")
    if live_channel is None:
        return f"{model}:{channel} serves nothing; there is nothing to move"
    failing_verdict = _find_fail(store, live_channel)
    rollback_text = _roll_back(store, failing_verdict.report, channel) if failing_verdict else ""
    if failing_verdict and channel_state.read_channel(store, model, channel) != live_channel:
        return rollback_text
    advance_text = _advance(store, lookup.load(store, model, versions[-1]), live_channel, say)
    return f"{rollback_text}; {advance_text}" if rollback_text else advance_text


def _find_fail(store: Store, serving: Channel) -> CanaryVerdict | None:
    """The newest FAIL of what a channel serves, on a target that counts, against a version that it served before.

    One from before the promotion, by the store's clock, does not count: whoever promoted could see it.
    """
    history = read_history(store, serving)
    if history.previous() is None:
        return None
    *earlier_promotions, promotion = history.active_promotions()
    verdicts = canaries(store, lookup.load(store, serving.model, serving.version))
    counted_targets = targets_that_count(store, serving) if verdicts else ()
    attach_times = dict(store.stamps(evidence_prefix("canaries", serving.model, serving.version))) if verdicts else {}
    promoted_at = parse_time(promotion.at)
    fail_verdicts = [
        verdict
        for verdict in verdicts
        if verdict.verdict == "FAIL"
        and attach_times[canary_key(serving.model, serving.version, verdict.target, verdict.report)] >= promoted_at
        and verdict.baseline in {move.manifest for move in earlier_promotions}
        and any(covers(verdict.target, target) for target in counted_targets)
    ]
    return max(fail_verdicts, key=lambda verdict: verdict.created_at, default=None)


def _roll_back(store: Store, report: str, channel: str) -> str:
    """As `verdicts.roll_back`, for the digest of a report's blob."""
    return roll_back(store, read_report(store.read_blob(report, MOST_BYTES)), channel, user())


def _advance(store: Store, candidate: Manifest, serving: Channel, say: Say) -> str:
    """Promote the candidate if every target that counts has a PASS against the served version. Returns a line for the
    user."""
    channel_text, version = f"{serving.model}:{serving.name}", candidate.version
    if serving.manifest == candidate.digest:
        return f"{channel_text} serves {version} already"
    history, rollout = read_history(store, serving), serving.active_rollout
    if any(move.manifest == candidate.digest for move in history.moves):
        return f"{channel_text} was not moved: it served {version} earlier; promote it by hand to serve it again"
    state_by_version = {entry.version: entry.state for entry in history.rollouts}
    if state := rollout.state if rollout and rollout.version == version else state_by_version.get(version):
        return f"{channel_text} was not moved: a rollout of {version} is {state}; another one starts only by hand"
    verdicts = target_verdicts(store, candidate, serving)
    blockers = [verdict for verdict in verdicts if verdict.verdict != "PASS"]
    if blockers or not verdicts:
        verdict_word = min(
            (verdict.verdict for verdict in blockers), key=("FAIL", "INSUFFICIENT", MISSING).index, default=MISSING
        )
        passes = [f"{verdict.target} PASS" for verdict in verdicts if verdict.verdict == "PASS"]
        verdict_text = (
            "; ".join([*map(str, blockers), *passes]) or f"{serving.version} serves no engine that could be compared"
        )
        return f"{verdict_word}: {channel_text} was not moved to {version}: {verdict_text}"
    return _promote(store, candidate, serving, [str(verdict.report) for verdict in verdicts], say)


def _promote(store: Store, candidate: Manifest, serving: Channel, reports: list[str], say: Say) -> str:
    model, version, channel, position = candidate.model, candidate.version, serving.name, position_of(serving)
    try:
        if plan := policies.of_channel(store, model, channel).rollout:
            operator = Operator(user(), store.now(), "canary PASS")
            start(store, candidate, channel, plan, operator, proven_only=serving.proven_only, decided_on=position)
            return f"rollout started: {model}:{channel} -> {version}, in {len(plan.waves)} waves"
        counts = require(store, candidate).counts
        with tempfile.TemporaryDirectory(prefix="enginesmith-canary-") as folder:
            paths = [Path(folder) / f"{digest}.json" for digest in dict.fromkeys(reports)]
            for path in paths:
                path.write_bytes(store.read_blob(path.stem))
            reason, passes = canary_passes(store, candidate, channel, paths, say)
        terms = channels.MoveTerms(proven_only=serving.proven_only, decided_on=position, counts=counts, canaries=passes)
        channels.promote(store, candidate, channel, by=user(), why=reason, **terms)
    except (InputError, ConflictError) as error:
        return f"PASS, and {model}:{channel} was not moved: {error}"
    # A FAIL attached before the promotion did not roll back, because the candidate was not served yet.
    for verdict in target_verdicts(store, candidate, serving):
        if verdict.verdict == "FAIL" and verdict.report:
            return _roll_back(store, verdict.report, channel)
    return f"promoted: {model}:{channel} -> {version}"
