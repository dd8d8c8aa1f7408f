"""Series of latencies: what `enginesmith profile --record` adds to that of an engine's unit, bucket and kind of
machine, and change points, each with what else changed there (version, toolchain, driver).

Beside the median each point has the ratio to a reference engine, timed in turns with it: what else runs on the machine
changes a median by tens of percent, and that ratio by one or two.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from builders.backends import discovery
from builders.execution.jobs import Job, Needs
from enginesmith.core.codec import encode
from enginesmith.core.digest import canonical_json
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnknownNameError
from enginesmith.core.hardware.machine import driver_version
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, Ratio
from enginesmith.registry.latency_series import LatencySeries, SeriesPoint, append_point, read_series
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.additions import add_latencies
from enginesmith.registry.versions.lookup import load_if_there
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.keys import engine_limits, model_shapes
from pipeline.compile.steps.latency import BenchmarkPair
from pipeline.operations.revalidate import as_built, spec_of, why_not_here
from pipeline.progress.events import Finished
from pipeline.regressions.pairs import changed_interface
from validation.latency.changes import find_changes

# How many times the seconds of a bucket the paired runs with the reference take.
PAIRED = 5.0


def record_report(chosen: ChosenEngine, report: LatencyReport, seed: int, context: RunContext) -> list[LatencySeries]:
    """Keep a latency report beside its version, add a point for each of its buckets, and return the series.

    Raises IntegrityError for a stored series that cannot be read, and what a store raises.
    """
    add_latencies(context.store, chosen.manifest, [context.store.put_bytes(canonical_json(encode(report)))])
    return [_record_bucket(chosen, report, bucket, seed, context) for bucket in report.buckets]


def _record_bucket(
    chosen: ChosenEngine, report: LatencyReport, bucket: BucketLatency, seed: int, context: RunContext
) -> LatencySeries:
    version, entry = chosen.manifest.version, chosen.entry
    series = read_series(context.store, LatencySeries(chosen.manifest.model, report.unit, bucket.name, report.machine))
    reference = find_reference(context.store, series, entry)
    if reference is None:
        series, reference = series.with_reference(version), entry
    ratio = _time_against(chosen, reference, report, bucket, seed, context)
    own = bucket.runtime or bucket.middle
    point = SeriesPoint(
        at=report.created_at,
        version=version,
        engine=report.engine,
        median_s=bucket.runtime_s,
        low_s=own.low if own else None,
        high_s=own.high if own else None,
        relative=_scaled(ratio.ratio if ratio else None, series.base),
        relative_low=_scaled(ratio.low if ratio else None, series.base),
        relative_high=_scaled(ratio.high if ratio else None, series.base),
        toolchain={**entry.toolchain, **_runtimes(entry)},
        driver=None if entry.hardware.is_cpu else driver_version(),
        load=bucket.surroundings.others,
        busy=bucket.surroundings.busy,
    )
    return append_point(context.store, replace(series, points=()), point)


def find_reference(store: Store, series: LatencySeries, new: EngineEntry) -> EngineEntry | None:
    """The reference engine of a series; None where there is none yet, its bytes are gone, it does not run here, or it
    takes other inputs than the new engine."""
    if series.reference is None:
        return None
    try:
        manifest = load_if_there(store, series.model, series.reference)
        entries = manifest.engines if manifest else ()
        found = next((item for item in entries if item.unit == series.unit and item.usable), None)
        if found is None or not store.has(str(found.digest)) or why_not_here(found):
            return None
        return None if changed_interface(as_built(new).unit.request, found) else found
    except (IntegrityError, UnknownNameError):
        return None


def _time_against(
    chosen: ChosenEngine,
    reference: EngineEntry,
    report: LatencyReport,
    bucket: BucketLatency,
    seed: int,
    context: RunContext,
) -> Ratio | None:
    """The ratio of the engine's time to the reference's at a bucket; None where the two cannot be run together."""
    spec = spec_of(chosen.manifest)
    blobs = as_built(chosen.entry).blob, as_built(reference).blob
    seconds = PAIRED * report.asked.seconds
    pair = BenchmarkPair(*blobs, chosen.manifest.golden, model_shapes(spec), bucket.sizes, seconds, seed)
    name = f"{report.unit} against its reference at {bucket.name}"
    job = Job(name, pair, context.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    try:
        found = context.run_job(context.local, name, job)
    except EnginesmithError as error:
        if stops_run(error):
            raise
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return None
    context.progress.emit(Finished(name))
    return next(item for item in found.ratios if item.p == 0.5)


def _scaled(value: float | None, base: float) -> float | None:
    return None if value is None else value * base


def _runtimes(entry: EngineEntry) -> dict[str, str]:
    """What opened the engine here, by package: 'now onnxruntime'."""
    backend = discovery.configure(entry.backend, dict(entry.options))
    return {f"now {name}": version for name, version in backend.versions().items()}


# 'relative' to the reference engine, which the load of the machine hardly moves; 'median' of quiet points, in seconds.
Value = Literal["relative", "median"]


@dataclass(frozen=True)
class TrendChange:
    """A change of level of one value of a series. at: time of the first point after it.  ratio: after over before.

    came_with: what differs between the points before and after it: 'version 3 -> 4', 'onnxruntime 1.30 -> 1.31'.
    """

    value: Value
    index: int
    at: str
    ratio: float
    z: float
    came_with: tuple[str, ...]


@dataclass(frozen=True)
class Trend:
    """A series with its change points. quiet: number of points that were measured on a quiet machine.

    changes: None where the package that finds them is not installed (extra `trend`).
    """

    series: LatencySeries
    changes: tuple[TrendChange, ...] | None
    quiet: int


def find_trend(series: LatencySeries) -> Trend:
    """A series with its change points, by both of its values; without ruptures the series alone."""
    quiet = sum(not point.busy for point in series.points)
    try:
        changes = [*_changes_of(series, "relative"), *_changes_of(series, "median")]
    except ModuleNotFoundError as error:
        if error.name != "ruptures":
            raise
        return Trend(series, None, quiet)
    return Trend(series, tuple(sorted(changes, key=lambda item: item.index)), quiet)


def _changes_of(series: LatencySeries, value: Value) -> Iterator[TrendChange]:
    known = [
        (index, point, number)
        for index, point in enumerate(series.points)
        if (number := value_of(point, value)) is not None and number > 0
    ]
    for change in find_changes([number for _, _, number in known]):
        index, point, _ = known[change.index]
        before = known[change.index - 1][1]
        yield TrendChange(value, index, point.at, change.ratio, change.z, tuple(list_differences(before, point)))


def value_of(point: SeriesPoint, value: Value) -> float | None:
    """A value of a point: of a busy machine only the relative one counts."""
    if value == "relative":
        return point.relative
    return None if point.busy else point.median_s


def list_differences(before: SeriesPoint, after: SeriesPoint) -> list[str]:
    """What differs between two points, in words; nothing where the change came with nothing that is recorded."""
    found = [f"version {before.version} -> {after.version}"] if before.version != after.version else []
    if before.engine != after.engine and not found:
        found.append("engine rebuilt")
    for name in sorted({*before.toolchain, *after.toolchain}):
        pair = before.toolchain.get(name, "none"), after.toolchain.get(name, "none")
        if pair[0] != pair[1]:
            found.append(f"{name} {pair[0]} -> {pair[1]}")
    if before.driver != after.driver:
        found.append(f"driver {before.driver or 'none'} -> {after.driver or 'none'}")
    return found


def describe_change(change: TrendChange) -> str:
    """'2026-11-20 relative 3.1 % slower, with version 3 -> 4'."""
    word = "slower" if change.ratio > 1 else "faster"
    size = abs(change.ratio - 1) * 100
    came = f", with {'; '.join(change.came_with)}" if change.came_with else ", with nothing that is recorded"
    return f"{change.at[:10]} {change.value} {size:.1f} % {word}{came}"
