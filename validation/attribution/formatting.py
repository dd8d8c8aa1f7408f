"""What attribution found, in words: a headline, the table as text, the proposal; and the section of an HTML page."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from enginesmith.core.reports.proof import describe
from validation.attribution.result import MORE_TIME, Attribution, NamedAttribution, Proposal, SegmentRow, TensorError

COLUMNS = ("#", "node", "op", "own error", "inherited", "tensor", "why")
SHOWN = 12


def summarize(found: Attribution) -> str:
    """The finding in one line."""
    return _summarize(found) + ("" if found.complete else " (the time was over before the whole model was looked at)")


def _summarize(found: Attribution) -> str:
    if found.finding == "nothing-failed":
        return f"no golden case fails at the {found.joint} stage by itself; the table ranks what there is"
    if found.finding == "spread":
        worst = found.rows[0]
        start = f"no node breaks a limit by itself: the errors of {found.segments} segments add up"
        return f"{start}; the largest is {worst.node}'s ({worst.op_type}, {format_error(worst.local)})"
    first = found.blamed[0]
    others = f", and {len(found.blamed) - 1} more" if len(found.blamed) > 1 else ""
    return f"{first.node} ({first.op_type}): {first.blamed}{others}"


def describe_taps(found: Attribution) -> str:
    """A line that says whether reading inner tensors changed the outputs."""
    if not found.taps.compared:
        return "the candidate did not run, so it is not known whether tapping changes its outputs"
    if not found.taps.changed:
        return f"tapping changed no bit of the outputs ({found.taps.compared} compared)"
    parts = ", ".join(f"{name} by {format_error(error)}" for name, error in found.taps.changed.items())
    return f"tapping changed the outputs ({parts}): the ranking is of the tapped model"


def describe_attribution(found: Attribution) -> Iterator[str]:
    """The lines beside the table: headline, failed checks, what was measured, the proposal."""
    yield summarize(found)
    yield from (f"failed: {text}" for text in found.failed)
    yield f"cut at {found.cut} of {found.points} tensors that both have; measured on {', '.join(found.cases)}"
    yield describe_taps(found)
    yield from found.notes
    if found.proposal is not None:
        yield from describe_proposal(found.proposal)


def format_row(index: int, row: SegmentRow) -> tuple[str, ...]:
    """The texts of a row of the table, in the order of COLUMNS. index: from 0."""
    more = f" + {len(row.nodes) - 1}" if len(row.nodes) > 1 else ""
    own, inherited = format_error(row.local), format_error(row.inherited)
    return str(index + 1), f"{row.node}{more}", row.op_type, own, inherited, row.tensor, row.blamed


def format_error(error: TensorError) -> str:
    """An error in a few words: non-finite or unequal elements, else the SQNR."""
    if error.note:
        return "no result"
    if error.nonfinite:
        return f"{error.nonfinite} not finite"
    if error.unequal:
        return f"{error.unequal:.2%} unequal"
    return "exact" if error.sqnr_db == math.inf else f"{error.sqnr_db:.1f} dB"


def describe_proposal(proposal: Proposal) -> Iterator[str]:
    """The lines of a proposal: what to leave in float, how checks change, and the YAML for the spec."""
    if proposal.leave is None and proposal.ended_early:
        yield f"no proposal yet: {proposal.runs} graphs were run, and none of them passed; {MORE_TIME}"
        return
    if proposal.leave is None:
        yield (
            f"no proposal: in {proposal.runs} runs no choice among the {proposal.groups} groups passed; "
            "the error is not only theirs"
        )
        return
    sure = "without any one of them it fails" if proposal.minimal else "the runs ended before it was minimal"
    kept = f"{len(proposal.leave)} of {proposal.groups} groups"
    yield f"leave {kept} in float and it passes ({proposal.runs} graphs run; {sure})"
    for change in proposal.quality or ():
        after = change.after.value if change.after else None
        yield f"  {describe(change.before)} -> {'not measured' if after is None else f'{after:.4g}'}"
    if proposal.searched:
        yield "  the search will run again with these rules, and may choose otherwise"
    yield from (proposal.snippet or "").splitlines()


@dataclass(frozen=True)
class AttributionView:
    """The section of a page. snippet: YAML for the spec, or ''.  rows: texts by column.  more: rows not shown."""

    name: str
    units: tuple[str, ...]
    headline: str
    lines: tuple[str, ...]
    snippet: str
    rows: tuple[Mapping[str, str], ...]
    more: int


def view_attribution(found: NamedAttribution) -> AttributionView:
    """The section of one graph's or engine's attribution."""
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
