"""How pytest-xdist shares the tests out: whole files, the slow ones first, to a worker a core."""

import fcntl
import hashlib
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from enginesmith.core.hardware.cpu_kinds import this_kind

# Tests start servers and processes of their own: more workers than this wait for each other.
MOST_WORKERS = 4
# Folders whose tests share what takes longest to start.
ONE_FLEET = ("tests/builders/execution/ray",)
ROOT = Path(__file__).parents[1]
# What was made is kept here, for all workers and for runs that start within an hour: what is older might be too old for
# a test that looks at times. A run that began with it is over after three.
_KEPT = ROOT / "build" / "fixtures"
_FRESH_S, _OVER_S = 3600.0, 3 * 3600.0


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
    slow_paths = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("server")}
    items.sort(key=lambda item: item.path not in slow_paths)


def import_from_the_end() -> None:
    """Import all files of tests, the last ones first: two workers that collect compile a fresh clone in half the time.

    The first worker goes from the beginning, and from the middle on each finds what the other one compiled.
    """
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("test_*.py"), reverse=True):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not module.startswith("tests.cluster."):
            with suppress(Exception, pytest.skip.Exception):  # collecting reports it
                importlib.import_module(module)


def slow_after_first(items: Iterable[object], every: int = sys.maxsize) -> list[object]:
    """Parameters of a test: the first of each `every` of them runs always, the others in the slow part."""
    return [pytest.param(item, marks=[pytest.mark.slow] * bool(index % every)) for index, item in enumerate(items)]


def made_once(name: str, key: str, make: Callable[[Path], None], place: Path = _KEPT) -> Path:
    """A folder that `make` fills, to be copied: the first worker to ask for a name and key fills it for all others."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ages = {folder: time.time() - float(folder.name.rpartition("-")[2]) for folder in place.glob(f"{name}-*-*")}
        for folder in [folder for folder, age in ages.items() if age > _OVER_S]:
            shutil.rmtree(folder)
        fresh_folders = [folder for folder, age in ages.items() if age < _FRESH_S and folder.match(f"{name}-{key}-*")]
        if fresh_folders:
            return fresh_folders[0]
        partial_path = place / f"{name}.part"
        shutil.rmtree(partial_path, ignore_errors=True)  # of a worker that died
        make(partial_path)
        return partial_path.rename(place / f"{name}-{key}-{time.time():.0f}")


def key_of(packages: Sequence[str], code: Sequence[str]) -> str:
    """A key of what comes of installed packages, of files of this checkout and all below its folders, and of the CPU.

    code: paths from the root.
    """
    digest = hashlib.sha256(this_kind().name.encode())
    digest.update(os.environ.get("MUTANT_FIXTURES", "").encode())  # what a mutant made is for it alone: tests/mutation
    for package in packages:
        digest.update(f"{package} {version(package)}\n".encode())
    for path in sorted(file for name in code for file in [ROOT / name, *(ROOT / name).rglob("*")] if file.is_file()):
        if path.suffix != ".pyc":
            digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
