"""What attribution found, for people: a headline, the table as text, and what was proposed."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from enginery.core.proof.report import Check, describe
from validation.attribution.result import Attribution, Error, Row

COLUMNS = ("#", "node", "op", "own error", "inherited", "tensor", "why")
SHOWN = 12


def headline(found: Attribution) -> str:
    """The finding in one line."""
    if found.finding == "nothing-failed":
        return f"nothing failed at the {found.joint} joint; the table ranks what there is"
    if found.finding == "spread":
        worst = found.rows[0]
        start = f"no node breaks a limit by itself: the errors of {len(found.rows)} segments add up"
        return f"{start}; the largest is {worst.node}'s ({worst.op_type}, {error_text(worst.local)})"
    first = found.blamed[0]
    others = f", and {len(found.blamed) - 1} more" if len(found.blamed) > 1 else ""
    return f"{first.node} ({first.op_type}): {first.blamed}{others}"


def taps_text(found: Attribution) -> str:
    """Whether tapping changed the outputs."""
    if not found.taps.compared:
        return "the candidate did not run, so it is not known whether tapping changes its outputs"
    if not found.taps.changed:
        return f"tapping changed no bit of the outputs ({found.taps.compared} compared)"
    parts = ", ".join(f"{name} by {error_text(error)}" for name, error in found.taps.changed.items())
    return f"tapping changed the outputs ({parts}): the ranking is of the tapped model"


def lines(found: Attribution) -> Iterator[str]:
    """Everything but the table."""
    yield headline(found)
    yield from (f"failed: {text}" for text in found.failed)
    yield f"cut at {found.cut} of {found.points} tensors that both have; measured on {', '.join(found.cases)}"
    yield taps_text(found)
    yield from found.notes
    if found.proposal is not None:
        yield from proposal_lines(found.proposal)


def cells(index: int, row: Row) -> tuple[str, ...]:
    """A row of the table: COLUMNS."""
    more = f" + {len(row.nodes) - 1}" if len(row.nodes) > 1 else ""
    own, inherited = error_text(row.local), error_text(row.inherited)
    return str(index + 1), f"{row.node}{more}", row.op_type, own, inherited, row.tensor, row.blamed


def error_text(error: Error) -> str:
    """An error for people: what is wrong with the numbers, else their SQNR."""
    if error.note:
        return "no result"
    if error.nonfinite:
        return f"{error.nonfinite} not finite"
    if error.unequal:
        return f"{error.unequal:.2%} unequal"
    return "exact" if error.sqnr_db == math.inf else f"{error.sqnr_db:.1f} dB"


def proposal_lines(proposal: Mapping[str, Any]) -> Iterator[str]:
    """What to leave in float, what that gives, and the lines for the spec."""
    if proposal["leave"] is None:
        yield (
            f"no proposal: in {proposal['runs']} runs no choice among the {proposal['groups']} groups passed; "
            "the error is not only theirs"
        )
        return
    kept, groups = len(proposal["leave"]), proposal["groups"]
    sure = "without any one of them it fails" if proposal["minimal"] else "the runs ended before it was minimal"
    yield f"leave {kept} of {groups} groups in float and it passes ({proposal['runs']} graphs run; {sure})"
    for pair in proposal["quality"]:
        before = describe(Check.from_json(pair["before"]))
        after = Check.from_json(pair["after"]).value if pair["after"] else None
        yield f"  {before} -> {'not measured' if after is None else f'{after:.4g}'}"
    if proposal.get("searched"):
        yield "  the search will run again with these rules, and may choose otherwise"
    yield from proposal["snippet"].splitlines()


def section(data: Mapping[str, Any]) -> dict[str, Any]:
    """A section of the page. data: an attribution's JSON, with `name` and `units`."""
    found = Attribution.from_json(data)
    rows = [dict(zip(COLUMNS, cells(index, row), strict=True)) for index, row in enumerate(found.rows[:SHOWN])]
    proposal = found.proposal or {}
    told = list(lines(found))[1:]
    snippet = proposal.get("snippet", "") if proposal.get("leave") is not None else ""
    kept = told[: len(told) - len(snippet.splitlines())] if snippet else told
    return {
        "name": data["name"],
        "units": list(data["units"]),
        "headline": headline(found),
        "lines": kept,
        "snippet": snippet,
        "rows": rows,
        "more": max(0, data["segments"] - len(rows)),
    }
