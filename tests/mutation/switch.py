"""Copied into the planted tree: each planted site asks here whether its mutant runs, and is recorded when none does.

One environment is the same for all tests of a worker, so that its servers live on: the current test is in a file.
Standard library only.
"""

import os
import time
from pathlib import Path

mutant = int(os.environ.get("MUTANT") or -1)
# The number of no site.
NO_MUTANT = 1 << 24
_FOLDER, _WORKER = os.environ.get("MUTATION_RECORD"), os.environ.get("PYTEST_XDIST_WORKER", "alone")
_AGE_S = 0.05  # how long a process that runs no tests itself takes the current test for the same
_recorded: set[tuple[int, str]] = set()
_read, _current, here = 0.0, "", ""


def active(site: int) -> bool:
    """Whether this site's mutant is the one that runs in this process."""
    if _FOLDER and mutant < 0:
        _record(site, Path(_FOLDER))
    return site == mutant


def _record(site: int, folder: Path) -> None:
    global _read, _current
    if not here and time.monotonic() - _read > _AGE_S:
        _read, current_path = time.monotonic(), folder / f"current-{_WORKER}"
        _current = current_path.read_text() if current_path.exists() else ""
    if (pair := (site, here or _current)) not in _recorded:
        _recorded.add(pair)
        with (folder / f"sites-{_WORKER}").open("a") as file:
            file.write(f"{site}\t{pair[1]}\n")
