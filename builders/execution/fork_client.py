"""Forks job processes from a server that has imported their modules, so that jobs do not import them again.

The server (`fork_server`) runs one thread of Python and no job. It starts with the first job, and ends with the
context or with this process. A forked job has its own process, session and group, and the same limits as a spawned
one. The server only forks the job, keeps its pid from being reused while it is watched, and reads its exit status. If
the server dies, the kernel kills its jobs (`child.die_with_parent`), and later jobs are spawned.
docs/decisions/0002-one-process-per-step.md explains why imported modules are safe to fork.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock

from builders.execution.process import Child, Ended, Start, environment, is_readable, module_command, spawn

# The most bytes of one message between client and server: a path, or a status.
MOST_BYTES = 1 << 16


@contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[Start]:
    """A `Start` that forks from a process that has imported `modules`. It spawns instead on systems other than Linux,
    and if this process's environment variables or module path differ from the server's."""
    if not hasattr(os, "pidfd_open"):
        yield spawn
        return
    server = _server_of(modules)
    try:
        yield server.start
    finally:
        server.stop()


@cache
def keep_fork_server(modules: tuple[str, ...], python: Path | None = None) -> Start:
    """`fork_server` with a server that ends with this process. python: as in `spawn`."""
    return _server_of(modules, python).start if hasattr(os, "pidfd_open") else partial(spawn, python=python)


def _server_of(modules: Sequence[str], python: Path | None = None) -> "ForkServer":
    return ForkServer(lambda theirs, _: _start(theirs, modules, python), python)


def _start(theirs: socket.socket, modules: Sequence[str], python: Path | None) -> Callable[[], object]:
    null_stream = subprocess.DEVNULL
    return subprocess.Popen(
        [*module_command(python), "builders.execution.fork_server", str(theirs.fileno()), *modules],
        stdin=null_stream, stdout=null_stream, stderr=null_stream, env=environment(python),
        pass_fds=(theirs.fileno(),), start_new_session=True,
    ).wait  # fmt: skip


class ForkServer:
    """The server's process, once it is started, and the socket to it.

    begin: starts the process, given the server's end of the socket and ours, and returns a function that waits until
    the process has ended.  python: the interpreter of the server and of jobs that are spawned, as in `spawn`.
    """

    def __init__(
        self, begin: Callable[[socket.socket, socket.socket], Callable[[], object]], python: Path | None = None
    ) -> None:
        self._begin, self._python, self._lock = begin, python, Lock()
        self._wait: Callable[[], object] | None = None
        self._socket: socket.socket | None = None
        self._environment: Mapping[str, str] = {}

    def start(self, workdir: Path, lifeline: int) -> Child:
        """Fork a process for the job in `workdir`, or spawn one. Raises OSError."""
        if self.is_ready():
            with (workdir / "job.log").open("wb") as log:
                pid = self.ask({"start": str(workdir)}, (lifeline, log.fileno()))
            if pid:
                with suppress(ProcessLookupError):  # the server has ended, and the job with it
                    return _Forked(int(pid[0]), os.pidfd_open(int(pid[0])), self)
        return spawn(workdir, lifeline, self._python)

    def ask(self, message: Mapping[str, object], files: Sequence[int] = ()) -> list[float]:
        """The numbers in the server's answer to a message; [] if it cannot or has ended. files: descriptors to send."""
        with self._lock, suppress(OSError, ValueError):
            if self._socket is not None:
                socket.send_fds(self._socket, [json.dumps(message).encode()], files)
                return [float(number) for number in json.loads(self._socket.recv(MOST_BYTES))]
        return []

    def stop(self) -> None:
        """End the server; jobs that still run are killed with it."""
        with self._lock:
            if self._wait and self._socket:
                self._socket.close()
                self._wait()
            self._socket = None

    def is_ready(self) -> bool:
        """Start the server at the first call; return whether its environment is that of a spawned job."""
        with self._lock:
            if self._wait is None:
                self._environment = environment(self._python)
                self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with server_socket:
                    self._wait = self._begin(server_socket, self._socket)
        return self._environment == environment(self._python)


@dataclass(frozen=True)
class _Forked:
    """A process that the server forked. descriptor: readable when the process has ended."""

    pid: int
    descriptor: int
    server: ForkServer

    def has_ended(self, within_s: float = 0.0) -> bool:
        return is_readable(self.descriptor, within_s)

    def end(self) -> Ended:
        self.server.ask({"kill": self.pid})
        is_readable(self.descriptor, None)  # not in the server: a process that the kernel cannot end would delay others
        os.close(self.descriptor)
        # If the server has ended, the kernel has killed the job, and closing the job's lifeline kills its group.
        status, cpu_s = self.server.ask({"take": self.pid}) or (-signal.SIGKILL, 0.0)
        return Ended(int(status), cpu_s)
