"""docs/house.md: the table of figures, those of the commit before the redesign beside those of this tree."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.house.figures import FIGURES
from tests.house.sizes import lines_by_package
from tests.house.tree import Tree

PAGE = Path(__file__).parents[2] / "docs/house.md"
# Measured by `python -m tests.house --json` in a worktree of that commit.
BEFORE = Path(__file__).parent / "cacff5e.json"
_BEGIN, _END = "<!-- figures -->", "<!-- /figures -->"


def measure(tree: Tree) -> dict[str, int]:
    """Every figure of a tree by its name, and the lines of each package as `lines PACKAGE`."""
    packages = {f"lines {name}": count for name, count in lines_by_package(tree).items()}
    return {_key(figure): figure(tree) for figure, _ in FIGURES} | packages


def read_before() -> dict[str, int]:
    """What was measured of the commit before the redesign."""
    found: dict[str, int] = json.loads(BEFORE.read_text(encoding="utf-8"))
    return found


def markdown(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """The table: what is counted, the figure before, the figure now, the bar."""
    packages = [(name, f"Of these in `{name.split()[1]}`.", "") for name in new if name.startswith("lines ")]
    named = [(_key(figure), (figure.__doc__ or "").split("\n")[0], bar) for figure, bar in FIGURES]
    rows = [_row(text, old.get(key), new[key], bar) for key, text, bar in (named[0], *packages, *named[1:])]
    return "\n".join(["| what is counted | at cacff5e | now | bar |", "|---|---:|---:|---:|", *rows]) + "\n"


def with_table(page: str, table: str) -> str:
    """The page with its table made anew. Raises ValueError where the page lacks the marks."""
    head, tail = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    return f"{page[:head]}\n{table}{page[tail:]}"


def _key(figure: Callable[[Tree], int]) -> str:
    return figure.__name__.removeprefix("count_")


def _row(text: str, old: int | None, new: int, bar: str) -> str:
    return f"| {text} | {'' if old is None else f'{old:,}'} | {new:,} | {bar} |"
