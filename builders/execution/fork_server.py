"""The server's side of `fork_client`: `python -m builders.execution.fork_server SOCKET MODULE ...`.

It imports the modules, then answers three messages until the client closes the socket. {"start": WORKDIR} has two open
files, the job's lifeline and log; the answer is [pid], or [] if the fork fails. {"kill": pid} kills the pid's group.
{"take": pid}, after the process has ended, is answered with its exit status and its CPU time in seconds.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from builders.execution import child
from builders.execution.fork_client import MOST_BYTES, ForkServer
from builders.execution.process import Start, spawn, variables_of


def main(control: socket.socket, modules: list[str]) -> None:
    """Import the modules, then answer until the socket is closed. Failed imports are skipped: jobs report them."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that garbage collection in a child does not copy shared pages
    _serve(control)


@contextmanager
def fork_here() -> Iterator[Start]:
    """A `Start` that forks from a copy of this process, which is made on entry: for a job that starts another process.

    It spawns instead on systems other than Linux, if this process has other threads, and if its environment variables
    or module path have changed since. The copy ends with the context, and is killed with this process.
    """
    if not (hasattr(os, "pidfd_open") and _has_one_thread()):
        yield spawn
        return
    server = ForkServer(_copy_process)
    server.is_ready()
    try:
        yield server.start
    finally:
        server.stop()


def _has_one_thread() -> bool:
    """Whether this process has one thread, also counting threads that Python did not start. False if unknown."""
    with suppress(OSError):
        return len(list(Path("/proc/self/task").iterdir())) == 1
    return False


def _copy_process(theirs: socket.socket, ours: socket.socket) -> Callable[[], object]:
    """Fork a server from this process; returns a function that waits for its end."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            child.die_with_parent(parent)
            ours.close()
            _serve(theirs)
        finally:
            os._exit(0)
    return lambda: _end_of(pid)


def _end_of(pid: int) -> None:
    with suppress(ChildProcessError):  # the job's own code may have waited for it
        os.waitpid(pid, 0)


def _serve(control: socket.socket) -> None:
    """Answer messages until the socket is closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
        if not message:
            return
        ((verb, value),) = json.loads(message).items()
        answer = _fork(control, Path(value), fds) if verb == "start" else {"kill": _kill, "take": _take}[verb](value)
        for descriptor in fds:
            os.close(descriptor)
        with suppress(OSError):  # the client has ended
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
    """Run a job and exit with its status, as a spawned interpreter would."""
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
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _kill(pid: int) -> list[float]:
    """Kill a job's process group, or the process if it leads none yet. Its pid is not reused before `_take`."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # the process does not lead a group yet
        os.kill(pid, signal.SIGKILL)
    return []


def _take(pid: int) -> list[float]:
    _, status, usage = os.wait4(pid, 0)
    return [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
