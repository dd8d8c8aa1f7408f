"""Recorded traffic summarized: tables and pictures."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.text import format_plain, pluralize
from enginesmith.core.types import Dim
from pipeline.traffic.choice import BucketChoice, BucketPlan
from pipeline.traffic.place import SplitTrace, TrafficAtPlace
from validation.plotting import COLOURS, SERIES, annotate, draw_svg, seconds_text, set_axis, tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOUR_S = 3600.0
# With more hours than this they are put together by the hour of the day.
MOST_HOURS = 48
QUANTILES = (0.5, 0.9, 0.99)
# Rates are over a minute at least: an hour of which a second was recorded has none.
_LEAST_S = 60.0


@dataclass(frozen=True)
class SizeCounts:
    """A histogram. counts: size -> requests.  quantiles: of the sizes, at QUANTILES."""

    counts: Mapping[int, int]
    mean: float
    quantiles: tuple[float, ...]

    @property
    def least(self) -> int:
        """The smallest size."""
        return min(self.counts)

    @property
    def greatest(self) -> int:
        """The greatest size."""
        return max(self.counts)


@dataclass(frozen=True)
class HourOfTraffic:
    """An hour. name: '2026-03-01 14:00' or '14:00' (UTC) of absolute times, else 'hour 3' since the first request.

    per_second: mean rate of the real traffic in requests a second.
    """

    name: str
    requests: int
    per_second: float
    sizes: Mapping[str, SizeCounts]


@dataclass(frozen=True)
class Burstiness:
    """Bursts in traffic. peak_per_second: maximum requests in a second.  dispersion: variance over mean of the requests
    per second; 1 for a Poisson process (Fano, Physical Review 72, 1947).  longest_gap_s: between two requests.

    The values describe the recorded requests; a sample of traffic has smaller peaks, and a dispersion nearer to 1.
    """

    peak_per_second: int
    dispersion: float
    longest_gap_s: float


@dataclass(frozen=True)
class TrafficSummary:
    """The numbers of recorded traffic. seconds, per_second, bursts: None without times.  per_second: of the real
    traffic.  hours: () without times.

    start: of absolute times, ISO 8601 in UTC.  beyond: dim -> requests whose size the spec's dim does not have.
    files: their number.  sampling: share of the requests that was recorded.  made: how it was generated; '' if not.
    """

    requests: int
    files: int
    sampling: float
    made: str
    start: str | None
    seconds: float | None
    per_second: float | None
    dims: Mapping[str, SizeCounts]
    beyond: Mapping[str, int]
    hours: tuple[HourOfTraffic, ...]
    bursts: Burstiness | None


def summarize(traffic: TrafficAtPlace, dims: Sequence[Dim]) -> TrafficSummary:
    """The summary of traffic to a model with these dims."""
    trace, has_times = traffic.trace, traffic.trace.timed
    start = datetime.fromtimestamp(trace.start, UTC).isoformat(timespec="seconds") if traffic.absolute else None
    outliers = {dim.name: (trace.sizes[dim.name] < dim.min) | (trace.sizes[dim.name] > dim.max) for dim in dims}
    return TrafficSummary(
        requests=len(trace),
        files=len(traffic.files),
        sampling=traffic.sampling,
        made=traffic.made,
        start=start,
        seconds=float(trace.at[-1]) if has_times else None,
        per_second=traffic.per_second if has_times else None,
        dims={dim.name: count_sizes(trace.sizes[dim.name]) for dim in dims},
        beyond={name: int(mask.sum()) for name, mask in outliers.items() if mask.any()},
        hours=tuple(_split_hours(traffic, dims)) if has_times else (),
        bursts=measure_bursts(trace.at) if has_times else None,
    )


def count_sizes(sizes: Array) -> SizeCounts:
    """The histogram of sizes, int64 [requests], at least one."""
    values, counts = np.unique(sizes, return_counts=True)
    quantiles = tuple(float(value) for value in np.quantile(sizes, QUANTILES))
    return SizeCounts(dict(zip(values.tolist(), counts.tolist(), strict=True)), float(sizes.mean()), quantiles)


def measure_bursts(arrivals: Array) -> Burstiness:
    """How bursty arrivals are. arrivals: seconds, float64 [requests], rising, two at least."""
    window_counts = np.searchsorted(arrivals, arrivals + 1.0, "left") - np.arange(len(arrivals))
    _, counts = np.unique(arrivals.astype(np.int64), return_counts=True)  # seconds without requests may be many
    seconds = int(arrivals[-1]) + 1
    mean = len(arrivals) / seconds
    variance = float((counts.astype(np.float64) ** 2).sum()) / seconds - mean**2
    return Burstiness(int(window_counts.max()), max(variance, 0.0) / mean, float(np.diff(arrivals).max()))


def _split_hours(traffic: TrafficAtPlace, dims: Sequence[Dim]) -> "list[HourOfTraffic]":
    """Each hour that has requests; by the hour of the day where there are many and times are absolute."""
    trace, start_s = traffic.trace, traffic.trace.start if traffic.absolute else 0.0
    hours = np.floor((start_s + trace.at) / HOUR_S).astype(np.int64)
    by_day = traffic.absolute and hours[-1] - hours[0] >= MOST_HOURS
    keys = hours % 24 if by_day else hours
    traffic_hours = []
    for key in np.unique(keys):
        hour_mask = keys == key
        seconds = _seconds_in(int(key), start_s + float(trace.at[-1]), by_day) - _seconds_in(int(key), start_s, by_day)
        if by_day:
            name = f"{key:02}:00"
        elif traffic.absolute:
            name = datetime.fromtimestamp(int(key) * HOUR_S, UTC).strftime("%Y-%m-%d %H:00")
        else:
            name = f"hour {key}"
        sizes = {dim.name: count_sizes(trace.sizes[dim.name][hour_mask]) for dim in dims}
        rate = float(hour_mask.sum()) / max(seconds, _LEAST_S) / traffic.sampling
        traffic_hours.append(HourOfTraffic(name, int(hour_mask.sum()), rate, sizes))
    return traffic_hours


def _seconds_in(hour: int, until: float, by_day: bool) -> float:
    """Seconds from time 0 until `until` that lie in an hour; in that hour of each day where `by_day`."""
    days, rest_s = divmod(until, 24 * HOUR_S) if by_day else (0.0, until)
    return days * HOUR_S + min(max(rest_s - hour * HOUR_S, 0.0), HOUR_S)


# Width and height of each of the stacked charts.
WIDTH, HEIGHT = 640, 260
_MOST_BARS = 160
# The axis of sizes is logarithmic if the greatest is this many times the median.
_LONG_TAIL = 8.0
# Draws one chart, and returns its words.
Chart = Callable[["Axes"], str]


def draw_traffic(summary: TrafficSummary, buckets: Mapping[str, Sequence[int]]) -> str:
    """The SVG of traffic. buckets: the upper edges that the spec has for each dim."""
    dims = [dim for dim, counts in summary.dims.items() if len(counts.counts) > 1] or [*summary.dims]
    charts: list[Chart] = [
        partial(draw_histogram, dim=dim, counts=summary.dims[dim], buckets={"present": buckets[dim]}) for dim in dims
    ]
    if len(summary.hours) > 1:
        charts += [partial(_draw_rates, summary=summary)]
        charts += [partial(_draw_hours, summary=summary, dim=dim) for dim in dims]
    return _draw(charts)


def draw_choice(sizes: Mapping[str, SizeCounts], plans: Sequence[BucketPlan]) -> str:
    """The SVG of the histogram of each chosen dim with the chosen buckets and the present ones. sizes: of these."""
    shown_plans = [plan for plan in plans if plan.name in ("chosen", "present")]
    charts = []
    for dim, counts in sizes.items():
        buckets = {plan.name: plan.edges[dim] for plan in shown_plans}
        charts.append(partial(draw_histogram, dim=dim, counts=counts, buckets=buckets))
    return _draw(charts)


def _draw(charts: Sequence[Chart]) -> str:
    captions: list[str] = []

    def draw(figure: "Figure") -> None:
        axes_list = figure.subplots(len(charts), squeeze=False)[:, 0]
        captions.extend(chart(axes) for chart, axes in zip(charts, axes_list, strict=True))

    return draw_svg("traffic", captions, draw, (WIDTH, HEIGHT * len(charts)), standalone=True)


def draw_histogram(axes: "Axes", dim: str, counts: SizeCounts, buckets: Mapping[str, Sequence[int]]) -> str:
    """Requests by size, and the upper edges of buckets as lines. buckets: name -> edges, the strongest first."""
    top = max([counts.greatest, *(edge for edges in buckets.values() for edge in edges)])
    is_log = counts.least > 0 and counts.greatest / max(counts.quantiles[0], 1.0) >= _LONG_TAIL
    low = max(counts.least - 1, 0.5) if is_log else min(counts.least - 1, 0)
    edges = _bar_edges(low, top, is_log)
    heights, _ = np.histogram(list(counts.counts), edges, weights=list(counts.counts.values()))
    max_height = float(heights.max())
    axes.stairs(heights, edges, fill=True, color=COLOURS["muted"], alpha=0.55, label="requests", gid=tag("requests"))
    for index, (name, ends) in enumerate(buckets.items()):
        line_style: Any = {"color": COLOURS["c2" if index else "accent"], "linestyle": "--" if index else "-"}
        for number, end in enumerate(ends):
            gid, label = tag("edge", f"{name}: up to {end}"), None if number else f"{name} buckets"
            height = (0.95 if index else 1.1) * max_height
            axes.plot([end, end], [0, height], linewidth=1.6, label=label, gid=gid, **line_style)
    for end in _apart(next(iter(buckets.values())), low, top, is_log):
        annotate(axes, str(end), (end, 1.1 * max_height), (0, 3), ha="center", color=COLOURS["accent"])
    label = f"{dim} of a request" + (", logarithmic" if is_log else "")
    set_axis(axes, "x", (float(low), top * 1.03), label, log=is_log, text=_count)
    set_axis(axes, "y", (0.0, 1.2 * max_height), "requests", text=_count)
    total = sum(counts.counts.values())
    caption = f"{total} requests by {dim}: half up to {counts.quantiles[0]:g}, the largest {counts.greatest}"
    return caption + "".join(f"; {name} buckets up to {', '.join(map(str, ends))}" for name, ends in buckets.items())


def _count(value: float) -> str:
    return f"{value:,.10g}"


def _bar_edges(low: float, top: float, log: bool) -> Array:
    """Edges of bars behind whole sizes, so that a bar holds sizes (edge before, edge]."""
    if log:
        return np.unique(np.append(low, np.floor(np.geomspace(max(low, 1.0), top, _MOST_BARS // 2)) + 0.5))
    step = max(math.ceil((top - low) / _MOST_BARS), 1)
    return np.arange(low, top + step + 1, step) + 0.5


def _apart(ends: Sequence[int], low: float, top: float, log: bool) -> list[int]:
    """Those of the edges that have room for their labels, from the greatest down."""
    least_gap = (math.log(top / low) if log else top - low) / (WIDTH / 34)
    label_ends: list[int] = []
    for end in sorted(ends, reverse=True):
        if not label_ends or (math.log(label_ends[-1] / end) if log else label_ends[-1] - end) >= least_gap:
            label_ends.append(end)
    return label_ends


def _draw_rates(axes: "Axes", summary: TrafficSummary) -> str:
    rates = [hour.per_second for hour in summary.hours]
    axes.stairs(rates, np.arange(len(rates) + 1) - 0.5, fill=True, color=COLOURS["accent"])
    _set_hours(axes, summary)
    set_axis(axes, "y", (0.0, 1.1 * max(rates)), "requests per second")
    return f"requests per second by hour: {format_plain(min(rates))} to {format_plain(max(rates))}"


def _draw_hours(axes: "Axes", summary: TrafficSummary, dim: str) -> str:
    captions, top = [], 0.0
    for index, share in enumerate(QUANTILES):
        sizes = [hour.sizes[dim].quantiles[index] for hour in summary.hours]
        name, top = f"{100 * share:g} % up to", max(top, *sizes)
        axes.plot(range(len(sizes)), sizes, color=SERIES[index], label=name, gid=tag("quantile", name))
        captions.append(f"{name} {sizes[-1]:g}")
    _set_hours(axes, summary)
    set_axis(axes, "y", (0.0, 1.1 * top), f"{dim} of a request")
    return f"{dim} by hour: {'; '.join(captions)}"


def _set_hours(axes: "Axes", summary: TrafficSummary) -> None:
    names = [hour.name[-5:] if summary.start else hour.name for hour in summary.hours]
    ticks = [(float(index), names[index]) for index in range(0, len(names), math.ceil(len(names) / 9))]
    label = f"UTC, from {summary.start}" if summary.start else ""
    set_axis(axes, "x", (-0.5, len(names) - 0.5), label, ticks=ticks)


DIM_COLUMNS = ("dim", "requests", "sizes", "min", "mean", *(f"{100 * share:g} %" for share in QUANTILES), "max")
PLAN_COLUMNS = ("buckets", "profiles", "engine time per request", "padding", "batch", "busy", "price", "chosen saves")
# Rows of a histogram in text, and characters of its longest bar.
_MOST_ROWS, _BAR = 16, 30


def dim_rows(summary: TrafficSummary) -> list[list[str]]:
    """Rows of DIM_COLUMNS."""
    rows = []
    for dim, counts in summary.dims.items():
        quantiles = [f"{value:g}" for value in counts.quantiles]
        cells = [str(summary.requests), str(len(counts.counts)), str(counts.least), f"{counts.mean:.4g}"]
        rows.append([dim, *cells, *quantiles, str(counts.greatest)])
    return rows


def histogram_rows(counts: SizeCounts, edges: Sequence[int]) -> list[list[str]]:
    """Rows of (sizes, requests, share, bar): by the spec's buckets where there are several, else in equal steps."""
    ends = [edge for edge in edges if edge >= counts.least] if len(edges) > 1 else _equal_steps(counts)
    ends = ends if ends and ends[-1] >= counts.greatest else [*ends, counts.greatest]
    total, rows, start = sum(counts.counts.values()), [], counts.least - 1
    bucket_counts = [
        sum(count for size, count in counts.counts.items() if low < size <= high)
        for low, high in zip([-1, *ends[:-1]], ends, strict=True)
    ]
    for end, count in zip(ends, bucket_counts, strict=True):
        bar = "█" * round(_BAR * count / max(bucket_counts))
        rows.append([f"{start + 1}..{end}" if end > start + 1 else str(end), str(count), _share(count / total), bar])
        start = end
    return rows


def _equal_steps(counts: SizeCounts) -> list[int]:
    steps = np.linspace(counts.least - 1, counts.greatest, min(_MOST_ROWS, len(counts.counts)) + 1)[1:]
    return sorted({int(np.ceil(end)) for end in steps})


def hour_table(summary: TrafficSummary) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row for each hour."""
    dims = [dim for dim, counts in summary.dims.items() if len(counts.counts) > 1]
    columns = ["hour", "requests", "per second", *(f"{dim} 50, 90, 99 %" for dim in dims)]
    rows = []
    for hour in summary.hours:
        sizes = [", ".join(f"{value:g}" for value in hour.sizes[dim].quantiles) for dim in dims]
        rows.append([hour.name, str(hour.requests), format_plain(hour.per_second), *sizes])
    return columns, rows


def describe_traffic(summary: TrafficSummary) -> Iterator[str]:
    """Sentences on arrivals and on what lies beyond the spec."""
    file_note = f" in {pluralize(summary.files, 'file')}" if summary.files > 1 else ""
    origin_note = f" (made: {summary.made})" if summary.made else ""
    share_text = f", {100 * summary.sampling:g} % of the traffic" if summary.sampling < 1 else ""
    yield f"{pluralize(summary.requests, 'request')}{file_note}{share_text}{origin_note}"
    if summary.seconds is None or summary.per_second is None or summary.bursts is None:
        yield "no times of arrival, or all of them the same: no rates, no hours"
    else:
        start_text = f" from {summary.start}" if summary.start else ""
        yield f"recorded in {summary.seconds:.4g} s{start_text}: {format_plain(summary.per_second)} requests per second"
        bursts = summary.bursts
        yield (
            f"at most {bursts.peak_per_second} within a second; variance over mean of a second's requests "
            f"{format_plain(bursts.dispersion)} (1: Poisson); longest gap {format_plain(bursts.longest_gap_s)} s"
        )
    for dim, count in summary.beyond.items():
        yield f"{dim}: {pluralize(count, 'request')} beyond the spec's dims ({_share(count / summary.requests)})"


def plan_rows(plans: Sequence[BucketPlan]) -> list[list[str]]:
    """Rows of PLAN_COLUMNS."""
    rows = []
    for plan in plans:
        busy_text = "" if plan.utilization is None else _share(plan.utilization)
        saving_text = ""
        if plan.saved is not None:
            value, low, high = (
                format_plain(100 * share) for share in (plan.saved.value, plan.saved.low, plan.saved.high)
            )
            saving_text = f"{value} % ({low} to {high})"
        value, low, high = (seconds_text(bound) for bound in (plan.seconds.value, plan.seconds.low, plan.seconds.high))
        time_text = f"{value} ({low} to {high})"
        cells = [_share(plan.padding), f"{plan.batch:.2f}", busy_text, seconds_text(plan.price_s), saving_text]
        rows.append([plan.name, str(plan.profiles), time_text, *cells])
    return rows


def describe_choice(choice: BucketChoice, split: SplitTrace) -> Iterator[str]:
    """Sentences on the chosen buckets: the edges, the requests that none of them holds."""
    for dim, edges in choice.edges.items():
        yield f"{dim}: buckets [{', '.join(map(str, edges))}]"
    for dim, counts in split.beyond.items():
        sizes, count = sorted(counts), sum(counts.values())
        span = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
        yield f"{dim}: {pluralize(count, 'request')} beyond the spec's dims ({span}): they need a fallback"
    if split.beyond:
        yield f"fallback: {_share(split.fallback_share)} of the requests, which no cost here includes"


def _share(value: float) -> str:
    return f"{format_plain(100 * value)} %"
