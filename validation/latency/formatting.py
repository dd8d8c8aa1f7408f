"""A latency report as text: numbers with units, a row for each bucket, a sentence for the diagnosis."""

from collections.abc import Collection, Iterator, Sequence

from enginesmith.core.reports.breakdown import TimeBreakdown
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, PairedBenchmark, Quantile
from enginesmith.core.text import join_first
from validation.latency.measurement.quantiles import LEAST_PROCESSES
from validation.plots.texts import seconds_text

COLUMNS = ("bucket", "runtime", "p50", "p90", "p99", "p99.9", "items/s", "memory", "runs")
NODE_COLUMNS = ("node", "op", "time", "share", "GFLOP/s", "GB/s", "bound")
SHOWN_NODES = 12
# A mean of so many times the median shows that some runs took far longer.
HELD_UP = 1.5


def format_count(value: float | None, unit: str = "") -> str:
    """A large number with a prefix: '4.93 M', '12.1 GB/s'."""
    if value is None:
        return ""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def format_share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f} %" if abs(value) >= 0.01 or not value else "under 1 %"


def format_quantile(item: Quantile) -> str:
    """'38.1 µs (37.9 to 38.4)', with the units of the limits where they differ; '' where too few runs were made."""
    if item.value is None or item.low is None or item.high is None:
        return ""
    value, low, high = map(seconds_text, (item.value, item.low, item.high))
    if len({text.partition(" ")[2] for text in (value, low, high)}) == 1:
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return f"{value} ({low} to {high})"


def name_quantile(p: float) -> str:
    """'p99.9'."""
    return f"p{100 * p:.4g}"


def format_bucket(bucket: BucketLatency) -> dict[str, str]:
    """A row of COLUMNS; remarks on a value stand behind it in brackets."""
    quantiles = {name_quantile(item.p): format_quantile(item) for item in bucket.quantiles}
    rate = format_count(bucket.items_per_s)
    if bucket.streams_items_per_s is not None:
        rate += f" ({format_count(bucket.streams_items_per_s)} in {bucket.streams} streams)"
    kept = bucket.runs - bucket.discarded
    runs = f"{kept} (+{bucket.discarded} warm-up{'' if bucket.steady else ', not steady'})"
    memory = format_count(bucket.memory_bytes, "B")
    if bucket.device_bytes is not None:
        memory += f" (device {format_count(bucket.device_bytes, 'B')})"
    own = format_quantile(bucket.runtime) if bucket.runtime else ""
    return {"bucket": bucket.name, "runtime": own, **quantiles, "items/s": rate, "memory": memory, "runs": runs}


def list_remarks(report: LatencyReport, columns: Collection[str] = COLUMNS) -> Iterator[str]:
    """Remarks on a table of times: quantiles that need more runs, runs that were held up, a busy machine.

    columns: of the table; there are no remarks on quantiles without a column.
    """
    missing = [
        f"{name_quantile(item.p)} at {bucket.name} (made {bucket.runs - bucket.discarded}, needs {item.needed})"
        for bucket in report.buckets
        for item in bucket.quantiles
        if item.value is None and name_quantile(item.p) in columns
    ]
    if missing:
        yield f"too few runs for {', '.join(missing)}"
    held = [item for item in report.buckets if item.mean_s >= HELD_UP * item.median_s]
    if held:
        means = (f"{item.mean_s / item.median_s:.2g} times the median at {item.name}" for item in held)
        yield f"some runs were held up: the mean is {', '.join(means)}"
    if report.busy:
        yield f"the machine was busy: {join_reasons(report.busy)}; the times hold for such a machine"


def describe_report(report: LatencyReport) -> Iterator[str]:
    """The lines of a report besides its tables; the first names the machine."""
    yield f"on {report.machine}, {report.created_at}"
    imported = "" if report.import_s is None else f", after {seconds_text(report.import_s)} to import the runtime"
    first = ", ".join(f"{seconds_text(item.first_s)} at {item.name}" for item in report.buckets)
    own = (
        "runtime: the runtime's own call, its median; p50 and on: "
        if any(one.runtime for one in report.buckets)
        else ""
    )
    several = f"are those of one more process, by {report.processes}"
    held = several if report.processes >= LEAST_PROCESSES else "hold within this process alone"
    yield f"{own}Session.run, with its checks of the inputs; the 95 % intervals {held}"
    yield f"cold load {seconds_text(report.load_s)} from a file in the page cache{imported}; first run {first}"
    busy = [(item.device_s, item) for item in report.buckets if item.device_s is not None]
    if busy:
        parts = (f"{seconds_text(part)} of {seconds_text(item.median_s)} at {item.name}" for part, item in busy)
        yield f"the device itself is busy, without copies: {', '.join(parts)}"
    yield from list_remarks(report)
    if not report.busy:
        yield "the machine was quiet"
    breakdown = report.anatomy
    yield describe_diagnosis(breakdown)
    graph = breakdown.graph
    yield (
        f"the graph does {format_count(graph.macs)} multiply-adds in {graph.nodes} nodes "
        f"({format_count(graph.operations)} operations, {graph.intensity:.3g} for each byte), "
        f"and needs {format_count(graph.working_bytes, 'B')} at hand"
    )
    moved = breakdown.traffic
    whose = "the runtime's" if moved.source == "runtime" else "a greedy model's"
    end = "saved" if moved.saved >= 0 else "more, for conversions that the runtime added"
    yield (
        f"unfused it would move {format_count(moved.unfused_bytes, 'B')}; in {whose} {moved.groups} groups "
        f"it moves {format_count(moved.fused_bytes, 'B')} ({format_share(abs(moved.saved))} {end})"
    )
    for kind, names in (("operations", graph.uncounted), ("shapes", graph.unsized)):
        if names:
            yield f"not counted, for want of their {kind}: {join_first(names, 6)}"


def join_reasons(reasons: Sequence[str]) -> str:
    """Reasons in one text; of those that differ by their numbers alone, the last one."""
    kinds = {"".join(c for c in reason if not c.isdigit() and c != "."): reason for reason in reasons}
    return "; ".join(kinds.values())


def name_bound(breakdown: TimeBreakdown) -> str:
    """The bound in a few words, or that there is no diagnosis."""
    diagnosis = breakdown.diagnosis
    if diagnosis is None:
        return f"no diagnosis at {breakdown.bucket}: the machine's limits are measured for CPU engines only"
    if diagnosis.bound is None:
        return f"no diagnosis at {breakdown.bucket}"
    if diagnosis.clear:
        return f"{diagnosis.bound}-bound at {breakdown.bucket}"
    return f"no clear bound at {breakdown.bucket}; {diagnosis.bound}-bound, if any"


def list_evidence(breakdown: TimeBreakdown) -> str:
    """The shares that the diagnosis follows from, or why they are not known; '' without a diagnosis."""
    diagnosis = breakdown.diagnosis
    if diagnosis is None:
        return ""
    known = [share for share in (diagnosis.compute, diagnosis.bandwidth, diagnosis.overhead) if share is not None]
    if len(known) < 3:
        return "the machine's limits were measured slower than the run itself; time it again while the machine is quiet"
    parts = (
        f"arithmetic at this machine's rate would take {format_share(known[0])}",
        f"moving its bytes {format_share(known[1])}",
        f"starting the run and its nodes {format_share(known[2])}",
    )
    outside = "" if diagnosis.outside is None else f"; {format_share(diagnosis.outside)} of it is outside of any kernel"
    weak = "" if diagnosis.clear else "; the rest is kernels far from what the machine can do, or a busy machine"
    return f"of {seconds_text(diagnosis.seconds)} a run, {', '.join(parts)}{outside}{weak}"


def describe_diagnosis(breakdown: TimeBreakdown) -> str:
    """The bound with its evidence."""
    return ": ".join(part for part in (name_bound(breakdown), list_evidence(breakdown)) if part)


def format_nodes(breakdown: TimeBreakdown) -> list[dict[str, str]]:
    """Rows of NODE_COLUMNS for the SHOWN_NODES slowest nodes; [] where the runtime shows none."""
    profile, rows = breakdown.profile, []
    if profile is None:
        return []
    for node in profile.nodes[:SHOWN_NODES]:
        cost, diagnosis, seconds = node.cost, node.diagnosis, node.seconds
        counts = (cost.operations, cost.moved_bytes) if cost and seconds else ()
        rates = [f"{count / seconds / 1e9:.3g}" for count in counts] or ["", ""]
        bound = ""
        if diagnosis and diagnosis.bound:
            known = diagnosis.share(diagnosis.bound)
            bound = diagnosis.bound if known is None else f"{diagnosis.bound} {format_share(known)}"
        share = format_share(seconds / profile.kernels_s) if profile.kernels_s else ""
        values = (node.name, node.op_type, seconds_text(seconds), share, *rates, bound)
        rows.append(dict(zip(NODE_COLUMNS, values, strict=True)))
    return rows


def describe_pair(paired: PairedBenchmark) -> Iterator[str]:
    """Lines on a paired benchmark, the verdict first."""
    first, second = map(seconds_text, paired.medians_s)
    yield f"{paired.verdict}: {first} against {second} at {paired.bucket}"
    for item in paired.ratios:
        name = name_quantile(item.p)
        if item.ratio is None or item.low is None or item.high is None or item.detectable is None:
            yield f"  {name}: {item.note}"
        else:
            yield (
                f"  {name}: {item.ratio:.4f} times the other's (95 %: {item.low:.4f} to {item.high:.4f}); "
                f"a difference of {100 * item.detectable:.2g} % would have been shown"
            )
    yield f"  {paired.runs} runs of each in {paired.openings} openings, interleaved by seed {paired.seed}"
