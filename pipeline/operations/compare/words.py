"""A comparison for people: a table, the duels, and what to take; for a terminal and as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from enginery.core.text import format_bytes
from pipeline.operations.compare.facts import too_noisy
from validation.latency.machine import machine_text
from validation.latency.words import busiest, count_text
from validation.plots.texts import seconds_text

Json = Mapping[str, Any]
COLUMNS = (
    "engine",
    "status",
    "median",
    "session",
    "items/s",
    "start",
    "memory",
    "file",
    "build",
    "SQNR",
    "sizes",
    "fleet",
)
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


def rows(found: Json) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows; a column for each task metric, none that is empty."""
    metrics = sorted({name for engine in found["engines"] for name in engine["metrics"]})
    columns = [*COLUMNS, *metrics]
    table = [_row(engine, metrics, len(found["fleet"])) for engine in found["engines"]]
    kept = [index for index in range(len(columns)) if any(row[index] for row in table)]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in table]


def _row(engine: Json, metrics: Sequence[str], fleet: int) -> list[str]:
    def told(name: str, show: Any) -> str:
        return "" if engine[name] is None else str(show(engine[name]))

    return [
        f"{engine['precision']} {engine['backend']}",
        engine["status"],
        told("median_s", seconds_text),
        told("session_s", seconds_text) if engine["timed"] == "runtime" else "",
        told("items_per_s", count_text),
        told("load_s", seconds_text),
        told("memory_bytes", format_bytes),
        told("size_bytes", format_bytes),
        told("build_s", seconds_text),
        told("sqnr_db", lambda value: f"{value:.0f} dB"),
        _SIZES[engine["shapes"]],
        f"{len(engine['covers'])} of {fleet}" if engine["status"] != "refused" else "",
        *(f"{engine['metrics'][name]:.4f}" if name in engine["metrics"] else "" for name in metrics),
    ]


def lines(found: Json) -> Iterator[str]:
    """Everything but the table."""
    if any(engine["timed"] == "runtime" for engine in found["engines"]):
        yield "median: of the runtime's own call, which engines are ranked by; session: of Session.run, with its checks"
    elif any(engine["median_s"] for engine in found["engines"]):
        yield "median: of Session.run, with its checks, as not every engine's runtime can be timed alone"
    yield from _reasons(found["engines"])
    busy = [reason for timed in (*found["engines"], *found["duels"]) for reason in timed["busy"]]
    if busy:
        yield (
            f"the machine was busy while these times were taken: {busiest(busy)}; compare again when it is quiet, with "
            "a larger --seconds: engines that were timed for as long before are not timed again"
        )
    for duel in found["duels"]:
        yield duel_text(duel)
    told = found["recommendation"]
    yield f"take {told['unit']}: {told['reason']}" if told["unit"] else f"nothing to take: {told['reason']}"
    for flip in told["flips"]:
        yield f"  {flip['unit']} instead, for {_AXES[flip['axis']]}: {flip['condition']}"


def _reasons(engines: Iterable[Json]) -> Iterator[str]:
    """Why engines are not proven; those of one reason in one line, as most of a target without its GPU are."""
    together: dict[tuple[str, str], list[str]] = {}
    for engine in engines:
        if engine["reason"]:
            name = f"{engine['precision']} {engine['backend']}"
            together.setdefault((engine["status"], engine["reason"]), []).append(name)
    for (status, reason), names in together.items():
        yield f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {status}: {reason}"


def duel_text(duel: Json) -> str:
    """One duel, the verdict first."""
    pair = f"{duel['first']} against {duel['second']}"
    if duel["verdict"] == "far faster":
        return f"far faster: {pair}, by the times that each had alone ({1 / duel['ratio']:.3g} times)"
    if duel["ratio"] is None:
        return f"{duel['verdict']}: {pair}; too few runs, or they could not be run side by side"
    unseen = (
        f"a difference of {100 * duel['detectable']:,.{0 if duel['detectable'] >= 0.1 else 1}f} % would have been shown"
    )
    verdict = "too noisy to tell" if too_noisy(duel["verdict"], duel["low"]) else duel["verdict"]
    interval = f"{duel['ratio']:.3f} times the time (95 %: {duel['low']:.3f} to {duel['high']:.3f})"
    return f"{verdict}: {pair}: {interval}; {unseen}"


def heading(found: Json) -> str:
    """What was compared, and where."""
    where = machine_text(found["machine"])
    return f"{found['model']} on {found['target']} at {found['bucket']}, {where}, {found['created_at']}"


def markdown(found: Json) -> str:
    """The comparison as a page."""
    columns, table = rows(found)
    said = [f"# {heading(found)}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    said += [f"| {' | '.join(_cell(item) for item in row)} |" for row in table]
    return "\n".join([*said, "", *(f"- {_cell(line.strip())}" for line in lines(found))]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
