"""What a planted fault is, what caught it, and the table of all of them."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginesmith.core.reports.proof import Check
from validation.attribution.result import Attribution, SegmentRow
from validation.limits.budget import at_most

PAGE = Path(__file__).parents[2] / "docs/reference/faults.md"
START, END = "<!-- planted faults: written by `python -m tests.faults --write` -->\n\n", "\n<!-- end -->\n"
HEADER = ("fault", "caught by", "attributed to", "measured", "limit")


@dataclass(frozen=True)
class Caught:
    """What the product said. check: what fired.  place: where it said the fault is.  also: what fired besides."""

    check: str
    place: str
    measured: str
    limit: str
    also: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fault:
    """A fault, the check that is meant for it, and the place it must be attributed to.

    plant: makes it in a folder of its own and lets the product look.  also: other checks that must fire on it, because
    it is their business too; whatever else fires is a mistake.
    """

    name: str
    plant: Callable[[Path], Caught]
    check: str
    place: str
    also: frozenset[str] = frozenset()


def caught(checks: Sequence[Check], meant: str, place: str | Callable[[Check], str]) -> Caught:
    """The failed check that was meant ('engine sqnr_db'; with 'first of' several cases of it), and the rest's names."""
    failed_checks = [check for check in checks if not check.passed]
    names = {f"{check.stage} {check.name}" for check in failed_checks}
    if meant not in names:
        return Caught("; ".join(sorted(names)) or "nothing", "", "", "")
    check = next(check for check in failed_checks if f"{check.stage} {check.name}" == meant)
    page_place = place if isinstance(place, str) else place(check)
    return Caught(meant, page_place, _measured(check), _limit(check), frozenset(names - {meant} - _implied(names)))


def _implied(names: Collection[str]) -> set[str]:
    """What is off where all the energy is: slices, what varies, and most samples."""
    stages = [name.partition(" ")[0] for name in names if name.endswith(" sqnr_db")]
    return {f"{stage} {part}_sqnr_db" for stage in stages for part in ("centered", "slice", "quartile")}


def blamed(attribution: Attribution) -> str:
    """The nodes that attribution blames, with those that one kernel computes with them."""
    return ", ".join(sorted(map(_part, attribution.blamed))) or "no node"


def _part(row: SegmentRow) -> str:
    other_text = ", ".join(name for name in row.nodes if name != row.node)
    return f"node {row.node}{f' (with {other_text})' if other_text else ''}"


def number(value: float) -> str:
    """Two digits, which is what another CPU gives as well."""
    return f"{value:.2g}" if math.isfinite(value) and abs(value) < 100 else f"{value:.0f}"


def _measured(check: Check) -> str:
    return "" if check.value is None else _with_unit(check, check.value)


def _limit(check: Check) -> str:
    if check.limit is None:
        return ""
    upper = check.name.startswith(("contract", "sizes", "calls", "magnitudes")) and check.name != "contract seeds"
    lower = not (at_most(check.name) or upper)
    lower = lower or (check.name.startswith("contract") and "sqnr_db" in check.note)
    return f"{'at least' if lower else 'at most'} {_with_unit(check, check.limit)}"


def _with_unit(check: Check, value: float) -> str:
    return (
        f"{number(value)} dB"
        if check.name.endswith("sqnr_db") or check.note.partition(";")[0] == "sqnr_db"
        else number(value)
    )


def markdown(rows: Iterable[tuple[Fault, Caught]]) -> str:
    """The table."""
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [(fault.name, f"`{item.check}`", item.place, item.measured, item.limit) for fault, item in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table_in(page: str) -> str:
    """The table that a page holds."""
    return page.partition(START)[2].partition(END)[0]


def with_table(page: str, table: str) -> str:
    """The page with another table."""
    text_before, _, rest = page.partition(START)
    return text_before + START + table + END + rest.partition(END)[2]


def differences(before: str, now: str, tolerance: float = 0.15) -> list[str]:
    """Lines that differ in words, or in numbers by more than another CPU's last bits would explain."""
    pairs = list(zip(before.splitlines(), now.splitlines(), strict=False))
    items = [f"{old_name!r} is now {new!r}" for old_name, new in pairs if not _alike(old_name, new, tolerance)]
    lengths = [len(text.splitlines()) for text in (before, now)]
    return items + ([f"{lengths[0]} lines are now {lengths[1]}"] if lengths[0] != lengths[1] else [])


_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)")


def _alike(old: str, new: str, tolerance: float) -> bool:
    cells = [line.split("|") for line in (old, new)]
    columns = len(HEADER) + 2
    if old == new or {len(line) for line in cells} != {columns} or cells[0][:4] != cells[1][:4]:
        return old == new
    for left_cell, right_cell in zip(*(line[4:] for line in cells), strict=True):
        if _NUMBER.sub("#", left_cell) != _NUMBER.sub("#", right_cell):
            return False
        numbers = [[float(item) for item in _NUMBER.findall(text)] for text in (left_cell, right_cell)]
        if not all(math.isclose(*pair, rel_tol=tolerance) for pair in zip(*numbers, strict=True)):
            return False
    return True
