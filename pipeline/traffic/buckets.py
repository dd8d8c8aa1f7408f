"""From a spec and traffic to the buckets that cost least: the engine is timed, or its times are read, and compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from enginesmith.core.reports.latency import BucketLatency, LatencyReport
from enginesmith.core.text import format_bytes
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import Work
from pipeline.traffic.choice import DAY_S, MOST_PROFILES, BucketChoice, choose_buckets
from pipeline.traffic.engine_timer import EngineTimer, recorded_report
from pipeline.traffic.place import SplitTrace, TrafficAtPlace
from pipeline.traffic.plan import BucketOptions, plan_task
from validation.plots.texts import seconds_text

# Share of the time from which on an engine counts as always busy.
_ALWAYS_BUSY = 0.99


@dataclass(frozen=True)
class ProfilePrice:
    """seconds_a_day: engine seconds that one more profile costs in a day.  words: what it is computed from."""

    seconds_a_day: float
    words: str


@dataclass(frozen=True)
class BucketAdvice:
    """engine: whose times were used.  remarks: on the traffic, and the reasons why the machine counts as busy."""

    model: str
    engine: str
    choice: BucketChoice
    price: ProfilePrice
    remarks: tuple[str, ...]


@dataclass
class _Timings:
    """Times an engine and keeps the reports."""

    timer: EngineTimer
    seconds: float
    reports: list[LatencyReport] = field(default_factory=list)

    def measure(self, sizes: Sequence[Mapping[str, int]]) -> Sequence[BucketLatency]:
        self.reports.append(self.timer.measure(sizes, self.seconds))
        return self.reports[-1].buckets


def advise_buckets(
    work: Work,
    traffic: TrafficAtPlace,
    split: SplitTrace,
    options: BucketOptions,
    engine: ChosenEngine | None = None,
    recorded: bool = False,
) -> BucketAdvice:
    """The buckets of least cost for a spec's dims. split: the traffic within them.

    engine: of a version, which is timed; None for the spec's fp32 graph.  recorded: use its latency report instead.
    Raises InputError and DataError for options, traffic and times that do not fit, and what timing raises.
    """
    spec = work.spec
    task = plan_task(spec.tensors(), spec.named_dims(), traffic, split.within, options)
    timer = EngineTimer.of_published(engine, work.context) if engine else EngineTimer.of_graph(work)
    timings = _Timings(timer, options.timing_s)
    measure = None if engine and recorded else timings.measure
    if engine and recorded:
        timings.reports.append(recorded_report(engine, work.context))
    else:
        timings.measure(task.first_sizes())
    price = price_profile(timings.reports[0], timer.build_s, options.profile_price_s)
    choice = choose_buckets(
        task, timings.reports[0].buckets, measure, options.most or MOST_PROFILES, price.seconds_a_day
    )
    busy = tuple(dict.fromkeys(reason for report in timings.reports for reason in report.busy))
    noted = (f"the machine was busy while the engine was timed: {'; '.join(busy)}",) if busy else ()
    return BucketAdvice(spec.model, timer.name, choice, price, (*task.remarks, *remark_on_load(choice), *noted))


def remark_on_load(choice: BucketChoice) -> tuple[str, ...]:
    """A remark where the engine has no time left, so that batches are as full as they can be whatever the buckets."""
    if (choice.plans[0].utilization or 0.0) < _ALWAYS_BUSY:
        return ()
    return ("one engine cannot carry this rate: it is always busy; give --rate for what one machine gets",)


def price_profile(report: LatencyReport, build_s: float | None, given: float | None) -> ProfilePrice:
    """What a profile costs in a day: as given, else its build, once a day, and its share of this machine's memory, as a
    share of the day.

    Its memory is what the largest run needs beside the loaded engine, as a profile has buffers of its own; where that
    was not measured, and for a build that is not on record, 0. build_s: seconds of compiling for each profile.
    """
    if given is not None:
        return ProfilePrice(given, "as given")
    most = max(bucket.memory_bytes for bucket in report.buckets)
    memory = max(most - report.loaded_bytes, 0) if report.memory_resettable else 0
    share = memory / psutil.virtual_memory().total
    built = "no build on record" if build_s is None else f"{seconds_text(build_s)} of compiling a day"
    words = f"{built}, {format_bytes(memory)} of this machine's memory ({100 * share:.2g} % of it)"
    return ProfilePrice((build_s or 0.0) + share * DAY_S, words)
