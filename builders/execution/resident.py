"""Resident memory of a process with all that it has started.

It is asked for every `process.TICK_S` of every running job. psutil finds children by reading the status of every
process of the machine, which takes milliseconds where hundreds run; Linux lists a thread's children (proc(5), since
3.5, where the kernel is built with CONFIG_PROC_CHILDREN, as distributions' are).
"""

import os
from collections.abc import Iterator
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mib(pid: int) -> float:
    """Resident memory of a process and all its descendants, in MiB; those that have just ended count nothing."""
    if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return sum(_resident_bytes(member) for member in _family(pid)) / 2**20
    return _by_psutil(pid)


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants, as far as they are still there."""
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return
    for thread in threads:
        for child in _text(f"/proc/{pid}/task/{thread}/children").split():
            yield from _family(int(child))


def _resident_bytes(pid: int) -> int:
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _text(path: str) -> str:
    try:
        with open(path) as stream:  # noqa: PTH123 - a path object for each would cost more than the reading
            return stream.read()
    except OSError:
        return ""


def _by_psutil(pid: int) -> float:
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for member in family:
        try:
            total += member.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 2**20
