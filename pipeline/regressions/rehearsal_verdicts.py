"""The result of a rehearsed upgrade: the trials of each unit, the verdicts, and the plan; and how the plan is
applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from enginesmith.core.errors import ConflictError, InputError, IntegrityError
from enginesmith.core.parsing import user
from enginesmith.core.reports.latency import MachineKind
from enginesmith.core.reports.proof import PASSED, approve
from enginesmith.core.state import PinnedGraph
from enginesmith.core.text import join_first
from enginesmith.registry.manifest import EngineEntry, Manifest, load_pinned, make_request, pinned_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import policies
from enginesmith.registry.versions.channel_state import Channel, position_of, read_channel, read_history
from enginesmith.registry.versions.channels import MoveTerms, promote
from pipeline.compile.ensembles.publication import EnsembleUnit
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import recall_engine
from pipeline.operations.refit import RenewedEngine, publish_again
from pipeline.operations.validate import read_report
from pipeline.regressions.check import judge_pair
from pipeline.regressions.findings import BucketTimes, EnginePair, MetricPair
from pipeline.regressions.pairs import CheckOptions
from pipeline.rollout.operations import Operator, start
from pipeline.values import Recorded

Decision = Literal["moves", "stays", "unknown"]
# 6 dB is twice the error. The weights are equal, so engines of two toolchains should differ by less.
MOST_SQNR_LOSS_DB = 6.0
# A version, and the channels that serve it.
Served = tuple[Manifest, tuple[Channel, ...]]
_REFUSALS = (InputError, ConflictError, IntegrityError)


@dataclass(frozen=True)
class Trial:
    """An engine of a unit on this machine. status, reason: of its proof here, or why there is none.

    report: digest of the proof's report, a blob.  sqnr_db: of the engine against its graph, which the toolchain in
    service runs.  metrics: task metrics by name.  median_s: at the opt sizes, from interleaved runs."""

    toolchain: Mapping[str, str]
    status: str
    reason: str = ""
    digest: str | None = None
    sqnr_db: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    median_s: float | None = None
    report: str | None = None

    @classmethod
    def of(cls, entry: EngineEntry) -> "Trial":
        """The recorded trial of a published engine."""
        return cls(entry.toolchain, entry.status, entry.reason, entry.digest)


@dataclass(frozen=True)
class UnitRehearsal:
    """A unit with both toolchains. why: the reasons of the verdict.  times: of the new engine and the old one.
    version: whose unit it is.  machine: where the new engine was tried; None where it was not."""

    version: str
    unit: str
    old: Trial
    new: Trial
    verdict: Decision
    why: str = ""
    times: BucketTimes | None = None
    machine: MachineKind | None = None

    @property
    def is_upgraded(self) -> bool:
        """Whether it moves to another toolchain, which may build the same engine, or to another engine."""
        is_same = self.new.toolchain == self.old.toolchain and self.new.digest == self.old.digest
        return self.verdict == "moves" and not is_same


@dataclass(frozen=True)
class VersionPlan:
    """The channels that serve a version, and the commands that move them: none unless all units move that these
    channels serve. notes: what is special about how a channel moves, or why it cannot.  busy_channels: those that
    refuse it while a rollout runs."""

    version: str
    channels: tuple[str, ...]
    verdict: Decision
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    busy_channels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsed upgrade. pins: the versions that were asked for.  python: the interpreter that has them; '' where all
    is on record.  machine: this one.  created_at: ISO 8601, UTC.  units: with both toolchains.  plan: what to move."""

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
    is_timed: bool = True,
) -> tuple[Decision, str]:
    """Whether a unit moves to the new toolchain, and why not. remarks: why something was not measured.  unit: its name.
    old, new: its trials with each toolchain.  times: None where both were not timed.  options: limits.  is_timed: False
    for an ensemble, whose graphs are timed."""
    if new.status == "failed":
        return "stays", f"the new engine fails: {new.reason}"
    if new.status not in PASSED:
        return "unknown", new.reason
    options = options or CheckOptions()
    metrics = tuple(
        MetricPair(name, new.metrics.get(name), value, options.allowed_loss(name, value))
        for name, value in old.metrics.items()
    )
    pair = EnginePair(unit, "old toolchain", False, False, metrics, (), (times,) if times else (), tuple(remarks))
    findings = list(judge_pair(pair, options, judged_by_metric=True))
    if errors := [finding.message for finding in findings if finding.level == "error"]:
        return "stays", join_first(errors, 2, "; ")
    warning_texts = [finding.message for finding in findings if finding.level == "warning"]
    if old.sqnr_db is not None and (new.sqnr_db is None or new.sqnr_db < old.sqnr_db - MOST_SQNR_LOSS_DB):
        warning_texts.insert(0, "its SQNR is worse by more than 6 dB, which no limit or metric of the spec forbids")
    if warning_texts:
        return "unknown", join_first(warning_texts, 2, "; ")
    if times or not is_timed:
        return "moves", ""
    return "unknown", f"not timed, because the engine in service fails: {old.reason}"


def plan_version(
    manifest: Manifest, channels: tuple[Channel, ...], units: Sequence[UnitRehearsal], words: str, store: Store
) -> VersionPlan:
    """The plan that brings a version to its channels with the new toolchain. Units that no channel serves, because they
    are not proven, block nothing. words: the options of the rehearsal."""
    name, channel_names = manifest.reference, tuple(channel.name for channel in channels)
    proven_only = bool(channels) and not manifest.graphs and all(channel.proven_only for channel in channels)
    verdicts = {unit.verdict for unit in units if not proven_only or unit.old.status in PASSED}
    if verdicts != {"moves"}:
        return VersionPlan(name, channel_names, "stays" if "stays" in verdicts else "unknown")
    if not any(unit.is_upgraded for unit in units):
        return VersionPlan(name, channel_names, "moves", notes=("its engines have this toolchain already",))
    notes = list[str]()
    for channel in channels:
        if rollout := channel.active_rollout:
            notes.append(f"{channel.name}: cannot move until the rollout of {rollout.version} ends")
        elif plan := policies.of_channel(store, manifest.model, channel.name).rollout:
            notes.append(f"{channel.name}: a rollout in waves {', '.join(map(str, plan.waves))}")
    busy_channels = tuple(channel.name for channel in channels if channel.active_rollout)
    can_move = not channels or len(busy_channels) < len(channels)
    commands = (f"enginesmith rehearse {name} {words} --apply",) if can_move else ()
    return VersionPlan(name, channel_names, "moves", commands, tuple(notes), busy_channels)


@dataclass(frozen=True)
class Applied:
    """A version that was published with the engines that move. channels: name -> why it did not move there; '' where it
    did, or where its rollout began.  rollouts: the channels that it comes to in waves.  refusal: why it was not
    published; '' where it was."""

    before: str
    version: str
    channels: Mapping[str, str]
    rollouts: tuple[str, ...] = ()
    refusal: str = ""


def apply(rehearsal: Rehearsal, served_versions: Sequence[Served], context: RunContext) -> list[Applied]:
    """Publish each version that moves again, with its new engines and their measurements, and move the channels that
    serve it. Channel policies apply, including their waves. A repeated call publishes and moves nothing.

    A refused version or channel does not stop the others. Raises UnavailableError."""
    moving_versions = {plan.version for plan in rehearsal.plan if plan.commands}
    reason = "rehearsed with " + ", ".join(f"{name} {version}" for name, version in rehearsal.pins.items())
    moves, store = list[Applied](), context.store
    for manifest, channels in served_versions:
        if manifest.reference in moving_versions:
            try:
                new_manifest = _publish(manifest, rehearsal, reason, context)
            except _REFUSALS as error:
                moves.append(Applied(manifest.reference, "", {}, refusal=str(error)))
                continue
            refusals, rollouts = dict[str, str](), list[str]()
            for channel in channels:
                try:
                    rollouts += [channel.name] if _bring(manifest, new_manifest, channel.name, reason, store) else []
                    refusals[channel.name] = ""
                except _REFUSALS as error:
                    refusals[channel.name] = str(error)
            moves.append(Applied(manifest.reference, new_manifest.version, refusals, tuple(rollouts)))
    return moves


def _bring(old: Manifest, new: Manifest, name: str, reason: str, store: Store) -> bool:
    """Bring a version to a channel; whether that is a rollout, as its policy asks for. old: what it serves.

    Raises ConflictError if it now serves another one, or was rolled back from the new one; else as `start` and
    `promote` do."""
    live, plan = read_channel(store, new.model, name), policies.of_channel(store, new.model, name).rollout
    if live is None or not {old.digest, new.digest} & live.served.keys():
        raise ConflictError(f"{new.model}:{name} now serves {live.version if live else 'nothing'}; rehearse again")
    if new.digest in live.served:
        return live.manifest != new.digest
    if end := _end_of(new, live, store):
        command = f"{'rollout start' if plan else 'promote'} {new.reference} {new.model}:{name}"
        command += " --proven-only" * live.proven_only + " --accept-random-inputs" * live.move.random_inputs
        raise ConflictError(f"{new.reference} was {end} there; to try it again: `enginesmith {command}`")
    terms = MoveTerms(decided_on=position_of(live), proven_only=live.proven_only, random_inputs=live.move.random_inputs)
    if plan:
        start(store, new, name, plan, Operator(user(), store.now(), reason), **terms)  # type: ignore[misc]
    else:
        promote(store, new, name, by=user(), why=reason, **terms)
    return plan is not None


def _end_of(manifest: Manifest, channel: Channel, store: Store) -> str | None:
    """How a channel lost a version: its last rollout 'halted' or 'aborted', or its last move; None where neither."""
    if (rollout := channel.rollout) and rollout.manifest == manifest.digest and rollout.state != "done":
        return rollout.state
    is_rollback = channel.move.action == "rollback"
    return "rolled back" if is_rollback and read_history(store, channel).moves[-2].manifest == manifest.digest else None


def _publish(manifest: Manifest, rehearsal: Rehearsal, reason: str, context: RunContext) -> Manifest:
    """The version with its new engines, itself where it has none. Of an ensemble, its graphs with theirs come first."""
    name, graphs, pins = manifest.reference, dict[str, Manifest](), list[PinnedGraph]()
    for graph in manifest.graphs:
        graphs[graph.name] = new = _publish(load_pinned(context.store, graph), rehearsal, reason, context)
        pins.append(replace(graph, version=new.version, manifest=new.digest))
    units = [unit for unit in rehearsal.units if unit.version == name and unit.verdict == "moves"]
    has_new_graphs = tuple(pins) != manifest.graphs
    trials = {unit.unit: unit.new for unit in units if has_new_graphs or unit.is_upgraded}
    new_engines = [
        _renew_whole(manifest, entry, trials[entry.unit], graphs, context)
        if graphs
        else renew(entry, trials[entry.unit], context)
        for entry in manifest.engines
        if entry.unit in trials
    ]
    base = replace(manifest, graphs=tuple(pins))
    publication = publish_again(base, new_engines, [], "rehearsed", context, why=reason) if new_engines else None
    return publication.manifest if publication else manifest


def _renew_whole(
    manifest: Manifest, entry: EngineEntry, trial: Trial, graphs: Mapping[str, Manifest], context: RunContext
) -> RenewedEngine:
    """A unit of an ensemble with the new engines of its graphs. Raises IntegrityError where they are not those of the
    trial."""
    engines = dict[str, EngineEntry]()
    for graph, _, engine in pinned_engines(context.store, manifest, entry):
        engines[graph.name] = next(peer for peer in graphs[graph.name].engines if peer.unit == engine.unit)
    new_entry = EnsembleUnit.of(entry, engines).stored_entry(entry.inputs, entry.outputs, context.store)
    return _approve(new_entry, trial, None, context)


def recall_trial(entry: EngineEntry, trial: Trial, context: RunContext) -> Recorded | None:
    """The record of a trial's engine; None if the engine is lost, or another one has taken its place."""
    request = replace(make_request(entry), toolchain=tuple(sorted(trial.toolchain.items())))
    record = recall_engine(request, context)
    return record if record and record.digest == trial.digest else None


def renew(entry: EngineEntry, trial: Trial, context: RunContext) -> RenewedEngine:
    """A unit with the engine of a trial. Raises IntegrityError where that is gone from the registry."""
    record = recall_trial(entry, trial, context)
    if record is None:
        raise IntegrityError(f"{entry.unit}: its new engine is no longer in {context.store.uri}; rehearse again")
    new_entry = replace(
        entry,
        toolchain=dict(sorted(trial.toolchain.items())),
        build_key=record.build,
        digest=record.digest,
        size_bytes=record.size_bytes,
        suffix=record.suffix,
        requires=record.requires,
        notes=record.notes,
    )
    return _approve(new_entry, trial, record, context)


def _approve(entry: EngineEntry, trial: Trial, record: Recorded | None, context: RunContext) -> RenewedEngine:
    """A unit with its measurements. Raises IntegrityError if the trial was of another engine, or its report failed."""
    approval = approve(read_report(str(trial.report), context.store))
    if entry.digest != trial.digest:
        raise IntegrityError(f"{entry.unit}: the trial is of engine {trial.digest}, not {entry.digest}; rehearse again")
    if approval is None:
        raise IntegrityError(f"{entry.unit}: the report of its new engine does not approve it; rehearse again")
    report = approval.report
    entry = replace(entry, status=report.verdict, reason=report.reason, report=report.digest)
    return RenewedEngine(replace(entry, checks=report.counts, sqnr_db=report.sqnr_db), approval, record)
