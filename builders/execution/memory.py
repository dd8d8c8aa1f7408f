"""Whether the kernel killed for want of memory: its own count, before and after.

Source: Linux' cgroup-v2.rst (memory.events: oom_kill counts the cgroup's processes killed by any OOM killer) and
/proc/vmstat's oom_kill (since 4.13), which counts the whole machine, so that a neighbour's end may look like ours.

Resident memory of a process with all that it has started.

It is asked for every `process.TICK_S` of every running job. psutil finds children by reading the status of every
process of the machine, which takes milliseconds where hundreds run; Linux lists a thread's children (proc(5), since
3.5, where the kernel is built with CONFIG_PROC_CHILDREN, as distributions' are).
"""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """How often the kernel has killed a process of this cgroup, or else of this machine; 0 where it does not say."""
    of_cgroup = _count(cgroups / _own_cgroup(proc) / "memory.events")
    return of_cgroup if of_cgroup is not None else _count(proc / "vmstat") or 0


def _own_cgroup(proc: Path) -> str:
    """The path of this process's cgroup (version 2) under the root of cgroups."""
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::"):
            return line[3:].lstrip("/")
    return ""


def _count(path: Path) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


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
