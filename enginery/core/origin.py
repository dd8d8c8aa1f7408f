"""Who wrote a document, from which process, and when.

Who runs this, for the histories of channels and whatever else remembers who did it.

The identity of a process that wrote a document, and whether it has ended: for build locks and runs.

A process number alone does not identify a process: it is reused, and each container counts from 1.
"""

import getpass
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil


def user() -> str:
    """The current user's name; 'uid 1000' in a container that has no name for the uid."""
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


@dataclass(frozen=True)
class Presence:
    """A process. host: its machine's name.  namespace: of its number, '' where unknown.  began: its start time in
    seconds since 1970, as text."""

    host: str
    namespace: str
    pid: int
    began: str

    @property
    def gone(self) -> bool:
        """Whether the process ran on this machine and has ended; False where this machine cannot tell."""
        if (self.host, self.namespace) != _here():
            return False
        try:
            return repr(psutil.Process(self.pid).create_time()) != self.began
        except (psutil.NoSuchProcess, OverflowError):
            return True
        except psutil.AccessDenied:
            return False


def this_process() -> Presence:
    """The calling process."""
    process = psutil.Process()
    return Presence(*_here(), process.pid, repr(process.create_time()))


def _here() -> tuple[str, str]:
    """Machine and process namespace; containers of one machine may share the first."""
    try:
        return socket.gethostname(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), ""
