"""Series of latencies: points, changes of level, a picture."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnknownNameError, canonical_json
from enginesmith.core.hardware.machine import driver_version
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, Ratio
from enginesmith.registry.latency_series import LatencySeries, SeriesPoint, append_point, read_series
from enginesmith.registry.manifest import EngineEntry, request_of
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import load_if_there
from enginesmith.registry.versions.publish import add_latencies
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext, Work, fail_step
from pipeline.compile.steps.keys import time_pair
from pipeline.operations.validate import spec_of, why_not_here
from pipeline.outcome import engine_of
from pipeline.regressions.pairs import changed_interface
from validation.latency.formatting import find_changes
from validation.plotting import COLOURS, annotate, draw_svg, seconds_text, set_axis, shorten, span, tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Series of latencies: what `enginesmith profile --record` adds to that of an engine's unit, bucket and kind of
# machine, and change points, each with what else changed there (version, toolchain, driver).
#
# Beside the median each point has the ratio to a reference engine, timed in turns with it: what else runs on the
# machine changes a median by tens of percent, and that ratio by one or two.

# How many times the seconds of a bucket the paired runs with the reference take.
PAIRED = 5.0


def record_report(engine: ChosenEngine, report: LatencyReport, context: RunContext) -> list[LatencySeries]:
    """Keep a latency report beside its version, add a point for each of its buckets, and return the series.

    Raises IntegrityError for a stored series that cannot be read, and what a store raises.
    """
    add_latencies(context.store, engine.manifest, [context.store.put_bytes(canonical_json(encode(report)))])
    return [_record_bucket(engine, report, bucket, context) for bucket in report.buckets]


def _record_bucket(
    engine: ChosenEngine, report: LatencyReport, bucket: BucketLatency, context: RunContext
) -> LatencySeries:
    version, entry = engine.manifest.version, engine.entry
    series = read_series(context.store, LatencySeries(engine.manifest.model, report.unit, bucket.name, report.machine))
    reference = find_reference(context.store, series, entry)
    if reference is None:
        series, reference = series.with_reference(version), entry
    ratio = _time_against(engine, reference, report, bucket, context)
    bounds = (ratio.ratio, ratio.low, ratio.high) if ratio else (None, None, None)
    relative_median, relative_low, relative_high = (None if value is None else value * series.base for value in bounds)
    # Packages that opened the engine here: 'now onnxruntime'.
    backend = discovery.configure(entry.backend, dict(entry.options))
    runtimes = {f"now {name}": text for name, text in backend.versions().items()}
    interval = bucket.runtime or bucket.middle
    point = SeriesPoint(
        at=report.created_at,
        version=version,
        engine=report.engine,
        median_s=bucket.runtime_s,
        low_s=interval.low if interval else None,
        high_s=interval.high if interval else None,
        relative=relative_median,
        relative_low=relative_low,
        relative_high=relative_high,
        toolchain={**entry.toolchain, **runtimes},
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
        reference_entry = next((entry for entry in entries if entry.unit == series.unit and entry.usable), None)
        if reference_entry is None or not store.has(str(reference_entry.digest)) or why_not_here(reference_entry):
            return None
        return None if changed_interface(request_of(new), reference_entry) else reference_entry
    except (IntegrityError, UnknownNameError):
        return None


def _time_against(
    engine: ChosenEngine, reference: EngineEntry, report: LatencyReport, bucket: BucketLatency, context: RunContext
) -> Ratio | None:
    """The ratio of the engine's time to the reference's at a bucket; None where the two cannot be run together."""
    work, blobs = Work(spec_of(engine.manifest), context), (engine_of(engine.entry), engine_of(reference))
    seconds = PAIRED * report.asked.seconds
    name = f"{report.unit} against its reference at {bucket.name}"
    try:
        benchmark = time_pair(name, blobs, engine.manifest.golden, bucket.sizes, seconds, work)
    except EnginesmithError as error:
        fail_step(name, error, context)
        return None
    return next(ratio for ratio in benchmark.ratios if ratio.p == 0.5)


# 'relative' to the reference engine, which the load of the machine hardly moves; 'median' of quiet points, in seconds.
Value = Literal["relative", "median"]


@dataclass(frozen=True)
class TrendChange:
    """A change of level of one value of a series. at: time of the first point after it.  ratio: after over before.

    came_with: what differs between the points before and after it: 'version 3 -> 4', 'onnxruntime 1.30 -> 1.31'.
    value: what changed.  index: of the first point after it.  z: the change in standard errors.
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
    quiet_count = sum(not point.busy for point in series.points)
    try:
        changes = [*_changes_of(series, "relative"), *_changes_of(series, "median")]
    except ModuleNotFoundError as error:
        if error.name != "ruptures":
            raise
        return Trend(series, None, quiet_count)
    return Trend(series, tuple(sorted(changes, key=lambda change: change.index)), quiet_count)


def _changes_of(series: LatencySeries, value: Value) -> Iterator[TrendChange]:
    numbered_points = [
        (index, point, number)
        for index, point in enumerate(series.points)
        if (number := value_of(point, value)) is not None and number > 0
    ]
    for change in find_changes([number for _, _, number in numbered_points]):
        index, point, _ = numbered_points[change.index]
        previous_point = numbered_points[change.index - 1][1]
        yield TrendChange(
            value, index, point.at, change.ratio, change.z, tuple(list_differences(previous_point, point))
        )


def value_of(point: SeriesPoint, value: Value) -> float | None:
    """A value of a point: of a busy machine only the relative one counts."""
    if value == "relative":
        return point.relative
    return None if point.busy else point.median_s


def list_differences(before: SeriesPoint, after: SeriesPoint) -> list[str]:
    """What differs between two points, in words; nothing where the change came with nothing that is recorded."""
    differences = [f"version {before.version} -> {after.version}"] if before.version != after.version else []
    if before.engine != after.engine and not differences:
        differences.append("engine rebuilt")
    for name in sorted({*before.toolchain, *after.toolchain}):
        pair = before.toolchain.get(name, "none"), after.toolchain.get(name, "none")
        if pair[0] != pair[1]:
            differences.append(f"{name} {pair[0]} -> {pair[1]}")
    if before.driver != after.driver:
        differences.append(f"driver {before.driver or 'none'} -> {after.driver or 'none'}")
    return differences


def describe_change(change: TrendChange) -> str:
    """'2026-11-20 relative 3.1 % slower, with version 3 -> 4'."""
    verdict = "slower" if change.ratio > 1 else "faster"
    percent = abs(change.ratio - 1) * 100
    cause_text = f", with {'; '.join(change.came_with)}" if change.came_with else ", with nothing that is recorded"
    return f"{change.at[:10]} {change.value} {percent:.1f} % {verdict}{cause_text}"


# A series of latencies as a picture: its points with their intervals, the levels between changes, and what came with
# each change.

# Width and height of the picture.
SIZE = (720, 260)
_LEVEL = "the median between changes"


def draw_trend(trend: Trend) -> str:
    """A plot of a series as SVG: of the ratios to the reference if some points have one, else of the medians."""
    value: Value = "relative" if any(point.relative for point in trend.series.points) else "median"
    numbered_points = [
        (i, point, number)
        for i, point in enumerate(trend.series.points)
        if (number := (point.relative if value == "relative" else point.median_s))
    ]
    changes = [change for change in trend.changes or () if change.value == value]
    last_x = max(len(trend.series.points) - 1, 1)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for x, point, number in numbered_points:
            # A point with its interval; hollow where it was measured on a busy machine.
            low, high = (
                (point.relative_low, point.relative_high) if value == "relative" else (point.low_s, point.high_s)
            )
            title = f"{point.at}, version {point.version}: {number:.4g}" + (", busy machine" if point.busy else "")
            if low is not None and high is not None:
                axes.plot([x, x], [low, high], color=COLOURS["line"], linewidth=1.5, gid=tag("interval", title))
            is_hollow = bool(point.busy) and value_of(point, value) is None
            colour, fill = COLOURS["muted" if is_hollow else "accent"], "none" if is_hollow else COLOURS["accent"]
            axes.plot(x, number, "o", color=colour, markersize=5, markerfacecolor=fill, gid=tag("point", title))
        _draw_levels(axes, numbered_points, changes)
        y_range = span(
            [number for _, _, number in numbered_points], pad=0.12, least=0.02 if value == "relative" else 0.0
        )
        label = "times the reference" if value == "relative" else "median"
        set_axis(
            axes, "y", y_range, label, text=(lambda number: f"{number:.3f}") if value == "relative" else seconds_text
        )
        tick_indices = sorted({0, last_x // 2, len(trend.series.points) - 1})
        ticks = [(float(x), trend.series.points[x].at[:10]) for x in tick_indices]
        set_axis(axes, "x", (-0.02 * last_x, 1.02 * last_x), ticks=ticks)

    caption = f"{trend.series.model} {trend.series.unit} at {trend.series.bucket}: {len(numbered_points)} points"
    return draw_svg("trend", caption, draw, SIZE, standalone=True)


def _draw_levels(
    axes: "Axes", points: Sequence[tuple[int, SeriesPoint, float]], changes: Sequence[TrendChange]
) -> None:
    for start, end in pairwise([0, *(change.index for change in changes), math.inf]):
        numbers = sorted(number for i, _, number in points if start <= i < end)
        if numbers:
            last_x, gid = max(i for i, _, _ in points if i < end), tag("level", _LEVEL)
            axes.plot([start, last_x], [numbers[len(numbers) // 2]] * 2, color=COLOURS["ink"], gid=gid)
    midpoint = points[-1][0] / 2 if points else 0
    for row, change in enumerate(changes):
        x, is_late = change.index - 0.5, change.index > midpoint
        gid = tag("change", describe_change(change))
        axes.axvline(x, color=COLOURS["failed"], linewidth=1.0, linestyle="--", gid=gid)
        text = shorten(f"{100 * (change.ratio - 1):+.1f} %: {'; '.join(change.came_with) or 'nothing recorded'}")
        offset = (-4 if is_late else 4, -12 - 14 * (row % 3))
        annotate(axes, text, (x, 1.0), offset, ha="right" if is_late else "left", color=COLOURS["failed"], top=True)
