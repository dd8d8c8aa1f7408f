"""Change points of a model's series of latencies, each with what else changed there: version, toolchain, driver."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from enginesmith.registry.latency_series import LatencySeries, SeriesPoint
from validation.latency.changes import find_changes

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
