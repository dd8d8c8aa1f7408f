"""Measures the project's size: `python -m docs.size` prints each size with its limit, and exits 1 above a limit.

Each limit in `LIMITS` is the size at the last change of this table plus 3 %. Raise one only with a page in
docs/decisions that says what was deleted instead.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from enginesmith.cli import enginesmith

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("enginesmith", "builders", "validation", "pipeline")
# Pages that programs write, and decisions, are not counted as documentation.
NOT_COUNTED = (
    "docs/decisions/",
    "docs/reference/commands.md",
    "docs/reference/conformance.md",
    "docs/reference/faults.md",
    "docs/zoo.md",
)
PAGES = ("README.md", "docs/*.md")
LIMITS = {
    "modules": 420,
    "lines of product": 107_350,
    "lines of tests": 89_100,
    "lines of the longest module": 600,
    "first-level commands": 24,
    "options": 300,
    "words of documentation": 45_000,
}


def measure() -> dict[str, int]:
    """Each size of `LIMITS` in this tree."""
    modules = [len(lines) for lines in _sources(*PACKAGES, but="__init__.py")]
    return {
        "modules": len(modules),
        "lines of product": sum(len(lines) for lines in _sources(*PACKAGES)),
        "lines of tests": sum(len(lines) for lines in _sources("tests")),
        "lines of the longest module": max(modules),
        "first-level commands": len(enginesmith.list_commands(click.Context(enginesmith))),
        "options": sum(_count_options(command) for command in _commands(enginesmith)) + _count_options(enginesmith),
        "words of documentation": sum(
            len((ROOT / page).read_text(encoding="utf-8").split())
            for page in _tracked(*PAGES)
            if not page.startswith(NOT_COUNTED)
        ),
    }


def _tracked(*patterns: str) -> list[str]:
    """Tracked files of `patterns` that exist."""
    listing = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    return [path for path in listing.stdout.splitlines() if (ROOT / path).exists()]


def _sources(*folders: str, but: str | None = None) -> list[list[str]]:
    paths = [path for path in _tracked(*(f"{folder}/*.py" for folder in folders)) if Path(path).name != but]
    return [(ROOT / path).read_text(encoding="utf-8").splitlines() for path in paths]


def _commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None  # noqa: S101 - a name of the same group
        yield command
        if isinstance(command, click.Group):
            yield from _commands(command)


def _count_options(command: click.Command) -> int:
    return sum(isinstance(parameter, click.Option) for parameter in command.params)


def main() -> int:
    """Print each size beside its limit; 1 if one is above."""
    sizes = measure()
    for name, size in sizes.items():
        print(f"{name:28} {size:8,} of {LIMITS[name]:8,}" + ("" if size <= LIMITS[name] else "  TOO LARGE"))
    median = statistics.median(len(lines) for lines in _sources(*PACKAGES, but="__init__.py"))
    print(f"{'median module':28} {median:8,.0f} lines")
    return int(any(size > LIMITS[name] for name, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
