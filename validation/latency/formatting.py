"""Latency reports as text and views, and changes between two."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.breakdown import TimeBreakdown
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, PairedBenchmark, Quantile
from enginesmith.core.text import format_plain, join_first
from validation.latency.measurement.quantiles import LEAST_PROCESSES
from validation.plotting import QUARTERS, draw_svg, seconds_text, series, set_axis, shorten, span, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Changes of the level of a series of latencies, found by ruptures (docs/decisions/0018-change-points.md).
#
# The segments have the least sum of squares around their means, plus a penalty for each change (Killick, Fearnhead &
# Eckley, "Optimal detection of changepoints with a linear computational cost", JASA 107, 2012; ruptures' KernelCPD with
# a linear kernel, in C). The input is logarithms in units of their own noise: the penalty is then the square of the
# least z of a change. PENALTY suits a series that is tested after every point for a year
# (`python -m benchmarks.bench_trend`).

# The least points of a level (single slow days are no level), and the least points of a series to be tested.
LEAST_LEVEL, LEAST_POINTS = 4, 12
PENALTY = 27.0
# The noise of few points is uncertain: the penalty grows by the square of this number over the number of points.
_FEW = 20.0
# Points are clipped at this distance from the median of their neighbours, in units of the noise; number of neighbours.
_CLIP, _NEIGHBOURS = 3.0, 9
# The least noise, as a share: clocks and rounding are not more exact.
_LEAST_NOISE = 1e-3
# For the estimate of the noise, differences of neighbours are clipped at this many typical ones: they may be changes.
_FAR = 5.0
# The standard deviation of normal noise over the median of its absolute differences from one point to the next.
_MAD = 1 / (0.6744897501960817 * math.sqrt(2))


@dataclass(frozen=True)
class LevelChange:
    """A change of the level. index: of the first point after the change.  ratio: level after over level before.

    z: size of the change in standard errors.  before, after: the levels, in the units of the series.
    """

    index: int
    ratio: float
    z: float
    before: float
    after: float


def find_changes(values: Sequence[float]) -> list[LevelChange]:
    """The changes of level of a series of positive numbers, oldest first; none with fewer than LEAST_POINTS points.

    Raises ModuleNotFoundError without ruptures (extra `trend`).
    """
    from ruptures import KernelCPD

    if len(values) < LEAST_POINTS:
        return []
    logs = np.log(np.asarray(values, dtype=float))
    noise = noise_of(logs)
    signal = clip(logs, noise) / noise
    detector = KernelCPD(kernel="linear", min_size=LEAST_LEVEL)
    points = detector.fit(signal.reshape(-1, 1)).predict(pen=PENALTY * (1 + (_FEW / len(values)) ** 2))
    edges = [0, *points]
    return [_change(logs, noise, *bounds) for bounds in zip(edges, edges[1:], edges[2:], strict=False)]


def noise_of(logs: Array) -> float:
    """The standard deviation of a point ([n], logarithms), from differences of neighbours: a change of level affects
    only one of these. Differences are clipped at _FAR times their typical size."""
    steps = np.abs(np.diff(logs))
    typical_step = max(float(np.median(steps)) * _MAD, _LEAST_NOISE)
    return max(float(np.sqrt(np.mean(np.minimum(steps, _FAR * typical_step) ** 2) / 2)), typical_step)


def clip(logs: Array, noise: float) -> Array:
    """The series, clipped to _CLIP times the noise around the median of the _NEIGHBOURS points around each point. Near
    an end, the median of the outermost _NEIGHBOURS points is used: a single slow last day does not determine it."""
    half = _NEIGHBOURS // 2
    medians = np.sort(np.lib.stride_tricks.sliding_window_view(logs, _NEIGHBOURS), axis=1)[:, half]
    medians = np.concatenate([medians[:1].repeat(half), medians, medians[-1:].repeat(half)])
    clipped_logs: Array = np.clip(logs, medians - _CLIP * noise, medians + _CLIP * noise)
    return clipped_logs


def _change(logs: Array, noise: float, start: int, index: int, end: int) -> LevelChange:
    old_level, new_level = float(np.median(logs[start:index])), float(np.median(logs[index:end]))
    error = noise * math.sqrt(1 / (index - start) + 1 / (end - index))
    log_growth = new_level - old_level
    return LevelChange(int(index), math.exp(log_growth), log_growth / error, math.exp(old_level), math.exp(new_level))


COLUMNS = ("bucket", "runtime", "p50", "p90", "p99", "p99.9", "items/s", "memory", "runs")
NODE_COLUMNS = ("node", "op", "time", "share", "GFLOP/s", "GB/s", "bound")
# The number of rows in the table of nodes.
SHOWN_NODES = 12
# If the mean is at least this many times the median, some runs took far longer.
HELD_UP = 1.5


def format_count(value: float | None, unit: str = "") -> str:
    """A large number with a prefix: '4.93 M', '12.1 GB/s'."""
    if value is None:
        return ""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{format_plain(value / size)} {prefix}{unit}"
    return f"{format_plain(value)} {unit}".rstrip()


def format_share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f} %" if abs(value) >= 0.01 or not value else "under 1 %"


def format_quantile(quantile: Quantile) -> str:
    """'38.1 µs (37.9 to 38.4)', with units at the limits if they differ; '' if there are too few runs."""
    if quantile.value is None or quantile.low is None or quantile.high is None:
        return ""
    value, low, high = map(seconds_text, (quantile.value, quantile.low, quantile.high))
    if len({text.partition(" ")[2] for text in (value, low, high)}) == 1:
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return f"{value} ({low} to {high})"


def name_quantile(p: float) -> str:
    """The name of a quantile: 'p99.9'."""
    return f"p{100 * p:.4g}"


def format_bucket(bucket: BucketLatency) -> dict[str, str]:
    """A row of the table, by COLUMNS; remarks on a value are in brackets after the value."""
    quantiles = {name_quantile(quantile.p): format_quantile(quantile) for quantile in bucket.quantiles}
    rate_text = format_count(bucket.items_per_s)
    if bucket.streams_items_per_s is not None:
        rate_text += f" ({format_count(bucket.streams_items_per_s)} in {bucket.streams} streams)"
    steady_runs = bucket.runs - bucket.discarded
    runs_text = f"{steady_runs} (+{bucket.discarded} warm-up{'' if bucket.steady else ', not steady'})"
    memory_text = format_count(bucket.memory_bytes, "B")
    if bucket.device_bytes is not None:
        memory_text += f" (device {format_count(bucket.device_bytes, 'B')})"
    runtime_text = format_quantile(bucket.runtime) if bucket.runtime else ""
    return {
        "bucket": bucket.name,
        "runtime": runtime_text,
        **quantiles,
        "items/s": rate_text,
        "memory": memory_text,
        "runs": runs_text,
    }


def list_remarks(report: LatencyReport, columns: Collection[str] = COLUMNS) -> Iterator[str]:
    """Remarks on a table of times: quantiles that need more runs, delayed runs, a busy machine.

    columns: of the table; quantiles without a column get no remarks.
    """
    scarce_names = [
        f"{name_quantile(quantile.p)} at {bucket.name} (made {bucket.runs - bucket.discarded}, needs {quantile.needed})"
        for bucket in report.buckets
        for quantile in bucket.quantiles
        if quantile.value is None and name_quantile(quantile.p) in columns
    ]
    if scarce_names:
        yield f"too few runs for {', '.join(scarce_names)}"
    delayed_buckets = [bucket for bucket in report.buckets if bucket.mean_s >= HELD_UP * bucket.median_s]
    if delayed_buckets:
        growths = {bucket.name: bucket.mean_s / bucket.median_s for bucket in delayed_buckets}
        mean_texts = (f"{format_plain(growth)} times the median at {name}" for name, growth in growths.items())
        yield f"some runs were delayed: the mean is {', '.join(mean_texts)}"
    if report.busy:
        yield f"the machine was busy: {join_reasons(report.busy)}; the times describe a busy machine"


def describe_report(report: LatencyReport) -> Iterator[str]:
    """The lines of a report besides its tables; the first names the machine."""
    yield f"on {report.machine}, {report.created_at}"
    import_note = "" if report.import_s is None else f", after {seconds_text(report.import_s)} to import the runtime"
    first_runs_text = ", ".join(f"{seconds_text(bucket.first_s)} at {bucket.name}" for bucket in report.buckets)
    has_runtime = any(row.runtime for row in report.buckets)
    runtime_note = "runtime: the runtime's own call, its median; p50 and on: " if has_runtime else ""
    spread_text = f"predict one more process; measured over {report.processes} processes"
    intervals_text = spread_text if report.processes >= LEAST_PROCESSES else "hold within this process alone"
    yield f"{runtime_note}Session.run, with its checks of the inputs; the 95 % intervals {intervals_text}"
    load_text = f"cold load {seconds_text(report.load_s)} from a file in the page cache"
    yield f"{load_text}{import_note}; first run {first_runs_text}"
    device_times = [(bucket.device_s, bucket) for bucket in report.buckets if bucket.device_s is not None]
    if device_times:
        busy_texts = (
            f"{seconds_text(busy_s)} of {seconds_text(bucket.median_s)} at {bucket.name}"
            for busy_s, bucket in device_times
        )
        yield f"the device itself is busy, without copies: {', '.join(busy_texts)}"
    yield from list_remarks(report)
    if not report.busy:
        yield "the machine was quiet"
    breakdown = report.anatomy
    yield describe_diagnosis(breakdown)
    graph = breakdown.graph
    yield (
        f"the graph does {format_count(graph.macs)} multiply-adds in {graph.nodes} nodes "
        f"({format_count(graph.operations)} operations, {format_plain(graph.intensity)} for each byte), "
        f"working set {format_count(graph.working_bytes, 'B')}"
    )
    savings = breakdown.traffic
    owner = "the runtime's" if savings.source == "runtime" else "a greedy model's"
    end_text = "saved" if savings.saved >= 0 else "more, for conversions that the runtime added"
    yield (
        f"unfused it would move {format_count(savings.unfused_bytes, 'B')}; in {owner} {savings.groups} groups "
        f"it moves {format_count(savings.fused_bytes, 'B')} ({format_share(abs(savings.saved))} {end_text})"
    )
    for kind, names in (("operations", graph.uncounted), ("shapes", graph.unsized)):
        if names:
            yield f"not counted, because their {kind} are unknown: {join_first(names, 6)}"


def join_reasons(reasons: Sequence[str]) -> str:
    """Reasons as one text; of reasons that differ only by their numbers, only the last is included."""
    distinct_reasons = {"".join(c for c in reason if not c.isdigit() and c != "."): reason for reason in reasons}
    return "; ".join(distinct_reasons.values())


def name_bound(breakdown: TimeBreakdown) -> str:
    """The bound as short text; without a diagnosis, a text that says so."""
    diagnosis = breakdown.diagnosis
    if diagnosis is None:
        return f"no diagnosis at {breakdown.bucket}: the machine's limits are measured for CPU engines only"
    if diagnosis.bound is None:
        return f"no diagnosis at {breakdown.bucket}"
    if diagnosis.clear:
        return f"{diagnosis.bound}-bound at {breakdown.bucket}"
    return f"no clear bound at {breakdown.bucket}; {diagnosis.bound}-bound, if any"


def list_evidence(breakdown: TimeBreakdown) -> str:
    """A text with the shares on which the diagnosis is based, or why they are unknown; '' without a diagnosis."""
    diagnosis = breakdown.diagnosis
    if diagnosis is None:
        return ""
    shares = [share for share in (diagnosis.compute, diagnosis.bandwidth, diagnosis.overhead) if share is not None]
    if len(shares) < 3:
        return "the machine's limits were measured slower than the run itself; time it again while the machine is quiet"
    clauses = (
        f"arithmetic at this machine's rate would take {format_share(shares[0])}",
        f"moving its bytes {format_share(shares[1])}",
        f"starting the run and its nodes {format_share(shares[2])}",
    )
    outside_text = (
        "" if diagnosis.outside is None else f"; {format_share(diagnosis.outside)} of it is outside of any kernel"
    )
    weak_text = "" if diagnosis.clear else "; the rest is kernels far from what the machine can do, or a busy machine"
    return f"of {seconds_text(diagnosis.seconds)} a run, {', '.join(clauses)}{outside_text}{weak_text}"


def describe_diagnosis(breakdown: TimeBreakdown) -> str:
    """The bound with its evidence."""
    return ": ".join(text for text in (name_bound(breakdown), list_evidence(breakdown)) if text)


def format_nodes(breakdown: TimeBreakdown) -> list[dict[str, str]]:
    """Rows by NODE_COLUMNS for the SHOWN_NODES slowest nodes; [] if the runtime reports no nodes."""
    profile, rows = breakdown.profile, []
    if profile is None:
        return []
    for node in profile.nodes[:SHOWN_NODES]:
        cost, diagnosis, seconds = node.cost, node.diagnosis, node.seconds
        counts = (cost.operations, cost.moved_bytes) if cost and seconds else ()
        rate_texts = [format_plain(count / seconds / 1e9) for count in counts] or ["", ""]
        bound_text = ""
        if diagnosis and diagnosis.bound:
            bound_share = diagnosis.share(diagnosis.bound)
            bound_text = diagnosis.bound if bound_share is None else f"{diagnosis.bound} {format_share(bound_share)}"
        share_text = format_share(seconds / profile.kernels_s) if profile.kernels_s else ""
        values = (node.name, node.op_type, seconds_text(seconds), share_text, *rate_texts, bound_text)
        rows.append(dict(zip(NODE_COLUMNS, values, strict=True)))
    return rows


def describe_pair(benchmark: PairedBenchmark) -> Iterator[str]:
    """Lines on a paired benchmark, the verdict first."""
    first_text, second_text = map(seconds_text, benchmark.medians_s)
    yield f"{benchmark.verdict}: {first_text} against {second_text} at {benchmark.bucket}"
    for quantile in benchmark.ratios:
        name = name_quantile(quantile.p)
        if quantile.ratio is None or quantile.low is None or quantile.high is None or quantile.detectable is None:
            yield f"  {name}: {quantile.note}"
        else:
            yield (
                f"  {name}: {quantile.ratio:.4f} times the other's (95 %: {quantile.low:.4f} to {quantile.high:.4f}); "
                f"a difference of {format_plain(100 * quantile.detectable)} % would have been shown"
            )
    yield f"  {benchmark.runs} runs of each in {benchmark.openings} openings, interleaved by seed {benchmark.seed}"


# The most buckets in one picture.
MOST_CURVES = 6
# The axis ends after this quantile: the slowest of thousands of runs would leave no room for the others.
_SEEN = 0.99


def distribution_svg(buckets: Sequence[BucketLatency]) -> str:
    """SVG of the distribution of latency at each bucket, on a logarithmic axis."""
    first_buckets = buckets[:MOST_CURVES]
    curves = [bucket.curve for bucket in first_buckets]
    times_s = [end for curve in curves for end in (curve[0], curve[round(_SEEN * (len(curve) - 1))])]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, bucket in enumerate(first_buckets):
            shares = [step / (len(bucket.curve) - 1) for step in range(len(bucket.curve))]
            label, gid = shorten(bucket.name), tag("curve", bucket.name)
            axes.step(bucket.curve, shares, where="post", label=label, gid=gid, **series(index))
        label = "latency of a run, logarithmic"
        set_axis(axes, "x", span(times_s, log=True, least=0.2), label, log=True, text=seconds_text)
        set_axis(axes, "y", (0.0, 1.0), ticks=QUARTERS)

    alt_text = "; ".join(
        f"{bucket.name}: half of the runs within {seconds_text(bucket.median_s)}" for bucket in first_buckets
    )
    return draw_svg("ecdf", f"Share of runs answered within a time. {alt_text}", draw)


def view_latencies(latencies: Mapping[str, Sequence[LatencyReport]], pictures: bool = True) -> list[dict[str, object]]:
    """The values of `latency.html.j2` for each report. latencies: by the engine's digest, as `evidence.latencies`
    returns them."""
    reports = sorted((report for reports in latencies.values() for report in reports), key=lambda report: report.unit)
    return [_view(report, pictures) for report in reports]


def _view(report: LatencyReport, pictures: bool) -> dict[str, object]:
    machine_line, *remark_lines = describe_report(report)
    remarks, breakdown = tuple(list_remarks(report)), report.anatomy
    profile = breakdown.profile
    return {
        "name": report.unit,
        "measured": machine_line,
        "busy": bool(report.busy),
        "remarks": remarks,
        "headline": name_bound(breakdown),
        "evidence": list_evidence(breakdown),
        "lines": [line for line in remark_lines if line not in (*remarks, describe_diagnosis(breakdown))],
        "columns": COLUMNS,
        "rows": [format_bucket(bucket) for bucket in report.buckets],
        "node_columns": NODE_COLUMNS,
        "nodes": format_nodes(breakdown),
        "more": max(0, len(profile.nodes) + profile.omitted - SHOWN_NODES) if profile else 0,
        "distribution": distribution_svg(report.buckets) if pictures else "",
    }
