"""The tables of `make proof`, in docs/reference/faults.md: what is caught in which precision, and false alarms."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tests.faults.campaign import PRECISIONS, Alarms, Outcome
from tests.faults.table import PAGE as PAGE

START, END = "<!-- proof: written by `make proof` -->\n\n", "\n<!-- end of proof -->\n"
# A fault must be caught from here on: twice the amplitude of what an honest kernel's rounding does to the same graph.
TWICE = 2.0


class Honest:
    """What kernels that are right add, by family and precision: means over all clean seeds, of the noisier kernel."""

    def __init__(self, clean: Sequence[Alarms]) -> None:
        self._means = {}
        for key in dict.fromkeys((item.family, item.precision) for item in clean):
            own_items = [item for item in clean if (item.family, item.precision) == key and item.noise]
            kernels = dict.fromkeys(item.kernel for item in own_items)
            means = [np.mean([item.noise for item in own_items if item.kernel == kernel], axis=0) for kernel in kernels]
            if means:
                self._means[key] = np.max(means, axis=0)

    def ratio(self, outcome: Outcome) -> float:
        """Amplitude of a fault's error over theirs, in the output or the slice where that is greatest; inf where it is
        no error of numbers, or nothing is known."""
        mean = self._means.get((outcome.family, outcome.precision))
        if mean is None or not outcome.noise:
            return math.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.nan_to_num(np.sqrt(outcome.noise / mean), nan=0.0, posinf=math.inf).max())

    def due(self, outcome: Outcome) -> bool:
        """Whether a fault is large enough that it must be caught."""
        return self.ratio(outcome) >= TWICE


def fault_rows(outcomes: Sequence[Outcome], honest: Honest) -> str:
    """A row per fault: 'caught of those that are due, of all planted' per precision, who caught it, who was blamed."""
    lines = [("fault", *PRECISIONS, "caught by", "its node blamed"), ("---",) * (len(PRECISIONS) + 3)]
    for fault in dict.fromkeys(item.fault for item in outcomes):
        own_items = [item for item in outcomes if item.fault == fault]
        cells = [_cell([item for item in own_items if item.precision == precision], honest) for precision in PRECISIONS]
        names = Counter(name for item in own_items for name in item.by)
        text = ", ".join(f"`{name}`" for name, _ in names.most_common(3))
        verdicts = [item.right for item in own_items if item.right is not None and honest.due(item)]
        lines.append((fault, *cells, text, f"{sum(verdicts)} of {len(verdicts)}" if verdicts else ""))
    return _table(lines)


def _cell(mine: Sequence[Outcome], honest: Honest) -> str:
    if not mine:
        return ""
    must = [item for item in mine if honest.due(item)]
    less_items = [item for item in mine if not honest.due(item)]
    text = f"{sum(bool(item.by) for item in must)} of {len(must)}" if must else ""
    small_text = f"{sum(bool(item.by) for item in less_items)} of {len(less_items)} smaller" if less_items else ""
    return "; ".join(part for part in (text, small_text) if part)


def alarm_rows(alarms: Sequence[Alarms]) -> str:
    """A row per family and kernel: how many engines had a failed check, by precision."""
    lines = [("family", "kernels", *PRECISIONS), ("---",) * (len(PRECISIONS) + 2)]
    for family, kernel in dict.fromkeys((item.family, item.kernel) for item in alarms):
        own_items = [item for item in alarms if (item.family, item.kernel) == (family, kernel)]
        cells = []
        for precision in PRECISIONS:
            these = [item for item in own_items if item.precision == precision]
            cells.append(f"{sum(bool(item.failed) for item in these)} of {len(these)}" if these else "")
        lines.append((family, kernel, *cells))
    return _table(lines)


def missed(outcomes: Sequence[Outcome], clean: Sequence[Alarms]) -> list[str]:
    """The bars that are missed, a line each."""
    return [*_let_through(outcomes, Honest(clean)), *_too_many(clean)]


def _let_through(outcomes: Iterable[Outcome], honest: Honest) -> Iterator[str]:
    for item in outcomes:
        place = f"{item.fault} in {item.family} {item.precision}, seed {item.seed}"
        size = f", {honest.ratio(item):.1f} times honest rounding" if item.noise else ""
        if honest.due(item) and not item.by:
            yield f"not caught: {place}{size}"
        elif honest.due(item) and item.right is False:
            yield f"another node blamed: {place}{size}"


def _too_many(clean: Sequence[Alarms]) -> Iterator[str]:
    for key in dict.fromkeys((item.family, item.kernel, item.precision) for item in clean):
        own_items = [item for item in clean if (item.family, item.kernel, item.precision) == key]
        items = [item for item in own_items if item.failed]
        if len(items) > 0.01 * len(own_items):
            yield f"false alarms: {' '.join(key)}: {len(items)} of {len(own_items)}, such as {items[0].failed[0]}"


def with_tables(page: str, *tables: str, ends: tuple[str, str] = (START, END)) -> str:
    """The page with other tables between two marks. Raises ValueError for a page that lacks one of them."""
    text_before, start, rest = page.partition(ends[0])
    _, end, after = rest.partition(ends[1])
    if not (start and end):
        raise ValueError(f"{ends[0].strip()!r} and {ends[1].strip()!r} must be on the page, with a blank line between")
    return text_before + start + "\n".join(tables) + end + after


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
