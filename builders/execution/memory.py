"""Memory of a job's processes: how much they hold, and how often the kernel has killed for want of it.

Resident memory is asked for every `process.TICK_S` of every running job. psutil finds children by reading the status of
every process of the machine, which takes milliseconds where hundreds run; Linux lists a thread's children (proc(5),
since 3.5, where the kernel is built with CONFIG_PROC_CHILDREN, as distributions' are).

Source of the kernel's counts: Linux' cgroup-v2.rst (memory.events: oom_kill counts the cgroup's processes killed by any
OOM killer) and /proc/vmstat's oom_kill (since 4.13), which counts the whole machine and so other jobs' processes too.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """How often the kernel has killed a process of this cgroup, or else of this machine; 0 where it does not say."""
    own = next((line[3:].lstrip("/") for line in _lines(proc / "self" / "cgroup") if line.startswith("0::")), "")
    of_cgroup = _count_kills(cgroups / own / "memory.events")
    return of_cgroup if of_cgroup is not None else _count_kills(proc / "vmstat") or 0


def _count_kills(path: Path) -> int | None:
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


def resident_mib(pid: int) -> float:
    """Resident memory of a process and all its descendants, in MiB; those that have just ended count nothing."""
    if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        fields = (_text(f"/proc/{member}/statm").split() for member in _family(pid))
        return sum(int(found[1]) for found in fields if found) * _PAGE / 2**20
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
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += member.memory_info().rss
    return total / 2**20
