"""How a job's process comes to be: as a new interpreter (`spawn`), or forked from one that is warm (`forking`)."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# How an interpreter is started; -P keeps its current folder out of what it imports.
PYTHON = (sys.executable, "-P", "-X", "faulthandler")
# Names the folder of a job to the job's own process.
FOLDER_VARIABLE = "ENGINESMITH_JOB_FOLDER"


@dataclass(frozen=True)
class Ended:
    """How a process ended. status: as `Popen.returncode`.  cpu_s: its CPU time, with that of those it waited for."""

    status: int
    cpu_s: float


class Child(Protocol):
    """A job's process, which leads a session and process group of its own."""

    @property
    def pid(self) -> int:
        """Its number, and that of its group; no other's before `end`."""
        ...

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether it has ended by itself, or does within a time."""
        ...

    def end(self) -> Ended:
        """Kill what is left of its group, and take its status."""
        ...


# Starts a process of `builders.execution.child` in a work folder, with its output in job.log there. The number is the
# file descriptor of a pipe: when it closes, the process and its group are killed.
Start = Callable[[Path, int], Child]


def spawn(workdir: Path, lifeline: int) -> Child:
    """Start a new interpreter for the job in `workdir`. Raises OSError."""
    words = ("builders.execution.child", str(workdir), str(lifeline), str(os.getpid()))
    with (workdir / "job.log").open("wb") as log:
        process = subprocess.Popen(
            [*PYTHON, "-m", "enginesmith.rooms", *words], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, cwd=workdir, env={**environment(), **variables_of(workdir)},
            pass_fds=(lifeline,), start_new_session=True,
        )  # fmt: skip
    return _Spawned(process, _descriptor(process.pid))


def environment() -> dict[str, str]:
    """This process's environment variables, with what has a child find the modules that this process finds."""
    return {**os.environ, "PYTHONPATH": module_path()}


def variables_of(workdir: Path) -> dict[str, str]:
    """The environment variables that a job in `workdir` has beside its parent's."""
    return {"TMPDIR": str(workdir), FOLDER_VARIABLE: str(workdir)}


def module_path() -> str:
    """What PYTHONPATH must be for a child that is to find the modules that this process finds."""
    return os.pathsep.join(place or os.getcwd() for place in sys.path)  # noqa: PTH109 - joined as text


def is_readable(descriptor: int, within_s: float | None) -> bool:
    """Whether a file can be read, or can be within a time; a process's own (`os.pidfd_open`) when that has ended.

    within_s: None waits for ever.
    """
    waiting = select.poll()  # `select` takes no descriptor above 1023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(within_s if within_s is None else within_s * 1000))


def _descriptor(pid: int) -> int | None:
    """A file that can be read when the process has ended; None where there is none (not Linux, a sandbox)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


@dataclass(frozen=True)
class _Spawned:
    process: subprocess.Popen[bytes]
    descriptor: int | None

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_ended(self, within_s: float = 0.0) -> bool:
        if self.descriptor is not None:
            return is_readable(self.descriptor, within_s)
        time.sleep(within_s)
        # WNOWAIT leaves a zombie, which keeps the group's number from being given to strangers until it is killed.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> Ended:
        os.killpg(self.pid, signal.SIGKILL)
        _, status, used = os.wait4(self.pid, 0)
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return Ended(self.process.returncode, used.ru_utime + used.ru_stime)
