"""The latency report of an engine, and the rule that ranks engines of a version."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from enginesmith.core.reports.breakdown import TimeBreakdown
from enginesmith.core.requirements import Count, Format

# The rule that orders engines of a version that fit a machine equally well. Pulls, routers and reports all use it.
#
# An engine comes before another if it is measurably faster: the 95 % intervals of their times do not overlap. Without
# that evidence the more accurate engine comes first. On a busy machine intervals are wide: fewer differences are
# significant, but those that are remain valid.

Item = TypeVar("Item")
# The ends of a 95 % interval, in seconds.
Interval = tuple[float, float]


def is_shorter(one: Interval | None, other: Interval | None) -> bool:
    """Whether the first interval lies wholly below the other; False if either is None (too few runs)."""
    return one is not None and other is not None and one[1] < other[0]


def order_by_evidence(items: Sequence[Item], is_faster: Callable[[Item, Item], bool]) -> list[Item]:
    """The items in a new order. Each step takes the first item for which no remaining item is faster.

    items: the preferred (more accurate) first.  is_faster: whether the first of two is faster (`is_shorter` of their
    intervals).
    """
    candidates, ranking = list(items), list[Item]()
    while candidates:
        leader = next(
            (entry for entry in candidates if not any(is_faster(rival, entry) for rival in candidates)), candidates[0]
        )
        candidates.remove(leader)
        ranking.append(leader)
    return ranking


# The latency report of an engine, stored beside a version, and the result of a paired benchmark of two engines.
#
# Plain values with the format's field names, which `enginesmith.core.codec` encodes. Times are in seconds. Standard
# library only: a registry reads reports without numpy.

BucketChoice = Literal["few", "all"] | tuple[Mapping[str, int], ...]

# The timed call: the runtime's own, or `Session.run` with its checks.
Timed = Literal["runtime", "session"]

FORMAT = 1
# Above these shares of all cores' time the machine counts as busy: used by other processes, and stolen by a hypervisor.
# Less than three ticks of the kernel's clock, of 10 ms each, is rounding: one tick is 5 % of two cores in the tenth of
# a second that a bucket takes. Involuntary context switches are no sign of load: an engine's own threads preempt each
# other once or twice a run (54,000 a second on two idle cores, onnxruntime, runs of 40 microseconds).
BUSY_OTHERS, BUSY_STEAL = 0.10, 0.01
_ROUNDING_S = 0.03


@dataclass(frozen=True)
class MachineKind:
    """A kind of machine, without its name. kind: its CPU's (`hardware.cpu_kinds.CpuKind`).  gpus: the GPUs' products.

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
    """The p-quantile of run times in seconds with its 95 % interval; all None if there are too few runs.

    effective: effective sample size of the correlated series.  needed: effective runs needed for an interval.
    """

    p: float
    value: float | None
    low: float | None
    high: float | None
    effective: float
    needed: int


@dataclass(frozen=True)
class SystemLoad:
    """The load of the machine during `seconds`. others: share of all cores' time used by other processes.

    steal: share stolen by a hypervisor.  switches: involuntary context switches per second of this process and its
    children. throttled: periods in which the control group's CPU quota was used up.  load: the load average over one
    minute, at the end.  busy: the reasons why the machine counts as busy; empty if it does not.
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

    runtime: the median of the runtime's own call, without the Python code of `Session.run`; None if the session does
    not report it. process_medians_s: one median per process, of the runtime's call if known.
    first_s: the first run at this size, not counted in `runs`; median over processes.  discarded: number of warm-up
    runs left out.  steady: whether the other runs were steady in every process.  memory_bytes: peak memory over all
    buckets so far, in rising order, minus memory before loading.  device_bytes: memory in use on the engine's
    own device, by all processes; None without a device. device_s: median seconds of a run on the device, by its own
    events; None if unknown.  median_s: from the quantiles; with too few runs, from the curve.
    items_per_s: of one stream, by the median: runs that the machine delayed only affect the tail.
    streams_items_per_s: total of several concurrent streams.  curve: the distribution function, as quantiles at equal
    steps from 0 to 1.
    items: samples per run.
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
        """The median seconds of the runtime's own call; of `Session.run` if that is unknown."""
        return (self.runtime and self.runtime.value) or self.median_s

    def interval(self, timed: Timed) -> Interval | None:
        """The 95 % interval of the median in seconds; None if there were too few runs."""
        estimate = self.runtime if timed == "runtime" else self.middle
        if estimate is None or estimate.low is None or estimate.high is None:
            return None
        return estimate.low, estimate.high

    @property
    def middle(self) -> Quantile | None:
        """The median of `Session.run` with its interval; None if there were too few runs for an interval."""
        return next((quantile for quantile in self.quantiles if quantile.p == 0.5 and quantile.value is not None), None)


@dataclass(frozen=True)
class EngineLatency:
    """The latency of an engine: medians over `processes`. load_s: seconds to open a session from the engine's file in
    the page cache, without importing the runtime.  import_s: seconds of that import, if known.

    loaded_bytes: resident memory after loading minus before.  memory_resettable: whether the peak memory could be reset
    after loading.
    """

    load_s: float
    loaded_bytes: int
    memory_resettable: bool
    buckets: tuple[BucketLatency, ...]
    import_s: float | None = None
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class LatencyReport(EngineLatency):
    """An engine's latency, with the conditions of the measurement. engine, golden: digests.  created_at: ISO 8601, UTC.

    unit: target, precision and backend.  machine: on which it ran.  asked: the requested durations and sizes.
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
        """The reasons why the machine counts as busy while the engine was timed; empty if it does not."""
        return tuple(reason for bucket in self.buckets for reason in bucket.surroundings.busy)


def timed_alike(reports: Iterable[EngineLatency]) -> Timed:
    """The times to compare engines by: 'runtime' if all reports have medians of the runtime's calls, else 'session'."""
    all_buckets = [bucket for report in reports for bucket in report.buckets]
    return "runtime" if all(bucket.runtime and bucket.runtime.value for bucket in all_buckets) else "session"


Verdict = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True)
class Ratio:
    """The p-quantile of the first engine divided by that of the second, with its 95 % interval; None with too few runs.

    detectable: the smallest relative difference that this much data detects with a probability of 0.8.
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
    both, in seconds.  runs: per engine.  openings: sessions opened per engine."""

    verdict: Verdict
    ratios: tuple[Ratio, ...]
    medians_s: tuple[float, float]
    runs: int
    openings: int


@dataclass(frozen=True, kw_only=True)
class PairedBenchmark(PairedTimes):
    """The paired times of two engines at one bucket. items: samples per run.  seed: of the random order."""

    bucket: str
    items: int
    seed: int
    surroundings: SystemLoad
