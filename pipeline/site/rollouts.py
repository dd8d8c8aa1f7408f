"""Parts of a page: rollouts, series of latencies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.latency_series import LatencySeries, SeriesPoint, order_of, parse_series
from enginesmith.registry.rollouts.state import EarlierRollout, Gates, Rollout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import SERIES
from enginesmith.registry.versions.state import Channel, ChannelHistory
from pipeline.regressions.trend import Value, describe_change, find_trend

# A channel's rollout as a page shows it: its waves, its gates and its decisions, without what changes by the second.
#
# What nodes report is not here: it changes all the time, and `enginesmith rollout status` reads it.


@dataclass(frozen=True)
class ShownWave:
    """A wave. who: its slice of the nodes, '5%'.  soak_s: least time that it lasts, in seconds.  state: in words."""

    who: str
    soak_s: int
    state: str


@dataclass(frozen=True)
class ShownRollout:
    """A rollout of a channel. earlier: those before it, oldest first."""

    channel: str
    rollout: Rollout
    earlier: tuple[EarlierRollout, ...]
    waves: tuple[ShownWave, ...]
    gates: tuple[str, ...]

    @property
    def state(self) -> str:
        """Its state."""
        return self.rollout.state

    @property
    def is_active(self) -> bool:
        """Whether nodes follow it."""
        return not self.rollout.is_finished

    @property
    def reach(self) -> str:
        """The share of the nodes that it leads to the new version: '5%', '25%, region=eu-west-1'."""
        return ", ".join(map(str, self.rollout.reach))


def show_rollout(channel: Channel, history: ChannelHistory) -> ShownRollout | None:
    """The rollout of a channel; None where it never had one."""
    rollout = channel.rollout
    if rollout is None:
        return None
    earlier = tuple(item for item in history.rollouts if item.id != rollout.id)
    waves, gates = tuple(_waves(rollout)), tuple(_gates(rollout.plan.gates))
    return ShownRollout(channel.name, rollout, earlier, waves, gates)


def _waves(rollout: Rollout) -> Iterable[ShownWave]:
    for index, (wave, soak_s) in enumerate(zip(rollout.plan.waves, rollout.plan.soaks_s, strict=True)):
        if index < rollout.wave or rollout.state == "done":
            state = "passed"
        elif index > rollout.wave:
            state = "never" if rollout.is_finished else "to come"
        elif rollout.state != "running":
            state = rollout.state
        else:
            state = "open" if rollout.soaking else "opening"
        yield ShownWave(str(wave), soak_s, state)


def _gates(gates: Gates) -> Iterable[str]:
    if gates.health_ppm is not None:
        reports = f", of at least {gates.least_reports}" if gates.least_reports > 1 else ""
        yield f"at least {gates.health_ppm / 10_000:g} % of the nodes that report are well{reports}"
    if gates.errors_ppm is not None:
        yield f"at most {gates.errors_ppm / 10_000:g} % of the requests failed"
    if gates.canary:
        yield "a canary's PASS"
    if gates.approve:
        yield "a person approves each wave"


# Series of latencies as a page shows them: points in a small picture of plain SVG, and what changed their level.

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
    all_series = (_read(store, key) for key in store.list(f"{SERIES}{model}/"))
    return tuple(sorted((item for item in all_series if item), key=_order))


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
    indexed_points = [
        (index, point, (point.relative if value == "relative" else point.median_s))
        for index, point in enumerate(series.points)
    ]
    numbers = [number for *_, number in indexed_points if number is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    trend, last = find_trend(series), max(len(series.points) - 1, 1)
    points = tuple(
        ShownPoint(_across(index, last), _down(number, low, high), bool(point.busy), _title(point, number, value))
        for index, point, number in indexed_points
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
