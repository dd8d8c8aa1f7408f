"""A latency report for people: numbers with units, one line for a bucket, one sentence for the diagnosis."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from enginery.core.text import join_first
from validation.latency.machine import machine_text
from validation.latency.measurement.between import LEAST_PROCESSES
from validation.plots.texts import seconds_text

Json = Mapping[str, Any]
COLUMNS = ("bucket", "runtime", "p50", "p90", "p99", "p99.9", "items/s", "memory", "runs")
NODE_COLUMNS = ("node", "op", "time", "share", "GFLOP/s", "GB/s", "bound")
SHOWN_NODES = 12
# A mean that is so many times the median says that some runs took far longer.
HELD_UP = 1.5
_BOUNDS = {
    "compute": "compute-bound",
    "bandwidth": "bandwidth-bound",
    "overhead": "overhead-bound",
}


def count_text(value: float | None, unit: str = "") -> str:
    """A large number with a prefix: '4.93 M', '12.1 GB/s'."""
    if value is None:
        return ""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def share_text(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f} %" if abs(value) >= 0.01 or not value else "under 1 %"


def quantile_text(item: Json) -> str:
    """'38.1 µs (37.9 to 38.4)', with the units of the limits where they differ; '' where too few runs were made."""
    if item["value"] is None:
        return ""
    value, low, high = (seconds_text(item[name]) for name in ("value", "low", "high"))
    if len({text.split()[-1] for text in (value, low, high)}) == 1:
        low, high = low.split()[0], high.split()[0]
    return f"{value} ({low} to {high})"


def quantile_name(p: float) -> str:
    """'p99.9'."""
    return f"p{100 * p:.4g}"


def bucket_row(bucket: Json) -> dict[str, str]:
    """A row of COLUMNS; what a cell says beside its value stands in brackets."""
    quantiles = {quantile_name(item["p"]): quantile_text(item) for item in bucket["quantiles"]}
    rate = count_text(bucket["items_per_s"])
    if bucket["streams_items_per_s"] is not None:
        rate += f" ({count_text(bucket['streams_items_per_s'])} in {bucket['streams']} streams)"
    kept = bucket["runs"] - bucket["discarded"]
    runs = f"{kept} (+{bucket['discarded']} warm-up{'' if bucket['steady'] else ', not steady'})"
    memory = bytes_text(bucket["memory_bytes"])
    if bucket["device_bytes"] is not None:
        memory += f" (device {bytes_text(bucket['device_bytes'])})"
    own = quantile_text(bucket["runtime"]) if bucket["runtime"] else ""
    return {"bucket": bucket["name"], "runtime": own, **quantiles, "items/s": rate, "memory": memory, "runs": runs}


def bytes_text(size: float) -> str:
    """Bytes in powers of 1000, as bandwidths are."""
    return count_text(size, "B")


def remarks(report: Json, columns: Collection[str] = COLUMNS) -> Iterator[str]:
    """What a table of times has no place for: quantiles that take more runs, runs that were held up, a busy machine.

    columns: those of the table; of other quantiles nothing is said.
    """
    missing = [
        f"{quantile_name(item['p'])} at {bucket['name']} (made {bucket['runs'] - bucket['discarded']}, "
        f"needs {item['needed']})"
        for bucket in report["buckets"]
        for item in bucket["quantiles"]
        if item["value"] is None and quantile_name(item["p"]) in columns
    ]
    if missing:
        yield f"too few runs for {', '.join(missing)}"
    held = [item for item in report["buckets"] if item["mean_s"] >= HELD_UP * item["median_s"]]
    if held:
        means = (f"{item['mean_s'] / item['median_s']:.2g} times the median at {item['name']}" for item in held)
        yield f"some runs were held up: the mean is {', '.join(means)}"
    if busy := busy_text(report):
        yield busy


def lines(report: Json) -> Iterator[str]:
    """What a report says besides its tables."""
    yield f"on {machine_text(report['machine'])}, {report['created_at']}"
    imported = "" if report["import_s"] is None else f", after {seconds_text(report['import_s'])} to import the runtime"
    first = ", ".join(f"{seconds_text(item['first_s'])} at {item['name']}" for item in report["buckets"])
    yield measured_text(report)
    yield f"cold load {seconds_text(report['load_s'])} from a file in the page cache{imported}; first run {first}"
    yield from _device_lines(report)
    yield from remarks(report)
    if not busy_text(report):
        yield "the machine was quiet"
    yield from anatomy_lines(report["anatomy"])


def measured_text(report: Json) -> str:
    """What the times are of, and what their intervals hold."""
    own = any(bucket["runtime"] for bucket in report["buckets"])
    what = "runtime: the runtime's own call, its median; p50 and on: " if own else ""
    count = report["processes"]
    held = (
        f"are those of one more process, by {count}" if count >= LEAST_PROCESSES else "hold within this process alone"
    )
    return f"{what}Session.run, with its checks of the inputs; the 95 % intervals {held}"


def _device_lines(report: Json) -> Iterator[str]:
    """How much of a run is the device's, where its events tell."""
    told = [(item["name"], item["device_s"], item["median_s"]) for item in report["buckets"]]
    texts = [
        f"{seconds_text(busy)} of {seconds_text(whole)} at {name}" for name, busy, whole in told if busy is not None
    ]
    if texts:
        yield f"the device itself is busy, without copies: {', '.join(texts)}"


def busy_text(report: Json) -> str:
    """Why the machine counts as busy while the engine was timed; '' for a quiet one."""
    found = [reason for bucket in report["buckets"] for reason in bucket["surroundings"]["busy"]]
    if not found:
        return ""
    return f"the machine was busy: {busiest(found)}; the times hold for such a machine"


def busiest(reasons: list[str]) -> str:
    """Each kind of reason once: they differ by their numbers alone."""
    kinds = {"".join(c for c in reason if not c.isdigit() and c != "."): reason for reason in reasons}
    return "; ".join(kinds.values())


def anatomy_lines(anatomy: Json) -> Iterator[str]:
    """Costs, traffic and diagnosis."""
    yield diagnosis_text(anatomy)
    graph, moved = anatomy["graph"], anatomy["traffic"]
    yield (
        f"the graph does {count_text(graph['macs'])} multiply-adds in {graph['nodes']} nodes "
        f"({count_text(graph['operations'])} operations, {graph['intensity']:.3g} for each byte), "
        f"and needs {bytes_text(graph['working_bytes'])} at hand"
    )
    yield traffic_text(moved)
    for kind, names in (("operations", graph["uncounted"]), ("shapes", graph["unsized"])):
        if names:
            yield f"not counted, for want of their {kind}: {join_first(names, 6)}"


def headline(anatomy: Json) -> str:
    """The bound, in a few words."""
    told = anatomy["diagnosis"]
    if told is None:
        return f"no diagnosis at {anatomy['bucket']}: the machine's limits are measured for CPU engines only"
    if told["bound"] is None:
        return f"no diagnosis at {anatomy['bucket']}"
    if told["clear"]:
        return f"{_BOUNDS[told['bound']]} at {anatomy['bucket']}"
    return f"no clear bound at {anatomy['bucket']}; {_BOUNDS[told['bound']]}, if any"


def evidence(anatomy: Json) -> str:
    """What the diagnosis rests on, as far as that is known; nothing without one."""
    told = anatomy["diagnosis"]
    if told is None:
        return ""
    if told["compute"] is None:
        return "the machine's limits were measured slower than the run itself; time it again while the machine is quiet"
    parts = (
        f"arithmetic at this machine's rate would take {share_text(told['compute'])}",
        f"moving its bytes {share_text(told['bandwidth'])}",
        f"starting the run and its nodes {share_text(told['overhead'])}",
    )
    outside = "" if told["outside"] is None else f"; {share_text(told['outside'])} of it is outside of any kernel"
    weak = "" if told["clear"] else "; the rest is kernels far from what the machine can do, or a busy machine"
    return f"of {seconds_text(told['seconds'])} a run, {', '.join(parts)}{outside}{weak}"


def diagnosis_text(anatomy: Json) -> str:
    """The bound with its evidence."""
    return ": ".join(part for part in (headline(anatomy), evidence(anatomy)) if part)


def traffic_text(moved: Json) -> str:
    """What fusing saved."""
    whose = "the runtime's" if moved["source"] == "runtime" else "a greedy model's"
    start = f"unfused it would move {bytes_text(moved['unfused_bytes'])}; in {whose} {moved['groups']} groups"
    end = "saved" if moved["saved"] >= 0 else "more, for conversions that the runtime added"
    return f"{start} it moves {bytes_text(moved['fused_bytes'])} ({share_text(abs(moved['saved']))} {end})"


def node_rows(anatomy: Json) -> list[dict[str, str]]:
    """The slowest nodes: rows of NODE_COLUMNS; nothing where the runtime shows none."""
    profile = anatomy["profile"]
    return [] if profile is None else [_node_row(node, profile["kernels_s"]) for node in profile["nodes"][:SHOWN_NODES]]


def _node_row(node: Json, whole: float) -> dict[str, str]:
    cost, told, seconds = node["cost"], node["diagnosis"], node["seconds"]
    rate = [""] * 2
    if cost and seconds:
        rate = [f"{cost['operations'] / seconds / 1e9:.3g}"]
        rate.append(f"{(cost['read_bytes'] + cost['written_bytes']) / seconds / 1e9:.3g}")
    bound = ""
    if told and told["bound"]:
        known = told[told["bound"]]
        bound = told["bound"] if known is None else f"{told['bound']} {share_text(known)}"
    share = share_text(seconds / whole) if whole else ""
    values = (node["name"], node["op_type"], seconds_text(seconds), share, *rate, bound)
    return dict(zip(NODE_COLUMNS, values, strict=True))


def race_lines(race: Json) -> Iterator[str]:
    """An A/B, the verdict first."""
    first, second = (seconds_text(value) for value in race["medians_s"])
    yield f"{race['verdict']}: {first} against {second} at {race['bucket']}"
    for item in race["ratios"]:
        name = quantile_name(item["p"])
        if item["ratio"] is None:
            yield f"  {name}: {item['note']}"
        else:
            yield (
                f"  {name}: {item['ratio']:.4f} times the other's (95 %: {item['low']:.4f} to {item['high']:.4f}); "
                f"a difference of {100 * item['detectable']:.2g} % would have been shown"
            )
    yield f"  {race['runs']} runs of each in {race['openings']} openings, interleaved by seed {race['seed']}"
