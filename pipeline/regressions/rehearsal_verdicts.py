"""What a rehearsed upgrade says: the trials of each unit, the verdicts, the plan, and how the plan is carried out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.parsing import user
from enginesmith.core.reports.latency import MachineKind
from enginesmith.core.reports.proof import PASSED, approve
from enginesmith.core.text import join_first
from enginesmith.registry.manifest import EngineEntry, Manifest, make_request
from enginesmith.registry.versions.channel_state import Channel
from enginesmith.registry.versions.channels import promote
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import recall_engine
from pipeline.operations.refit import RenewedEngine, publish_again
from pipeline.operations.validate import read_report
from pipeline.regressions.check import judge_pair
from pipeline.regressions.findings import BucketTimes, EnginePair, MetricPair
from pipeline.regressions.pairs import CheckOptions

Decision = Literal["moves", "stays", "unknown"]
# 6 dB is twice the error. The weights are equal, so engines of two toolchains should differ by less.
MOST_SQNR_LOSS_DB = 6.0
# A version, and the channels that serve it.
Served = tuple[Manifest, tuple[Channel, ...]]


@dataclass(frozen=True)
class Trial:
    """An engine of a unit on this machine. status, reason: of its proof here, or why there is none.

    report: digest of the report on that proof, a blob.
    sqnr_db: of the engine against its graph, as the toolchain in service runs that.  metrics: task metrics by name.
    median_s: at the opt sizes, from interleaved runs.
    """

    toolchain: Mapping[str, str]
    status: str
    reason: str = ""
    digest: str | None = None
    sqnr_db: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    median_s: float | None = None
    report: str | None = None


@dataclass(frozen=True)
class UnitRehearsal:
    """A unit with both toolchains. why: the reasons of the verdict.  times: of the new engine and the old one.
    version: whose unit it is."""

    version: str
    unit: str
    old: Trial
    new: Trial
    verdict: Decision
    why: str = ""
    times: BucketTimes | None = None


@dataclass(frozen=True)
class VersionPlan:
    """The channels that serve a version, the commands that move them, and those that take that back; no commands unless
    all units move that these channels serve."""

    version: str
    channels: tuple[str, ...]
    verdict: Decision
    commands: tuple[str, ...] = ()
    back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsed upgrade. pins: the versions that were asked for.  python: the interpreter that has them.  machine:
    this one.  created_at: ISO 8601, UTC.  units: with both toolchains.  plan: what to move."""

    pins: Mapping[str, str]
    python: str
    machine: MachineKind
    created_at: str
    units: tuple[UnitRehearsal, ...]
    plan: tuple[VersionPlan, ...]


def judge_trials(
    unit: str,
    old: Trial,
    new: Trial,
    times: BucketTimes | None,
    remarks: Sequence[str] = (),
    options: CheckOptions | None = None,
) -> tuple[Decision, str]:
    """Whether a unit moves to the new toolchain, and why not. remarks: why something was not measured.  unit: its name.
    old, new: what came of it with each toolchain.  times: None where both were not timed.  options: limits."""
    if new.status == "failed":
        return "stays", f"the new engine fails: {new.reason}"
    if new.status not in PASSED:
        return "unknown", new.reason
    options = options or CheckOptions()
    metrics = tuple(
        MetricPair(name, new.metrics.get(name), value, options.allowed_loss(name, value))
        for name, value in old.metrics.items()
    )
    pair_times = (times,) if times else ()
    pair = EnginePair(unit, "old toolchain", False, False, metrics, (), pair_times, tuple(remarks))
    findings = list(judge_pair(pair, options, judged_by_metric=True))
    if errors := [finding.message for finding in findings if finding.level == "error"]:
        return "stays", join_first(errors, 2, "; ")
    warning_texts = [finding.message for finding in findings if finding.level == "warning"]
    if old.sqnr_db is not None and (new.sqnr_db is None or new.sqnr_db < old.sqnr_db - MOST_SQNR_LOSS_DB):
        warning_texts.insert(0, "its SQNR is worse by more than 6 dB, which no limit or metric of the spec forbids")
    if warning_texts:
        return "unknown", join_first(warning_texts, 2, "; ")
    return ("moves", "") if times else ("unknown", f"not timed, because the engine in service fails: {old.reason}")


def plan_version(
    manifest: Manifest, channels: tuple[Channel, ...], units: Sequence[UnitRehearsal], words: str
) -> VersionPlan:
    """What brings a version to its channels with the new toolchain, and what takes it back. Units that no channel
    serves, because they are not proven, hold nobody up. words: the options of the rehearsal."""
    name, names = manifest.reference, tuple(channel.name for channel in channels)
    proven_only = bool(channels) and all(channel.proven_only for channel in channels)
    verdicts = {unit.verdict for unit in units if not proven_only or unit.old.status in PASSED}
    if verdicts != {"moves"}:
        return VersionPlan(name, names, "stays" if "stays" in verdicts else "unknown")
    rollbacks = tuple(f"enginesmith rollback {manifest.model}:{channel_name}" for channel_name in names)
    return VersionPlan(name, names, "moves", (f"enginesmith rehearse {name} {words} --apply",), rollbacks)


@dataclass(frozen=True)
class Applied:
    """A version that was published with the engines that move. channels: name -> why it did not move there; '' where it
    did."""

    before: str
    version: str
    channels: Mapping[str, str]


def apply(rehearsal: Rehearsal, versions: Sequence[Served], context: RunContext) -> list[Applied]:
    """Publish each version that moves again, with its new engines and what was measured of them, and bring it to the
    channels that serve it; what a channel's policy asks for holds. Repeated, it publishes and moves nothing again.

    Raises as `publish`."""
    moving_versions = {plan.version for plan in rehearsal.plan if plan.verdict == "moves"}
    reason = "rehearsed with " + ", ".join(f"{name} {version}" for name, version in rehearsal.pins.items())
    moves = list[Applied]()
    for manifest, channels in versions:
        if (name := manifest.reference) not in moving_versions:
            continue
        units = {unit.unit: unit.new for unit in rehearsal.units if unit.version == name and unit.verdict == "moves"}
        new_engines = [_renew(entry, units[entry.unit], context) for entry in manifest.engines if entry.unit in units]
        publication = publish_again(manifest, new_engines, [], "rehearsed", context, why=reason)
        refusals = {}
        for channel in channels:
            try:
                promote(
                    context.store,
                    publication.manifest,
                    channel.name,
                    by=user(),
                    why=reason,
                    proven_only=channel.proven_only,
                    random_inputs=channel.move.random_inputs,
                )
            except InputError as error:
                refusals[channel.name] = str(error)
        moves.append(
            Applied(name, publication.version, {channel.name: refusals.get(channel.name, "") for channel in channels})
        )
    return moves


def _renew(entry: EngineEntry, trial: Trial, context: RunContext) -> RenewedEngine:
    """A unit with the engine of a trial. Raises IntegrityError where that is gone from the registry."""
    request = replace(make_request(entry), toolchain=tuple(sorted(trial.toolchain.items())))
    record = recall_engine(request, context)
    approval = approve(read_report(str(trial.report), context.store))
    if record is None or record.digest != trial.digest or approval is None:
        raise IntegrityError(f"{entry.unit}: its new engine is not in {context.store.uri} any more; rehearse again")
    report = approval.report
    new_entry = replace(
        entry,
        status=report.verdict,
        reason=report.reason,
        report=report.digest,
        checks=report.counts,
        sqnr_db=report.sqnr_db,
        toolchain=dict(request.toolchain),
        build_key=request.key,
        digest=record.digest,
        size_bytes=record.size_bytes,
        suffix=record.suffix,
        requires=record.requires,
        notes=record.notes,
    )
    return RenewedEngine(new_entry, approval, record)
