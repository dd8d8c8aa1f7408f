"""What a check compares with, and what it found, as values."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import parse_reference
from enginesmith.core.reports.latency import MachineKind, PairedTimes
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.canaries import list_served
from enginesmith.registry.evidence.latencies import measured_speeds
from enginesmith.registry.manifest import EngineEntry, Manifest, require_model
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions.lookup import locate
from pipeline.operations.validate import why_not_here

Level = Literal["error", "warning", "note"]
Rule = Literal["spec", "failed", "coverage", "interface", "metric", "drift", "latency", "too-noisy", "not-compared"]
# Description of each rule, for reports that list rules.
RULES: Mapping[Rule, str] = {
    "spec": "The spec can be read, and every step of it runs.",
    "failed": "Every engine that is built passes the checks of the spec.",
    "coverage": "Every target that the served version has an engine for gets one.",
    "interface": "New engines take the inputs and give the outputs that the served ones do.",
    "metric": "No task metric is worse than that of the served engine by more than the threshold.",
    "drift": "New engines answer as the served ones do, within the limits of the precision.",
    "latency": "No new engine is shown to be slower than the served one by more than the threshold.",
    "too-noisy": "The timing could have shown a slowdown of the threshold.",
    "not-compared": "Every engine that runs here was compared with a served one.",
}
# A key of the spec: its path in the document.
Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Finding:
    """One thing that a check found. level: an 'error' is a regression.  unit: 'cpu int8 onnxruntime'; '' for all.

    bucket: 'batch=8'; '' where it is about no size.  line: of the spec, counted from 1; None where that is no file.
    """

    rule: Rule
    level: Level
    message: str
    unit: str = ""
    bucket: str = ""
    line: int | None = None

    @property
    def text(self) -> str:
        """'cpu int8 onnxruntime at batch=8: 1.41 times the time of the served engine ...'."""
        location = " at ".join(name for name in (self.unit, self.bucket) if name)
        return f"{location}: {self.message}" if location else self.message


@dataclass(frozen=True)
class BucketTimes:
    """The paired times of two engines at one bucket, by the median. ratio: new over served, with its 95 % interval;
    None with too few runs.  detectable: the smallest slowdown that would have been shown, as a share. busy: the reasons
    why the machine counts as busy.  new_s, served_s: medians in seconds.  low, high: ends of the interval.  runs: of
    each engine."""

    bucket: str
    new_s: float
    served_s: float
    ratio: float | None
    low: float | None
    high: float | None
    detectable: float | None
    runs: int
    busy: tuple[str, ...] = ()

    @classmethod
    def of(cls, bucket: str, times: PairedTimes, reasons: tuple[str, ...]) -> "BucketTimes":
        """The median of two engines that were timed in turns, the new one first."""
        median = next(ratio for ratio in times.ratios if ratio.p == 0.5)
        interval = median.ratio, median.low, median.high, median.detectable
        return cls(bucket, *times.medians_s, *interval, times.runs, reasons)


@dataclass(frozen=True)
class AnswerDrift:
    """How far the new answers are from the served ones in one case, by the metric nearest to its limit, or beyond it by
    most. case: 'golden', or the sizes of a bucket's end.  output: its name.  value: of the metric.  passed: whether it
    keeps the limit."""

    case: str
    output: str
    metric: str
    value: float | None
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class MetricPair:
    """A task metric of both engines over the golden set of the new spec. allowed: the greatest loss that passes.  name:
    of the metric.  served: its value with the served engine."""

    name: str
    new: float | None
    served: float | None
    allowed: float


@dataclass(frozen=True)
class EnginePair:
    """A new engine and the served one that it replaces. unit, against: their units.

    pulled: whether these two are what this machine is given by both versions.  same: equal bytes, of which nothing was
    measured.  remarks: why something was not measured.
    """

    unit: str
    against: str
    pulled: bool
    same: bool = False
    metrics: tuple[MetricPair, ...] = ()
    drift: tuple[AnswerDrift, ...] = ()
    times: tuple[BucketTimes, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegressionCheck:
    """The result of a check. spec: its address.  against: the served version, such as 'digits@3'; None without one.

    channel: through which that version was found; None without one.  statuses: unit of the new spec -> status.  model:
    its name.  machine: the one that ran the check.  created_at: ISO 8601, UTC.  slower: the slowdown that counts, as a
    share.  seconds: of timing.  pairs: the compared engines.  findings: what was found.  passed: whether no finding is
    an error."""

    model: str
    spec: str
    against: str | None
    channel: str | None
    machine: MachineKind
    created_at: str
    slower: float
    seconds: float
    statuses: Mapping[str, str]
    pairs: tuple[EnginePair, ...]
    findings: tuple[Finding, ...]
    passed: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", not self.errors)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The regressions."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def verdict(self) -> str:
        """One sentence: how many regressions, against what."""
        channel_text = f" (channel {self.channel})" if self.channel else ""
        baseline_text = (
            f"against {self.against}{channel_text}"
            if self.against
            else "by the checks of the spec; no version is served"
        )
        if self.passed:
            return f"{self.model}: no regression shown {baseline_text}"
        count = len(self.errors)
        if all(finding.rule == "spec" for finding in self.errors):
            return f"{self.model}: not checked, {count} mistake{'s' if count > 1 else ''}"
        return f"{self.model}: {count} regression{'s' if count > 1 else ''} {baseline_text}"


# The reference of a first version, which is compared with nothing.
NONE = "none"


@dataclass(frozen=True)
class ServedVersion:
    """A version that is served. store: its registry.  channel: through which it was found.  proven_only: as it says.

    pulled: the engine that this machine is given.  here: the served engines that run here, by unit.
    """

    store: Store
    manifest: Manifest
    channel: str | None
    proven_only: bool
    served: tuple[EngineEntry, ...]
    pulled: EngineEntry
    here: Mapping[str, EngineEntry]


def machine_of(target: Target) -> Machine:
    """A machine of this target, for a CPU of this machine's kind."""
    return replace(Machine.of(target), cpu=this_kind().name if target.is_cpu else None)


def find_served(store: Store, model: str, reference: str | None, machine: Machine) -> ServedVersion | None:
    """The version that a reference stands for, None for 'none'. reference: None for the model's channel stable, else
    candidate, else its newest version.  machine: this one.

    Raises InputError for a version of another model or without an engine that runs here, UnknownNameError for one that
    is not there, UntrustedError without the signatures that the trust policy asks for.
    """
    if reference == NONE:
        return None
    version_reference = parse_reference(reference or model)
    if version_reference.model != model:
        raise InputError(
            f"--against {reference}: the spec is of model {model!r}; give a version or channel of that model"
        )
    try:
        located_version = locate(store, version_reference)
        manifest = located_version.manifest
        require_model(manifest)
        entries = judge_entries(store, manifest, require(store, manifest).counts)
        speeds = partial(measured_speeds, store, manifest, machine)
        policy = Policy(proven_only=located_version.proven_only)
        pulled_entry = rank_engines(entries, machine, policy, manifest.reference, speeds).resolution().chosen
    except UnknownNameError as error:
        raise UnknownNameError(f"{error}\n  --against {NONE} checks a spec that has no served version here") from None
    served_entries = list_served([entry.on_cpu(this_kind().name) for entry in entries], located_version.proven_only)
    local_entries = {entry.unit: entry for entry in served_entries if why_not_here(entry) is None}
    if pulled_entry.unit not in local_entries:
        raise InputError(
            f"{pulled_entry.unit} of {manifest.reference}, which is served to this machine, does "
            f"not run here: {why_not_here(pulled_entry)}; check on a machine that can run it, or with --against {NONE}"
        )
    channel = located_version.channel.name if located_version.channel else None
    return ServedVersion(
        store, manifest, channel, located_version.proven_only, tuple(served_entries), pulled_entry, local_entries
    )


def copy_engine(version: ServedVersion, entry: EngineEntry, dest: Store) -> None:
    """Copy an engine's blobs, with the graph that it was built from, to a store that is not the version's own."""
    if dest.uri == version.store.uri:
        return
    digests = [str(digest) for digest in (entry.digest, entry.graph) if digest]
    shards = [shard for digest in digests for shard in version.manifest.shards.get(digest, {})]
    with tempfile.TemporaryDirectory(prefix="enginesmith-check-") as folder:
        for digest in (*shards, *digests):
            if not dest.has(digest):
                path = Path(folder) / digest
                version.store.fetch(digest, path)
                dest.put_file(path)
                path.unlink()
