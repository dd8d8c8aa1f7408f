"""Who wrote a document: the user, for histories, and the process, for build locks and the state of runs.

A process number alone does not identify a process: it is reused, and each container counts from 1.
"""

import getpass
import os
import socket
from dataclasses import dataclass
from pathlib import Path


def user() -> str:
    """The current user's name; 'uid 1000' in a container that has no name for the uid."""
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


@dataclass(frozen=True)
class Presence:
    """A process. host: its machine's name.  namespace: the process namespace of `pid`, '' where unknown.  began: its
    start time in seconds since 1970, as text."""

    host: str
    namespace: str
    pid: int
    began: str

    @property
    def has_ended(self) -> bool:
        """Whether the process ran on this machine and has ended; False where this machine cannot tell."""
        import psutil

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
    import psutil

    process = psutil.Process()
    return Presence(*_here(), process.pid, repr(process.create_time()))


def _here() -> tuple[str, str]:
    """This machine's name and the process namespace, '' if unknown; containers of one machine may share the name."""
    try:
        return socket.gethostname(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), ""
