"""The latency report of an engine, and the rule that ranks engines of a version."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from enginesmith.core.reports.breakdown import TimeBreakdown
from enginesmith.core.requirements import Count, Format

# The one rule that orders engines of a version that fit a machine equally well: for pulls, routers and all that shows
# what they give.
#
# An engine comes before another where it was shown to be faster: the 95 % intervals of their times do not overlap.
# Without that evidence the more accurate one comes first. A busy machine makes intervals wide, and so shows less; what
# it shows holds.

Item = TypeVar("Item")
# Least and most seconds: a 95 % interval.
Interval = tuple[float, float]


def is_shorter(one: Interval | None, other: Interval | None) -> bool:
    """Whether one engine's times were shown to be less than the other's; None is a time without an interval."""
    return one is not None and other is not None and one[1] < other[0]


def order_by_evidence(items: Sequence[Item], is_faster: Callable[[Item, Item], bool]) -> list[Item]:
    """The items, each time the first that none of those left was shown to be faster than.

    items: the preferred (more accurate) first.  is_faster: as `is_shorter` says of the intervals of two.
    """
    candidates, ranking = list(items), list[Item]()
    while candidates:
        leader = next(
            (entry for entry in candidates if not any(is_faster(rival, entry) for rival in candidates)), candidates[0]
        )
        candidates.remove(leader)
        ranking.append(leader)
    return ranking


# The latency report of an engine, kept beside a version, and the result of a paired benchmark of two engines.
#
# Plain values with the names of the format, which `enginesmith.core.codec` writes and reads. Times are in seconds.
# Standard library only: a registry reads reports without numpy.

BucketChoice = Literal["few", "all"] | tuple[Mapping[str, int], ...]

# What was timed: the runtime's own call, or `Session.run` with its checks.
Timed = Literal["runtime", "session"]

FORMAT = 1
# Above these shares of all cores' time the machine counts as busy: used by others, and stolen by a hypervisor. Less
# than three ticks of the kernel's clock, of 10 ms each, is rounding: in the tenth of a second that a bucket takes, one
# tick is 5 % of two cores. Involuntary context switches are no sign: an engine's own threads switch each other away,
# once or twice a run (54,000 a second on two idle cores, onnxruntime, runs of 40 microseconds).
BUSY_OTHERS, BUSY_STEAL = 0.10, 0.01
_ROUNDING_S = 0.03


@dataclass(frozen=True)
class MachineKind:
    """A kind of machine, without its name. kind: of its CPU (`hardware.cpu_kinds.CpuKind`).  gpus: their products.

    cpu: the CPU's model.  cores: number of its cores; None if unknown.  system: the operating system.
    """

    cpu: str
    kind: str
    cores: Count | None
    system: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([f"{self.cpu} ({self.kind}), {self.cores} cores", *self.gpus])


@dataclass(frozen=True)
class LatencyTerms:
    """How an engine is timed: seconds per bucket; buckets 'few', 'all' or each one's dim sizes; concurrent sessions."""

    seconds: float
    buckets: BucketChoice
    streams: int = 1


@dataclass(frozen=True)
class Quantile:
    """The p-quantile of run times in seconds with its 95 % interval; all None where there are too few runs.

    effective: effective sample size of the correlated series.  needed: effective runs that an interval takes.
    """

    p: float
    value: float | None
    low: float | None
    high: float | None
    effective: float
    needed: int


@dataclass(frozen=True)
class SystemLoad:
    """The load of the machine during `seconds`. others: share of all cores' time that other processes used.

    steal: share that a hypervisor took.  switches: involuntary context switches per second of this process and those
    that it started.  throttled: periods in which the control group's CPU quota was used up.  load: the load average
    over a minute, at the end.  busy: the reasons why the machine counts as busy; empty for a quiet one.
    """

    seconds: float
    load: float | None
    others: float | None
    steal: float | None
    switches: float
    throttled: int | None
    cores: int
    busy: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        reasons = []
        if self._is_over(self.others, BUSY_OTHERS):
            reasons.append(f"other processes used {100 * (self.others or 0):.0f} % of the {self.cores} cores")
        if self._is_over(self.steal, BUSY_STEAL):
            reasons.append(f"the hypervisor took {100 * (self.steal or 0):.1f} % of the time")
        if self.throttled:
            reasons.append(f"its CPU quota was used up in {self.throttled} periods")
        object.__setattr__(self, "busy", tuple(reasons))

    def _is_over(self, share: float | None, limit: float) -> bool:
        return share is not None and share > limit and share * self.seconds * self.cores >= _ROUNDING_S


@dataclass(frozen=True)
class BucketLatency:
    """The times measured at one input size. quantiles, mean_s, median_s and curve are those of `Session.run`.

    runtime: the median of the runtime's own call, without what `Session.run` does in Python; None where the session
    does not give it.  process_medians_s: of each process, of the runtime's call where it is known.
    first_s: the first run at this size, which is not among `runs`; median over processes.  discarded: number of runs
    left out as warm-up.  steady: whether the runs after them were steady in every process.  memory_bytes: peak memory
    less that before the engine was loaded; over all buckets so far, in rising order.  device_bytes: memory in use on
    the engine's own device, by all processes; None where it has none.  device_s: median seconds of a run on the device,
    by its own events; None if unknown.  median_s: of the quantiles; where there were too few runs, of the curve.
    items_per_s: of one stream, by the median: runs that the machine delayed belong to the tail.
    streams_items_per_s: of several streams at once, together.  curve: the distribution function as quantiles at equal
    steps from 0 to 1.
    items: samples of one run.
    """

    name: str
    sizes: Mapping[str, int]
    items: int
    first_s: float
    runs: int
    discarded: int
    steady: bool
    mean_s: float
    quantiles: tuple[Quantile, ...]
    curve: tuple[float, ...]
    memory_bytes: int
    surroundings: SystemLoad
    runtime: Quantile | None = None
    process_medians_s: tuple[float, ...] = ()
    device_bytes: int | None = None
    streams: int = 1
    streams_items_per_s: float | None = None
    device_s: float | None = None
    median_s: float = field(init=False)
    items_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        median = self.quantiles[0].value or self.curve[len(self.curve) // 2]
        object.__setattr__(self, "median_s", median)
        object.__setattr__(self, "items_per_s", self.items / median)

    @property
    def runtime_s(self) -> float:
        """The runtime's own median, or that of `Session.run` where it is not known."""
        return (self.runtime and self.runtime.value) or self.median_s

    def interval(self, timed: Timed) -> Interval | None:
        """The 95 % interval of the median in seconds; None where there were too few runs for one."""
        estimate = self.runtime if timed == "runtime" else self.middle
        if estimate is None or estimate.low is None or estimate.high is None:
            return None
        return estimate.low, estimate.high

    @property
    def middle(self) -> Quantile | None:
        """The median of `Session.run` with its interval; None where there were too few runs for an interval."""
        return next((quantile for quantile in self.quantiles if quantile.p == 0.5 and quantile.value is not None), None)


@dataclass(frozen=True)
class EngineLatency:
    """The latency of an engine: medians over `processes`. load_s: seconds from the engine's file, in the page cache, to
    a session, without importing the runtime.  import_s: seconds of that import, where known.

    loaded_bytes: resident memory that loading took.  memory_resettable: whether the peak memory could be reset after.
    """

    load_s: float
    loaded_bytes: int
    memory_resettable: bool
    buckets: tuple[BucketLatency, ...]
    import_s: float | None = None
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class LatencyReport(EngineLatency):
    """An engine's latency, and what was measured where. engine, golden: digests.  created_at: ISO 8601, UTC.

    unit: target, precision and backend.  machine: where it ran.  asked: how long and at which sizes it was to be timed.
    """

    unit: str
    engine: str
    golden: str
    machine: MachineKind
    created_at: str
    asked: LatencyTerms
    size_bytes: int
    anatomy: TimeBreakdown
    format: Annotated[int, Format(FORMAT)] = FORMAT

    @property
    def busy(self) -> tuple[str, ...]:
        """The reasons why the machine counts as busy while the engine was timed; empty for a quiet one."""
        return tuple(reason for bucket in self.buckets for reason in bucket.surroundings.busy)


def timed_alike(reports: Iterable[EngineLatency]) -> Timed:
    """What engines are compared by: the runtimes' own calls where every one of these reports has their medians."""
    all_buckets = [bucket for report in reports for bucket in report.buckets]
    return "runtime" if all(bucket.runtime and bucket.runtime.value for bucket in all_buckets) else "session"


Verdict = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True)
class Ratio:
    """The p-quantile of the first engine over that of the second, with its 95 % interval; None with too few runs.

    detectable: the smallest difference, as a share, that this much data would have shown with a probability of 0.8.
    ratio: the quotient.  low, high: ends of the interval.  note: why there is no interval, or ''.
    """

    p: float
    ratio: float | None
    low: float | None
    high: float | None
    detectable: float | None
    note: str = ""


@dataclass(frozen=True)
class PairedTimes:
    """The times of two engines that were run alternately. verdict: on the first engine, by the median.  medians_s: of
    both, in seconds.  runs: of each.  openings: sessions opened of each.
    """

    verdict: Verdict
    ratios: tuple[Ratio, ...]
    medians_s: tuple[float, float]
    runs: int
    openings: int


@dataclass(frozen=True, kw_only=True)
class PairedBenchmark(PairedTimes):
    """The paired times of two engines at one bucket. items: per run.  seed: of the random order."""

    bucket: str
    items: int
    seed: int
    surroundings: SystemLoad
