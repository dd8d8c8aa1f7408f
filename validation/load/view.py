"""A load report as text and as a section of a version's page."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from enginesmith.core.reports.load import LoadPhase, LoadReport
from enginesmith.core.text import format_bytes
from validation.latency.formatting import format_quantile, name_quantile
from validation.plots.texts import seconds_text

COLUMNS = ("when", "requests", "offered", "p50", "p90", "p99", "p99.9", "slowest", "failed", "no answer")


def format_phase(phase: LoadPhase) -> dict[str, str]:
    """A row of COLUMNS."""
    quantiles = {name_quantile(item.p): format_quantile(item) for item in phase.quantiles}
    return {
        "when": phase.name,
        "requests": str(phase.requests),
        "offered": f"{phase.offered:.4g}/s",
        **{column: quantiles.get(column, "") for column in COLUMNS if column.startswith("p")},
        "slowest": "" if phase.slowest_s is None else seconds_text(phase.slowest_s),
        "failed": str(phase.failed or ""),
        "no answer": str(phase.unanswered or ""),
    }


def describe_load(report: LoadReport) -> Iterator[str]:
    """Lines of a report besides its table and its remarks."""
    terms, memory, delay = report.terms, report.memory, report.sending
    yield describe_terms(report)
    adds = report.server
    yield f"the server adds {seconds_text(adds.batch_s)} to a batch and {seconds_text(adds.request_s)} for each request"
    yield f"batches of {terms.batch} at most after {seconds_text(terms.wait_s)}: {report.batch:.2f} samples on average"
    cold, first = seconds_text(report.cold_start_s), seconds_text(report.first_s)
    yield f"cold start {cold} from the start of the process to its first answer, of which the first run took {first}"
    grown = "" if memory.growth is None else f", {memory.growth / (1 << 20):+.2f} MiB a minute over the run"
    yield f"memory {format_bytes(memory.start)} after the first answer, {format_bytes(memory.peak)} at most{grown}"
    yield (
        f"sent late by {seconds_text(delay.p50_s)} in the middle, {seconds_text(delay.p99_s)} at p99,"
        f" {seconds_text(delay.most_s)} at most; latencies count from the intended arrival"
    )
    yield f"on {report.machine}, {report.created_at}"


def describe_terms(report: LoadReport) -> str:
    """'200 requests a second, poisson, batch=1; 199.8 a second answered'."""
    terms = report.terms
    sizes = "".join(f", {dim}={size}" for dim, size in terms.sizes.items())
    bursts = f", {terms.burst:g} times as many for {terms.burst_s:g} of {terms.every_s:g} s" if terms.burst > 1 else ""
    return f"{terms.rate:g} requests a second, {terms.arrivals}{bursts}{sizes}; {report.answered:.4g} a second answered"


@dataclass(frozen=True)
class LoadView:
    """The section of one report."""

    name: str
    rows: tuple[Mapping[str, str], ...]
    lines: tuple[str, ...]
    remarks: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS


def view_loads(reports: Iterable[LoadReport]) -> list[LoadView]:
    """One section per report, in their order."""
    return [
        LoadView(report.unit, tuple(map(format_phase, report.phases)), tuple(describe_load(report)), report.remarks)
        for report in reports
    ]
