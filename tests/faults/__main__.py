"""Plants every fault and prints the table: `python -m tests.faults`; `--write`: into docs/reference/faults.md."""

import contextlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.faults import FAULTS
from tests.faults.table import PAGE, Caught, markdown, with_table


def plant_all(folder: Path) -> list[Caught]:
    """What the product says of each fault, in order. What jobs print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        return [fault.plant(folder / str(index)) for index, fault in enumerate(FAULTS)]


def main() -> None:
    with TemporaryDirectory() as folder:
        result = plant_all(Path(folder))
    pairs = list(zip(FAULTS, result, strict=True))
    missed_names = [fault.name for fault, item in pairs if (item.check, item.place) != (fault.check, fault.place)]
    print(markdown(pairs), end="")
    if "--write" in sys.argv[1:] and not missed_names:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), markdown(pairs)), encoding="utf-8")
    if missed_names:
        sys.exit(f"not caught as meant: {', '.join(missed_names)}")


if __name__ == "__main__":
    main()
