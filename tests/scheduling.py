"""How pytest-xdist shares the tests out: whole files, the slow ones first, to a worker a core."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests start servers and processes of their own: more workers than this wait for each other.
MOST_WORKERS = 4
# Folders whose tests share what takes longest to start.
ONE_FLEET = ("tests/builders/execution/ray",)


class WholeFiles(LoadScopeScheduling):
    """Each file goes to one worker, so that its fixtures are made once; so does a folder of `ONE_FLEET`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in ONE_FLEET if file.startswith(f"{folder}/")), file)


def count_workers() -> int:
    """Workers for `-n auto`: one a core. One more saves no time, and tests that compare times fail beside it."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


def put_slow_files_first(items: list[pytest.Item]) -> None:
    """Order files with a test marked `slow` or `server` before all others, so that none of them is what is left."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("server")}
    items.sort(key=lambda item: item.path not in slow)


def once_for_all_workers(base: Path, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills, once in a run of the tests: the first worker does, and the others wait for it.

    base: the worker's folder of temporary folders, which lies in that of the run; without workers that of the run.
    """
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = folder.with_suffix(".part")
            shutil.rmtree(made, ignore_errors=True)  # of a worker that died
            make(made)
            made.rename(folder)
    return folder
