"""The command line: `enginesmith ...`, or `python -m enginesmith ...`."""

import importlib
from typing import NoReturn

from enginesmith.rooms import prefer_own


def main() -> NoReturn:
    """Run the command line with this process's arguments, and exit: raises SystemExit."""
    try:
        prefer_own()
        cli = importlib.import_module("enginesmith.cli")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    cli.main()
    raise SystemExit(0)


if __name__ == "__main__":
    main()
