"""Prints the figures of a checkout: `python -m tests.house [--tree FOLDER] [--json | --write]`, or `make house`."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tests.house.page import PAGE, markdown, measure, read_before, with_table
from tests.house.tree import Tree


def main() -> int:
    """Exit code 0, or 2 where the folder is no git checkout."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description="The figures of one checkout.")
    parser.add_argument("--tree", type=Path, default=Path(), help="root of the checkout (default: this folder)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="names and numbers, for programs")
    shape.add_argument("--write", action="store_true", help="also write the table into docs/house.md")
    given = parser.parse_args()
    try:
        found = measure(Tree.read(given.tree))
    except subprocess.CalledProcessError as error:
        print(f"{given.tree}: not a git checkout: {error.stderr.strip()}; name one with --tree", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    table = markdown(read_before(), found)
    print(table, end="")
    if given.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
