"""A comparison for people: a table, the pairs, and what to take; for a terminal and as Markdown."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from enginery.core.text import format_bytes
from pipeline.operations.compare.report import BackendComparison, EngineFacts, PairedComparison, is_too_noisy
from validation.latency.formatting import format_count, join_reasons
from validation.plots.texts import seconds_text

COLUMNS = (
    *("engine", "status", "median", "session", "items/s", "start", "memory", "file", "build", "SQNR", "sizes", "fleet"),
)
Number = TypeVar("Number", int, float)
_SIZES = {"any": "any", "within": "all in dims", "some": "some", None: ""}
_AXES = {
    "throughput": "peak throughput",
    "rebuild": "rebuild cost",
    "start": "cold start",
    "portability": "portability",
    "shapes": "uncovered shapes",
    "accuracy": "accuracy",
    "memory": "memory",
}


def format_rows(found: BackendComparison) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows; a column for each task metric, none that is empty."""
    metrics = sorted({name for engine in found.engines for name in engine.metrics})
    columns = [*COLUMNS, *metrics]
    table = [_format_row(engine, metrics, len(found.fleet)) for engine in found.engines]
    kept = [index for index in range(len(columns)) if any(row[index] for row in table)]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in table]


def _format_row(engine: EngineFacts, metrics: Sequence[str], fleet: int) -> list[str]:
    return [
        f"{engine.precision} {engine.backend}",
        engine.status,
        _cell(engine.median_s, seconds_text),
        _cell(engine.session_s if engine.timed == "runtime" else None, seconds_text),
        _cell(engine.items_per_s, format_count),
        _cell(engine.load_s, seconds_text),
        _cell(engine.memory_bytes, format_bytes),
        _cell(engine.size_bytes, format_bytes),
        _cell(engine.build_s, seconds_text),
        _cell(engine.sqnr_db, lambda value: f"{value:.0f} dB"),
        _SIZES[engine.shapes],
        f"{len(engine.covers)} of {fleet}" if engine.status != "refused" else "",
        *(f"{engine.metrics[name]:.4f}" if name in engine.metrics else "" for name in metrics),
    ]


def _cell(value: Number | None, show: Callable[[Number], str]) -> str:
    return "" if value is None else show(value)


def describe_comparison(found: BackendComparison) -> Iterator[str]:
    """Everything but the table."""
    if any(engine.timed == "runtime" for engine in found.engines):
        yield "median: of the runtime's own call, which engines are ranked by; session: of Session.run, with its checks"
    elif any(engine.median_s for engine in found.engines):
        yield "median: of Session.run, with its checks, as not every engine's runtime can be timed alone"
    yield from _describe_reasons(found.engines)
    busy = [reason for engine in found.engines for reason in engine.busy]
    busy += [reason for pair in found.duels for reason in pair.busy]
    if busy:
        yield (
            f"the machine was busy while these times were taken: {join_reasons(busy)}; compare again when it is quiet, "
            "with a larger --seconds: engines that were timed for as long before are not timed again"
        )
    for pair in found.duels:
        yield describe_pair(pair)
    told = found.recommendation
    yield f"take {told.unit}: {told.reason}" if told.unit else f"nothing to take: {told.reason}"
    for flip in told.flips:
        yield f"  {flip.unit} instead, for {_AXES[flip.axis]}: {flip.condition}"


def _describe_reasons(engines: Iterable[EngineFacts]) -> Iterator[str]:
    """Why engines are not proven; those of one reason in one line, as most of a target without its GPU are."""
    together: dict[tuple[str, str], list[str]] = {}
    for engine in engines:
        if engine.reason:
            name = f"{engine.precision} {engine.backend}"
            together.setdefault((engine.status, engine.reason), []).append(name)
    for (status, reason), names in together.items():
        yield f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {status}: {reason}"


def describe_pair(pair: PairedComparison) -> str:
    """One pair, the verdict first."""
    names = f"{pair.first} against {pair.second}"
    if pair.verdict == "far faster" and pair.ratio:
        return f"far faster: {names}, by the times that each had alone ({1 / pair.ratio:.3g} times)"
    if pair.ratio is None or pair.low is None or pair.high is None or pair.detectable is None:
        return f"{pair.verdict}: {names}; too few runs, or they could not be run side by side"
    digits = 0 if pair.detectable >= 0.1 else 1
    verdict = "too noisy to tell" if is_too_noisy(pair.verdict, pair.low) else pair.verdict
    interval = f"{pair.ratio:.3f} times the time (95 %: {pair.low:.3f} to {pair.high:.3f})"
    unseen = f"a difference of {100 * pair.detectable:,.{digits}f} % would have been shown"
    return f"{verdict}: {names}: {interval}; {unseen}"


def format_heading(found: BackendComparison) -> str:
    """What was compared, and where."""
    return f"{found.model} on {found.target} at {found.bucket}, {found.machine}, {found.created_at}"


def format_markdown(found: BackendComparison) -> str:
    """The comparison as a page."""
    columns, table = format_rows(found)
    said = [f"# {format_heading(found)}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    said += [f"| {' | '.join(_escape(item) for item in row)} |" for row in table]
    return "\n".join([*said, "", *(f"- {_escape(line.strip())}" for line in describe_comparison(found))]) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
