"""The server's side of `forking`: `python -m builders.execution.fork_server SOCKET MODULE ...`.

It imports the modules, then answers three messages until the other end of the socket is closed: {"start": WORKDIR},
which comes with the job's lifeline and log as open files, with [pid], or [] where it cannot be forked; {"kill": pid},
which kills the pid's group; {"take": pid}, once it has ended, with its exit status and its CPU time in seconds.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from builders.execution import child
from builders.execution.forking import MOST_BYTES
from builders.execution.starting import variables_of


def main(control: socket.socket, modules: list[str]) -> None:
    """Import the modules and answer until the socket is closed. What cannot be imported here is left to the jobs."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no child's collection writes to pages that all share
    while True:
        data, files, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
        if not data:
            return
        ((what, value),) = json.loads(data).items()
        answer = _fork(control, Path(value), files) if what == "start" else {"kill": _kill, "take": _take}[what](value)
        for descriptor in files:
            os.close(descriptor)
        with suppress(OSError):  # nobody is there any more
            control.send(json.dumps(answer).encode())


def _fork(control: socket.socket, workdir: Path, files: list[int]) -> list[float]:
    try:
        pid = os.fork()
    except OSError:
        return []
    if pid == 0:
        control.close()
        _run_job(workdir, *files)
    return [pid]


def _run_job(workdir: Path, lifeline: int, log: int) -> NoReturn:
    """What a spawned interpreter would do, up to its exit status."""
    status = 1
    try:
        parent = os.getppid()
        os.setsid()
        os.chdir(workdir)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        os.environ.update(variables_of(workdir))
        tempfile.tempdir = None
        child.main(workdir, lifeline, parent)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _kill(pid: int) -> list[float]:
    """Until `_take` the number is that of no other process."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come as far as to lead a group
        os.kill(pid, signal.SIGKILL)
    return []


def _take(pid: int) -> list[float]:
    _, status, used = os.wait4(pid, 0)
    return [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
