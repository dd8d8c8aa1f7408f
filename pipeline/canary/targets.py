"""What canaries found of a version on each target that counts for a channel, and why a verdict is missing."""

from dataclasses import dataclass

from enginery.core.names import check_model, check_version
from enginery.registry.evidence.attestations import judge_entries
from enginery.registry.evidence.canaries import (
    UNKNOWN,
    CanaryVerdict,
    attach_canary,
    canaries,
    canary_target,
    covers,
    list_served,
    verdict_on,
)
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.versions import lookup, policies
from enginery.registry.versions.channels import Channel
from validation.canary.report import CanaryReport

MISSING = "MISSING"


@dataclass(frozen=True)
class TargetVerdict:
    """A target and its verdict: PASS, FAIL, INSUFFICIENT or MISSING. report: digest of the report's blob."""

    target: str
    verdict: str
    reason: str
    report: str | None = None

    def __str__(self) -> str:
        return f"{self.target} {self.verdict}: {self.reason}"


def attach(store: Store, found: CanaryReport, blob: str) -> CanaryVerdict:
    """Put a canary's verdict beside the version it is about. blob: digest of its report's blob.

    Raises UnknownNameError for a version that is not there, InputError for an engine that it does not have, or a report
    that does not say what was compared.
    """
    named = found.candidate
    manifest = lookup.load(store, check_model(named.model or ""), check_version(named.version or ""))
    unit = " ".join(part or "?" for part in (named.target, named.precision, named.backend))
    verdict = CanaryVerdict(
        target=found.target or UNKNOWN,
        verdict=found.verdict,
        reason=found.reason[:1000],
        engine=named.engine or "",
        unit=unit,
        baseline=found.baseline.manifest or "",
        against=found.baseline.version or "",
        report=blob,
        created_at=found.created_at,
    )
    attach_canary(store, manifest, verdict)
    return verdict


def targets_that_count(store: Store, channel: Channel) -> tuple[str, ...]:
    """Targets whose verdicts count for a channel: those of its policy, else all that it serves today."""
    if named := policies.of_channel(store, channel.model, channel.name).canary_on:
        return named
    return _targets(store, lookup.load(store, channel.model, channel.version), channel.proven_only)


def target_verdicts(store: Store, candidate: Manifest, channel: Channel) -> list[TargetVerdict]:
    """The verdict on each target that counts, of the candidate against what the channel serves now."""
    found = canaries(store, candidate)
    served_now = lookup.load(store, channel.model, channel.version)
    sides = [_targets(store, manifest, channel.proven_only) for manifest in (candidate, served_now)]
    return [_target_verdict(name, candidate, channel, found, sides) for name in targets_that_count(store, channel)]


def _target_verdict(
    target: str, candidate: Manifest, channel: Channel, found: list[CanaryVerdict], sides: list[tuple[str, ...]]
) -> TargetVerdict:
    """sides: targets that the candidate, and what the channel serves now, have an engine for."""
    if verdict := verdict_on(target, channel.manifest, found):
        return TargetVerdict(target, verdict.verdict, verdict.reason, verdict.report)
    proven = " proven" if channel.proven_only else ""
    reference, where = f"{candidate.model}@{candidate.version}", f"{channel.model}:{channel.name}"
    built, compared = (
        any(covers(name, target) or (name == "cpu" and covers(target, name)) for name in has) for has in sides
    )
    if not built:
        remedy = "build one, promote by hand, or name the targets that count"
        policy = f"`enginery policy set {where} --canary-on TARGETS`"
        return TargetVerdict(target, MISSING, f"{reference} has no{proven} engine for it; {remedy}: {policy}")
    if not compared:
        remedy = "promote by hand under a policy that does not name it"
        lacks = f"{where} serves {channel.model}@{channel.version}, which has no{proven} engine for it"
        return TargetVerdict(target, MISSING, f"{lacks}, so there is nothing to compare with; {remedy}")
    by_hand = f"`enginery canary run --candidate {reference} --baseline {where} --traffic FILE --attach`"
    remedy = (
        "a deployment `canary` for that hardware brings it (`enginery deploy --only canary`, for Ray with `--on`; in "
        f"the chart a group of `gpuGroups`), or on such a node {by_hand}"
    )
    return TargetVerdict(target, MISSING, f"no canary ran there against {channel.version}; {remedy}")


def _targets(store: Store, manifest: Manifest, proven_only: bool) -> tuple[str, ...]:
    entries = list_served(judge_entries(store, manifest), proven_only)
    return tuple(sorted({canary_target(entry.hardware) for entry in entries}))
