"""Traffic and plans as rows of text."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from enginesmith.core.text import format_plain, pluralize
from pipeline.traffic.choice import BucketChoice, BucketPlan
from pipeline.traffic.place import SplitTrace
from pipeline.traffic.search.plan_costs import Interval95
from pipeline.traffic.summary import QUANTILES, PairCounts, SizeCounts, TrafficSummary
from validation.plots.texts import seconds_text

DIM_COLUMNS = ("dim", "requests", "sizes", "least", "mean", *(f"{100 * share:g} %" for share in QUANTILES), "greatest")
PLAN_COLUMNS = ("buckets", "profiles", "engine time a request", "padding", "batch", "busy", "price", "chosen saves")
_MOST_ROWS, _BAR = 16, 30


def dim_rows(summary: TrafficSummary) -> list[list[str]]:
    """Rows of DIM_COLUMNS."""
    rows = []
    for dim, counts in summary.dims.items():
        quantiles = [f"{value:g}" for value in counts.quantiles]
        facts = [str(summary.requests), str(len(counts.counts)), str(counts.least), f"{counts.mean:.4g}"]
        rows.append([dim, *facts, *quantiles, str(counts.greatest)])
    return rows


def histogram_rows(counts: SizeCounts, edges: Sequence[int]) -> list[list[str]]:
    """Rows of (sizes, requests, share, bar): by the spec's buckets where there are several, else in equal steps."""
    ends = [edge for edge in edges if edge >= counts.least] if len(edges) > 1 else _equal_steps(counts)
    ends = ends if ends and ends[-1] >= counts.greatest else [*ends, counts.greatest]
    total, rows, before = sum(counts.counts.values()), [], counts.least - 1
    inside = [sum(count for size, count in counts.counts.items() if low < size <= high) for low, high in _spans(ends)]
    for end, count in zip(ends, inside, strict=True):
        bar = "█" * round(_BAR * count / max(inside))
        rows.append([f"{before + 1}..{end}" if end > before + 1 else str(end), str(count), _share(count / total), bar])
        before = end
    return rows


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return [*zip([-1, *ends[:-1]], ends, strict=True)]


def _equal_steps(counts: SizeCounts) -> list[int]:
    steps = np.linspace(counts.least - 1, counts.greatest, min(_MOST_ROWS, len(counts.counts)) + 1)[1:]
    return sorted({int(np.ceil(end)) for end in steps})


def hour_table(summary: TrafficSummary) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row for each hour."""
    dims = [dim for dim, counts in summary.dims.items() if len(counts.counts) > 1]
    columns = ["hour", "requests", "a second", *(f"{dim} 50, 90, 99 %" for dim in dims)]
    rows = []
    for hour in summary.hours:
        sizes = [", ".join(f"{value:g}" for value in hour.sizes[dim].quantiles) for dim in dims]
        rows.append([hour.name, str(hour.requests), format_plain(hour.per_second), *sizes])
    return columns, rows


def pair_table(pair: PairCounts) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of shares: each dim in at most four parts with about equal numbers of requests."""
    values = np.array(pair.counts)
    ends = [_parts(values[:, axis], values[:, 2]) for axis in (0, 1)]
    places = [np.searchsorted(ends[axis], values[:, axis]) for axis in (0, 1)]
    table = np.zeros((len(ends[0]), len(ends[1])))
    np.add.at(table, tuple(places), values[:, 2])
    table /= values[:, 2].sum()
    columns = [f"{pair.dims[0]} \\ {pair.dims[1]}", *(f"up to {end}" for end in ends[1])]
    return columns, [[f"up to {end}", *map(_share, row)] for end, row in zip(ends[0], table, strict=True)]


def _parts(sizes: "np.ndarray", counts: "np.ndarray") -> "np.ndarray":
    return np.unique(np.quantile(np.repeat(sizes, counts), (0.25, 0.5, 0.75, 1.0), method="higher"))


def describe_traffic(summary: TrafficSummary) -> Iterator[str]:
    """Sentences on arrivals and on what lies beyond the spec."""
    recorded = f" in {pluralize(summary.files, 'file')}" if summary.files > 1 else ""
    made = f" (made: {summary.made})" if summary.made else ""
    share = f", {100 * summary.sampling:g} % of the traffic" if summary.sampling < 1 else ""
    yield f"{pluralize(summary.requests, 'request')}{recorded}{share}{made}"
    if summary.seconds is None or summary.per_second is None or summary.bursts is None:
        yield "no times of arrival, or all of them the same: no rates, no hours"
    else:
        start = f" from {summary.start}" if summary.start else ""
        yield f"{summary.seconds:.4g} s{start}, {format_plain(summary.per_second)} requests a second"
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
        busy = "" if plan.utilization is None else _share(plan.utilization)
        saved = "" if plan.saved is None else _share_interval(plan.saved)
        seconds = f"{seconds_text(plan.seconds.value)} ({_seconds_span(plan.seconds)})"
        facts = [_share(plan.padding), f"{plan.batch:.2f}", busy, seconds_text(plan.price_s), saved]
        rows.append([plan.name, str(plan.profiles), seconds, *facts])
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


def edges_json(edges: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Edges as JSON."""
    return {dim: list(each) for dim, each in edges.items()}


def _share(value: float) -> str:
    return f"{format_plain(100 * value)} %"


def _share_interval(value: Interval95) -> str:
    return f"{format_plain(100 * value.value)} % ({format_plain(100 * value.low)} to {format_plain(100 * value.high)})"


def _seconds_span(value: Interval95) -> str:
    return f"{seconds_text(value.low)} to {seconds_text(value.high)}"
