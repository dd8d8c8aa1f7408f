"""Waiting in tests until something is so, however slow or fast the machine is."""

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import TypeVar

import psutil

Value = TypeVar("Value")

# How long a test waits for what has to come: many times what it takes beside busy neighbours, and less than pytest's
# limit on a test (pyproject.toml), so that it says what did not come.
PATIENCE_S = 120.0


def until(look: Callable[[], Value | None], what: str = "", pause_s: float = 0.005) -> Value:
    """What `look` gives as soon as that is true. Raises AssertionError after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while not (swap := look()):
        assert time.monotonic() < end, f"{what or look}: not within {PATIENCE_S:g} s"
        time.sleep(pause_s)
    return swap


def run_threads(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls at the same time, each in a thread of its own, and wait for their ends."""
    threads = [Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def text_of(path: Path) -> str:
    """The text of a file, once there is one and it is not empty."""
    return until(lambda: path.exists() and path.read_text(), f"text in {path}") or ""


def gone(*pids: int) -> bool:
    """True once none of these processes runs any more; what nobody has waited for counts as gone."""
    return until(lambda: not any(map(_runs, pids)), f"the end of processes {pids}")


def stopped(process: subprocess.Popen[str]) -> None:
    """Wait until a process of `tests.pipeline.stopping` stands still: its line can be read before it has stopped, and
    a SIGCONT that comes before the SIGSTOP would leave it so for ever. Of any other command nothing."""
    if "tests.pipeline.stopping" in map(str, process.args if isinstance(process.args, list) else ()):
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "a process that stops itself")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
