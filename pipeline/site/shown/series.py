"""Series of latencies as a page shows them: points in a small picture of plain SVG, and what changed their level."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.latency_series import LatencySeries, SeriesPoint, order_of, parse_series
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import SERIES
from pipeline.regressions.trend import Value, describe_change, find_trend

WIDTH, HEIGHT, _MARGIN = 600, 120, 6
# Newest points of a series that its table lists; `enginesmith profile --series --json` has all.
MOST_POINTS = 40


@dataclass(frozen=True)
class ShownPoint:
    """A point of the picture. x, y: its place.  hollow: whether it was measured on a busy machine."""

    x: float
    y: float
    hollow: bool
    title: str


@dataclass(frozen=True)
class ShownSeries:
    """A series. id: a part of its page's address.  series: None where it cannot be read, and `problem` says why.

    value: what the picture shows, the ratio to a reference or the median.  low, high: the ends of its axis.  changes:
    in words, newest first; None where change points cannot be computed here.  newest: points, newest first.
    """

    id: str
    series: LatencySeries | None = None
    problem: str = ""
    value: Value = "median"
    low: float = 0.0
    high: float = 0.0
    points: tuple[ShownPoint, ...] = ()
    changes: tuple[str, ...] | None = ()
    marks: tuple[float, ...] = ()
    newest: tuple[SeriesPoint, ...] = ()


def read_all_series(store: Store, model: str) -> tuple[ShownSeries, ...]:
    """Every series of a model, by unit, bucket and machine."""
    found = (_read(store, key) for key in store.list(f"{SERIES}{model}/"))
    return tuple(sorted((item for item in found if item), key=_order))


def _order(shown: ShownSeries) -> tuple[object, ...]:
    return (False, order_of(shown.series)) if shown.series else (True, shown.id)


def _read(store: Store, key: str) -> ShownSeries | None:
    name = f"series-{key.rpartition('/')[2].removesuffix('.json')[:16]}"
    data = store.read(key)
    if data is None:
        return None
    try:
        series = parse_series(data, key)
    except IntegrityError as error:
        return ShownSeries(name, problem=str(error))
    return _show(name, series)


def _show(name: str, series: LatencySeries) -> ShownSeries:
    value: Value = "relative" if any(point.relative for point in series.points) else "median"
    known = [(index, point, _number(point, value)) for index, point in enumerate(series.points)]
    numbers = [number for *_, number in known if number is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    trend, last = find_trend(series), max(len(series.points) - 1, 1)
    points = tuple(
        ShownPoint(_across(index, last), _down(number, low, high), bool(point.busy), _title(point, number, value))
        for index, point, number in known
        if number is not None
    )
    changes = trend.changes or ()
    return ShownSeries(
        name,
        series,
        value=value,
        low=low,
        high=high,
        points=points,
        changes=None if trend.changes is None else tuple(map(describe_change, reversed(changes))),
        marks=tuple(_across(change.index - 0.5, last) for change in changes if change.value == value),
        newest=series.points[: -MOST_POINTS - 1 : -1],
    )


def _number(point: SeriesPoint, value: Value) -> float | None:
    return point.relative if value == "relative" else point.median_s


def _title(point: SeriesPoint, number: float, value: Value) -> str:
    text = f"{number:.4f} times the reference" if value == "relative" else f"{number * 1e6:.1f} µs"
    return f"{point.at[:16].replace('T', ' ')} UTC, version {point.version}: {text}" + (", busy" if point.busy else "")


def _across(index: float, last: int) -> float:
    return round(_MARGIN + index / last * (WIDTH - 2 * _MARGIN), 1)


def _down(number: float, low: float, high: float) -> float:
    share = (number - low) / (high - low) if high > low else 0.5
    return round(HEIGHT - _MARGIN - share * (HEIGHT - 2 * _MARGIN), 1)


def line_of(points: Sequence[ShownPoint]) -> str:
    """The points as the path of an SVG polyline."""
    return " ".join(f"{point.x:g},{point.y:g}" for point in points)
