"""The result of a run: the verdict on each unit, its published entry, and the version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from builders.backends.discovery import capabilities_of
from enginesmith.core.codec import encode_document
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.reports.proof import FreeRunning, Report, approve, judge
from enginesmith.core.requirements import for_target
from enginesmith.core.text import now, visible
from enginesmith.core.types import BuildFailure
from enginesmith.registry.manifest import EngineEntry, Status, request_of
from pipeline.quantization.ranges import describe_share
from pipeline.values import Attributed, BuildPlan, Built, EngineBlob, Exported, Json, Proof, Unit


@dataclass(frozen=True)
class UnitResult:
    """The result of one unit. entry: the version's entry, or the one that would be published.

    size_bytes: of the engine with its shards; None without an engine.  report: None for a unit that was not judged.
    metrics: task metrics of the engine, by name.  latency: digest of its latency report.
    attributed: which nodes drifted.  built: None if nothing was to be built.  local: as in `Unit`."""

    entry: EngineEntry
    size_bytes: int | None = None
    report: Report | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    latency: str | None = None
    attributed: tuple[Attributed, ...] = ()
    built: Built | None = field(default=None, kw_only=True)
    local: str = field(default="", kw_only=True)

    @property
    def cached(self) -> bool:
        """Whether the engine existed before this run."""
        return bool(self.built and self.built.cached)

    @property
    def seconds(self) -> float:
        """Seconds that the compiler took in this run; 0 if nothing was built."""
        return self.built.record.seconds if self.built and self.built.record and not self.built.cached else 0.0

    @property
    def failure(self) -> BuildFailure | None:
        """The failure of the build; None if it did not fail."""
        return self.built.failure if self.built else None

    @property
    def free_running(self) -> tuple[FreeRunning, ...]:
        """The drift along sequences, of each output and stage."""
        return self.report.free_running if self.report else ()

    def to_json(self) -> Json:
        """The unit as `enginesmith build --json` prints it."""
        entry = self.entry
        row: Json = {
            "target": entry.target,
            "precision": entry.precision,
            "backend": entry.backend,
            "digest": entry.digest,
            "size": self.size_bytes,
            "status": entry.status,
            "reason": "; ".join(filter(None, [entry.reason, self.local])),
            "checks": dict(entry.checks),
            "sqnr_db": entry.sqnr_db,
            "metrics": dict(self.metrics),
            "cached": self.cached,
            "seconds": self.seconds,
            "notes": list(entry.notes),
        }
        if self.free_running:
            row["free_running"] = [encode_document(free_run) for free_run in self.free_running]
        if self.attributed:
            row["attribution"] = [vars(attribution) for attribution in self.attributed]
        if failure := self.failure:
            row["failure"] = {"kind": failure.kind, "log": failure.log, "reproduce": failure.command}
        return row


@dataclass(frozen=True)
class JudgedUnit(UnitResult):
    """The result of a unit that was built, or whose build failed."""

    built: Built = field(kw_only=True)


@dataclass(frozen=True)
class Judged:
    """A model whose units were built and judged. units: those of the plan that are not refused, in its order."""

    exported: Exported
    plan: BuildPlan
    units: tuple[JudgedUnit, ...]


def engine_of(entry: EngineEntry) -> EngineBlob:
    """The engine of a published entry. Raises IntegrityError if the entry's fields do not give its build key."""
    return EngineBlob.of(request_of(entry), str(entry.digest), str(entry.suffix), entry.requires)


def entry_of(build: Unit | Built) -> EngineEntry:
    """The manifest entry of a unit without a verdict. Without an engine, it requires only the target's processor."""
    unit, record = (build, None) if isinstance(build, Unit) else (build.unit, build.record)
    request = unit.request
    return EngineEntry(
        target=request.target.name,
        precision=request.precision,
        backend=request.backend,
        status="refused" if unit.action == "refused" else "unproven",
        reason=unit.published_reason,
        compute_capability=request.target.compute_capability,
        product=request.target.product,
        build_key=request.key,
        graph=request.model,
        scales=unit.graph.scales,
        options=dict(request.options),
        toolchain=dict(request.toolchain),
        inputs=request.inputs,
        outputs=request.outputs,
        profiles=request.profiles,
        requires=record.requires if record and record.requires else (for_target(request.target),),
        notes=() if isinstance(build, Unit) else (*unit.graph.notes, *build.notes),
        quantized_states=request.quantized_states,
        digest=record.digest if record else None,
        size_bytes=record.size_bytes if record else None,
        suffix=record.suffix if record else None,
    )


def judge_built(
    build: Built, golden: str = "", proofs: Sequence[Proof] = (), cannot_run: str | None = None
) -> JudgedUnit:
    """The result of a built unit: its entry with the verdict on the checks of all stages; 'failed' if its build failed.

    golden: digest of the golden set.  cannot_run: as in `make_report`.
    """
    entry = entry_of(build)
    failed_entry = replace(entry_of(build.unit), status="failed", notes=entry.notes)
    if build.failure:
        return JudgedUnit(replace(failed_entry, reason=build.failure.reason), built=build)
    graph, precision = build.unit.graph, entry.precision
    matrix = capabilities_of(entry.backend).matrix if cannot_run else None
    remarks = [
        matrix.explain_absence(entry.compute_capability, precision) if matrix else None,
        graph.own_int8 if precision != "int8-dynamic" else None,
        describe_share(graph.share, precision) if graph.share is not None else None,
        graph.searched,
        None if build.unit.local else build.unit.gain,
    ]
    report = make_report(entry, golden, proofs, cannot_run, remarks=[text for text in remarks if text])
    usable_entry = replace(entry, report=report.digest) if approve(report) else failed_entry
    status: Status = report.verdict if usable_entry is not failed_entry else "failed"
    entry = replace(usable_entry, status=status, reason=report.reason, checks=report.counts, sqnr_db=report.sqnr_db)
    metrics = dict(proofs[-1].metrics) if proofs else {}
    return JudgedUnit(entry, entry.size_bytes, report, metrics, built=build, local=build.unit.local)


def make_report(
    entry: EngineEntry,
    golden: str,
    proofs: Sequence[Proof],
    cannot_run: str | None = None,
    cpu: str | None = None,
    remarks: Sequence[str] = (),
) -> Report:
    """The report on an engine, with the verdict on all checks together.

    golden: digest of the golden set.  cannot_run: why the engine could not be run; None if it ran.  cpu: the kind of
    CPU that ran it; None: this machine's. The reason includes the remarks and, for a CPU engine, the kind of CPU:
    the verdict is valid for that kind alone.
    """
    checks = tuple(check for proof in proofs for check in proof.checks)
    # The report is read on other machines.
    verdict, reason = judge(checks, cannot_run and cannot_run.replace("on this machine", "on the build machine"))
    if entry.hardware.is_cpu and cannot_run is None and verdict != "unproven":
        reason = f"{reason}, on {cpu or this_kind().name}"
    return Report(
        unit=entry.unit,
        target=entry.target,
        precision=entry.precision,
        backend=entry.backend,
        engine=entry.digest,
        golden=golden,
        checks=checks,
        verdict=verdict,
        reason=visible("; ".join([reason, *remarks]), allow=""),  # a name may contain a line end
        created_at=now(),
        host=describe_host(),
        versions=dict(entry.toolchain),
        spreads=tuple(spread.round_numbers() for proof in proofs for spread in proof.spreads),
        free_running=tuple(free_run for proof in proofs for free_run in proof.free_running),
    )


@dataclass(frozen=True)
class Outcome:
    """The result of a run. version: None if no engine could be published.

    engines: one for each unit of the plan.  metrics: name of a graph variant -> its task metrics.
    cached: nothing was built, and the version existed.  page: place of the HTML report; None for an ensemble that
    published nothing.  manifest: digest of the version's manifest, for signing.
    same_as: a version, as NAME@VERSION, that has the same engines and proofs but other inputs; if set, nothing was
    published and no channel was moved.
    graphs: the outcomes of an ensemble's graphs.  lacking: the first graph that has no version; if set, the ensemble
    has no version either.
    narrowed: the part of the spec that the run built, as text; no channel was moved. None for the whole spec.
    channel: the spec's channel. It serves the version unless `channel_refusal` or `narrowed` is set. None if the spec
    has no channel or nothing was published."""

    model: str
    version: str | None
    cached: bool
    engines: tuple[UnitResult, ...]
    metrics: Mapping[str, Mapping[str, float]]
    channel: str | None = None
    channel_refusal: str | None = None
    page: str | None = None
    manifest: str | None = None
    same_as: str | None = None
    graphs: Mapping[str, "Outcome"] = field(default_factory=dict)
    lacking: str | None = None
    narrowed: str | None = None

    @property
    def failed(self) -> tuple[UnitResult, ...]:
        """The units whose build or proof failed; units of an ensemble's graphs are first."""
        own_failures = tuple(engine for engine in self.engines if engine.entry.status == "failed")
        return (*(engine for graph in self.graphs.values() for engine in graph.failed), *own_failures)

    def to_json(self) -> Json:
        """What `enginesmith build --json` prints."""
        return {
            "model": self.model,
            "version": self.version,
            "cached": self.cached,
            "same_as": self.same_as,
            "channel": None if self.narrowed else self.channel,
            "channel_refusal": self.channel_refusal,
            "narrowed": self.narrowed,
            "report": self.page,
            "metrics": self.metrics,
            "engines": [engine.to_json() for engine in self.engines],
            **({"graphs": {name: graph.to_json() for name, graph in self.graphs.items()}} if self.graphs else {}),
        }
