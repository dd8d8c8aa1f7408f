"""Memory of a job's processes: how much they hold, and how often the kernel has killed for want of it.

What counts is memory that the kernel cannot take back: without the pages of mapped files, such as the weights of a
large model, which it drops when it needs them. It is asked for every `process.TICK_S` of every running job. psutil
finds children by reading the status of every process of the machine, which takes milliseconds where hundreds run; Linux
lists a thread's children (proc(5), since 3.5, where the kernel is built with CONFIG_PROC_CHILDREN, as distributions'
are).

Source of the kernel's counts: Linux' cgroup-v2.rst (memory.events: oom_kill counts the cgroup's processes killed by any
OOM killer) and /proc/vmstat's oom_kill (since 4.13), which counts the whole machine and so other jobs' processes too.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


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


def held_mib(pid: int) -> float:
    """Memory of a process and all its descendants without mapped files, in MiB; those that have just ended count
    nothing."""
    if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return sum(map(_held_kib, _family(pid))) / 1024
    return _by_psutil(pid)


def _held_kib(pid: int) -> int:
    """Resident memory of one process without the pages of files; with them where the kernel does not tell them apart
    (before Linux 4.5)."""
    fields = dict(line.split(":", 1) for line in _text(f"/proc/{pid}/status").splitlines() if ":" in line)
    resident, mapped = (int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "RssFile"))
    return resident - mapped


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
            total += _held_kib(member.pid) or member.memory_info().rss >> 10
    return total / 1024
