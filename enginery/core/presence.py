"""Which process something was written by, and whether that one is gone: the one rule for turns and for runs.

A number alone says little: another process may have it by now, and containers of one machine count from 1 each.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Presence:
    """A process. namespace: of its number, '' where that is not known.  began: when it did, in seconds since 1970 as
    text."""

    host: str
    namespace: str
    pid: int
    began: str

    @property
    def gone(self) -> bool:
        """Whether it was on this machine and is not there any more; False wherever that cannot be told from here."""
        if (self.host, self.namespace) != _here():
            return False
        try:
            return repr(psutil.Process(self.pid).create_time()) != self.began
        except (psutil.NoSuchProcess, OverflowError):
            return True
        except psutil.AccessDenied:
            return False


def this_process() -> Presence:
    """The process that asks."""
    process = psutil.Process()
    return Presence(*_here(), process.pid, repr(process.create_time()))


def _here() -> tuple[str, str]:
    """Machine and process namespace; containers of one machine may share the first."""
    try:
        return socket.gethostname(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), ""
