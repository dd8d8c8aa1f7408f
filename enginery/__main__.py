"""The command line: `enginery ...`, or `python -m enginery ...`."""

import importlib
from typing import NoReturn

from enginery.rooms import prefer_own


def main() -> NoReturn:
    """Run the command line with this process's arguments, and exit."""
    prefer_own()
    importlib.import_module("pipeline.cli").main()
    raise SystemExit(0)


if __name__ == "__main__":
    main()
