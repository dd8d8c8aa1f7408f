"""How a run ended: the version, and each unit of its plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from enginery.core.types import BuildFailure
from pipeline.values import Attributed, Json


@dataclass(frozen=True)
class EngineResult:
    """What became of one unit. digest, size_bytes: of the engine, None without one.

    checks: how many passed and failed.
    status: 'proven', 'unproven', 'failed' or 'refused', for `reason`.  metrics: task metrics of the engine, by name.
    seconds: that its build took, 0 where it was cached.  notes: what a person should know.
    """

    target: str
    precision: str
    backend: str
    digest: str | None
    size_bytes: int | None
    status: str
    reason: str
    checks: Mapping[str, int]
    notes: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    cached: bool = False
    seconds: float = 0.0
    attributed: tuple[Attributed, ...] = ()
    failure: BuildFailure | None = None

    @property
    def unit(self) -> str:
        """'sm_89 int8 tensorrt-rtx'."""
        return f"{self.target} {self.precision} {self.backend}"

    def to_json(self) -> Json:
        """What `enginery build --json` prints of it."""
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
    """

    model: str
    version: str | None
    cached: bool
    engines: tuple[EngineResult, ...]
    metrics: Mapping[str, Mapping[str, float]]
    channel: str | None = None
    channel_refusal: str | None = None
    page: str | None = None
    manifest: str | None = None
    same_as: str | None = None

    @property
    def failed(self) -> tuple[EngineResult, ...]:
        """The units that were built or proven in vain."""
        return tuple(engine for engine in self.engines if engine.status == "failed")

    def to_json(self) -> Json:
        """What `enginery build --json` prints."""
        return {
            "model": self.model,
            "version": self.version,
            "cached": self.cached,
            "same_as": self.same_as,
            "channel": self.channel,
            "channel_refusal": self.channel_refusal,
            "report": self.page,
            "metrics": self.metrics,
            "engines": [engine.to_json() for engine in self.engines],
        }
