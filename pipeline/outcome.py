"""What became of a run: the verdict on each unit, what was published of it, and the version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from enginesmith.core.codec import encode_document
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.reports.proof import FreeRunning, Report, Verdict, judge
from enginesmith.core.text import now
from enginesmith.core.types import BuildFailure
from enginesmith.registry.manifest import EngineEntry
from pipeline.quantization.ranges import describe_share
from pipeline.values import Attributed, BuildPlan, Built, Exported, Json, Proof


@dataclass(frozen=True)
class JudgedUnit:
    """A unit with the report on its engine, or with the failure of its build.

    latency: digest of the latency report of an engine that runs
    here, as a blob.
    """

    built: Built
    report: Report | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    latency: str | None = None

    @property
    def verdict(self) -> Verdict:
        """'proven', 'unproven' or 'failed'."""
        return self.report.verdict if self.report else "failed"

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, in words."""
        if self.report:
            return self.report.reason
        return self.built.failure.reason if self.built.failure else "it was not built"


@dataclass(frozen=True)
class Judged:
    """A model whose units were built and judged. units: those of the plan that are not refused, in its order."""

    exported: Exported
    plan: BuildPlan
    units: tuple[JudgedUnit, ...]


def make_report(
    built: Built, golden: str, proofs: Sequence[Proof], cannot_run: str | None, cpu: str | None = None
) -> Report:
    """The report on a unit, with the verdict on all checks together.

    cannot_run: why the engine could not be run, None when it was run.  cpu: the kind of CPU it was run on; None is this
    machine's. The reason names it for a CPU engine, since the verdict holds for that kind alone.
    """
    checks = tuple(check for proof in proofs for check in proof.checks)
    # The report is read on other machines.
    verdict, reason = judge(checks, cannot_run and cannot_run.replace("on this machine", "where it was built"))
    request = built.unit.request
    if request.target.is_cpu and cannot_run is None and verdict != "unproven":
        reason = f"{reason}, on {cpu or this_kind().name}"
    if (own := built.unit.graph.own_int8) and request.precision != "int8-dynamic":
        reason = f"{reason}; {own}"
    if (share := built.unit.graph.share) is not None:
        reason = f"{reason}; {describe_share(share, request.precision)}"
    if searched := built.unit.graph.searched:
        reason = f"{reason}; {searched}"
    return Report(
        unit=request.unit,
        target=request.target.name,
        precision=request.precision,
        backend=request.backend,
        engine=built.digest,
        golden=golden,
        checks=checks,
        verdict=verdict,
        reason=reason,
        created_at=now(),
        host=describe_host(),
        versions=dict(request.toolchain),
        spreads=tuple(spread.round_numbers() for proof in proofs for spread in proof.spreads),
        free_running=tuple(found for proof in proofs for found in proof.free_running),
    )


@dataclass(frozen=True)
class UnitResult:
    """What became of one unit. entry: of the version, or as it would be published.

    size_bytes: of the engine with its shards, None without one.  report, built: None of one that is refused, and of an
    ensemble.  metrics: task metrics of the engine, by name.
    """

    entry: EngineEntry
    size_bytes: int | None = None
    report: Report | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    built: Built | None = None
    attributed: tuple[Attributed, ...] = ()

    @property
    def target(self) -> str:
        """'sm_89'."""
        return self.entry.target

    @property
    def precision(self) -> str:
        """'int8'."""
        return self.entry.precision

    @property
    def backend(self) -> str:
        """'tensorrt-rtx'."""
        return self.entry.backend

    @property
    def digest(self) -> str | None:
        """Of the engine, None without one."""
        return self.entry.digest

    @property
    def status(self) -> str:
        """'proven', 'unproven', 'failed' or 'refused', for `reason`."""
        return self.entry.status

    @property
    def reason(self) -> str:
        """Why the status is what it is."""
        return self.entry.reason

    @property
    def checks(self) -> Mapping[str, int]:
        """How many passed and failed."""
        return self.entry.checks

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know."""
        return self.entry.notes

    @property
    def free_running(self) -> tuple[FreeRunning, ...]:
        """Drift along sequences."""
        return self.report.free_running if self.report else ()

    @property
    def cached(self) -> bool:
        """Whether the engine was there before this run."""
        return self.built is not None and self.built.cached

    @property
    def seconds(self) -> float:
        """That its build took, 0 where it was cached."""
        return self.built.record.seconds if self.built and self.built.record and not self.built.cached else 0.0

    @property
    def failure(self) -> BuildFailure | None:
        """Of its build."""
        return self.built.failure if self.built else None

    @property
    def unit(self) -> str:
        """'sm_89 int8 tensorrt-rtx'."""
        return f"{self.target} {self.precision} {self.backend}"

    def to_json(self) -> Json:
        """What `enginesmith build --json` prints of it."""
        row: Json = {
            "target": self.target,
            "precision": self.precision,
            "backend": self.backend,
            "digest": self.digest,
            "size": self.size_bytes,
            "status": self.status,
            "reason": self.reason,
            "checks": dict(self.checks),
            "metrics": dict(self.metrics),
            "cached": self.cached,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }
        if self.free_running:
            row["free_running"] = [encode_document(found) for found in self.free_running]
        if self.attributed:
            row["attribution"] = [vars(each) for each in self.attributed]
        if self.failure:
            failure = self.failure
            row["failure"] = {"kind": failure.kind, "log": failure.log, "reproduce": failure.command}
        return row


@dataclass(frozen=True)
class Outcome:
    """How a run ended. version is None when no engine was fit to be published.

    engines: one for each unit of the plan.  metrics: task metrics of each graph, by its name.
    cached: nothing was built, and the version existed.  page: where the HTML report lies; one that published nothing
    has a page, too.  manifest: digest of the version's manifest, for whoever signs it.
    same_as: the version, as NAME@VERSION, whose engines and proofs came of other inputs again: nothing was published,
    and no channel was moved.
    graphs: of an ensemble, the outcomes of its graphs; lacking: the first of them that has no version, so that the
    whole has none.
    narrowed: the part of the spec that was asked for, in words, so that no channel was moved; None for all of it.
    """

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
        """The units whose build or proof failed, those of graphs first."""
        own = tuple(engine for engine in self.engines if engine.status == "failed")
        return (*(engine for graph in self.graphs.values() for engine in graph.failed), *own)

    def with_graphs(self, graphs: Mapping[str, "Outcome"]) -> "Outcome":
        """The outcome of an ensemble with those of its graphs."""
        cached = self.cached and all(graph.cached for graph in graphs.values())
        return replace(self, graphs=graphs, cached=cached)

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
