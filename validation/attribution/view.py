"""What the page says of an attribution: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass

from validation.attribution.formatting import COLUMNS, SHOWN, describe_attribution, format_row, summarize
from validation.attribution.result import NamedAttribution


@dataclass(frozen=True)
class AttributionView:
    """A section of the page. snippet: for the spec, or ''.  rows: by column; more: how many are not shown."""

    name: str
    units: tuple[str, ...]
    headline: str
    lines: tuple[str, ...]
    snippet: str
    rows: tuple[Mapping[str, str], ...]
    more: int


def view_attribution(found: NamedAttribution) -> AttributionView:
    """The section of one graph or engine."""
    rows = tuple(dict(zip(COLUMNS, format_row(*each), strict=True)) for each in enumerate(found.rows[:SHOWN]))
    snippet = (found.proposal.snippet if found.proposal else None) or ""
    lines = tuple(describe_attribution(found))[1:]
    return AttributionView(
        name=found.name,
        units=found.units,
        headline=summarize(found),
        lines=lines[: len(lines) - len(snippet.splitlines())],
        snippet=snippet,
        rows=rows,
        more=max(0, found.segments - len(rows)),
    )
