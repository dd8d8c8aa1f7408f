"""Two versions of a model side by side: what of the spec, the toolchain, the data, the quality, the scales and the
latency differs."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from enginesmith.core.reports.proof import Report
from enginesmith.core.text import format_bytes, format_plain
from validation.plots.texts import number_text, percent_text, seconds_text
from validation.reporting.html import metric_text
from validation.reporting.version_document import VersionDocument

# Values that are longer than this are cut: a spec may hold a whole table.
MOST_CHARACTERS = 300
# Rows of one section that are shown; scales of a large model are thousands.
MOST_ROWS = 200
# A ratio from which on it is written as such, since nobody reads +4690 %.
_LARGE = 3


@dataclass(frozen=True)
class Fact:
    """A value as text. number: to compare it by, None for one that is only equal or not.  relative: whether a change of
    it is a share of the older value, else a difference in `unit`.  engine: the unit that it is of; '' for none.

    Of an engine that one version alone has, nothing is compared but its status.
    """

    text: str
    number: float | None = None
    relative: bool = True
    unit: str = ""
    engine: str = ""


# By the title of a section and the name of the value.
Facts = Mapping[str, Mapping[str, Fact]]


@dataclass(frozen=True)
class ComparedRow:
    """A value of both versions; '' where a version has none. change: in words; '' for values that are no numbers."""

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class ComparedSection:
    """One section. changed: the rows that differ.  same: how many values are equal.  more: changed rows left out."""

    title: str
    changed: tuple[ComparedRow, ...]
    same: int
    more: int


def facts_of(document: VersionDocument) -> Facts:
    """The values of a version that are compared, by section."""
    return {
        "Spec": {path: Fact(text) for path, text in _flatten(document.spec, "")},
        "Toolchain and host": {
            name: Fact(str(value)) for name, value in {**document.toolchain, **document.host}.items()
        },
        "Quality": dict(_quality(document)),
        "Latency": dict(_latency(document)),
        "Quantization scales": dict(_scales(document)),
        "Engines": dict(_engines(document)),
        "Model and data": {
            name: Fact(digest[:16]) for name, digest in {**document.provenance, **document.sources}.items()
        },
    }


def compare(before: Facts, after: Facts) -> tuple[ComparedSection, ...]:
    """All sections, each with what differs. The order of names is that of the newer version."""
    both = _engines_of(before) & _engines_of(after)
    return tuple(_compare_section(title, before.get(title, {}), after[title], both) for title in after)


def _engines_of(facts: Facts) -> set[str]:
    return {fact.engine for section in facts.values() for fact in section.values()} | {""}


def _compare_section(
    title: str, before: Mapping[str, Fact], after: Mapping[str, Fact], engines: set[str]
) -> ComparedSection:
    known = {**before, **after}
    names = [name for name in dict.fromkeys([*after, *before]) if known[name].engine in engines]
    changed = [
        ComparedRow(name, _text(before.get(name)), _text(after.get(name)), _change(before.get(name), after.get(name)))
        for name in names
        if _text(before.get(name)) != _text(after.get(name))
    ]
    more = max(0, len(changed) - MOST_ROWS)
    # Numbers that read the same differ by noise.
    return ComparedSection(title, tuple(changed[:MOST_ROWS]), len(names) - len(changed), more)


def _text(fact: Fact | None) -> str:
    return fact.text if fact else ""


def _change(before: Fact | None, after: Fact | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if before.number is None or after.number is None or not math.isfinite(after.number - before.number):
        return ""
    if not after.relative:
        sign = "+" if after.number > before.number else ""
        return f"{sign}{number_text(after.number - before.number)} {after.unit}".strip()
    if not before.number:
        return ""
    ratio = after.number / before.number
    return percent_text(ratio - 1) if 1 / _LARGE < ratio < _LARGE else f"{format_plain(ratio)} ×"  # noqa: RUF001 - times


def _flatten(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Each value in a spec by its path: 'inputs.image.dtype' -> 'float32'."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flatten(item, f"{path}.{name}" if path else str(name))
    elif value is not None:
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield path or "spec", text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _engines(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for entry in document.engines:
        yield f"{entry.unit}: status", Fact(entry.status)
        if entry.digest:
            size = document.size_of(entry)
            yield f"{entry.unit}: size", Fact(format_bytes(size), size, engine=entry.unit)
            yield f"{entry.unit}: bytes", Fact(entry.digest[:16], engine=entry.unit)
        for name, text in entry.toolchain.items():
            yield f"{entry.unit}: {name}", Fact(text, engine=entry.unit)


def _quality(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for graph, values in document.metrics.items():
        for name, value in values.items():
            unit = "dB" if name.endswith("_db") else ""
            yield f"{graph}: {name}", Fact(metric_text(value, name), value, False, unit)
    for report in document.reports:
        yield from _worst_sqnr(report)


def _worst_sqnr(report: Report) -> Iterator[tuple[str, Fact]]:
    """The least SQNR of each stage of a unit, over outputs and cases."""
    worst: dict[str, float] = {}
    for check in report.checks:
        if check.name == "sqnr_db" and check.value is not None and not math.isnan(check.value):
            worst[check.joint] = min(worst.get(check.joint, math.inf), check.value)
    for stage, value in worst.items():
        yield f"{report.unit}: SQNR at {stage}", Fact(metric_text(value, "sqnr_db"), value, False, "dB", report.unit)


def _latency(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for reports in document.latencies.values():
        for report in reports:
            for bucket in report.buckets:
                seconds = bucket.runtime_s
                busy = " (busy machine)" if report.busy else ""
                name = f"{report.unit}, {bucket.name}, on {report.machine}"
                yield name, Fact(seconds_text(seconds) + busy, seconds, engine=report.unit)


def _scales(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for variant, record in document.quantization.items():
        for tensor in record.tensors:
            yield f"{variant}: {tensor.role} {tensor.name}", Fact(number_text(tensor.scale), tensor.scale)
