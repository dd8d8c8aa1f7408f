"""Whether the kernel killed for want of memory: its own count, before and after.

Source: Linux' cgroup-v2.rst (memory.events: oom_kill counts the cgroup's processes killed by any OOM killer) and
/proc/vmstat's oom_kill (since 4.13), which counts the whole machine, so that a neighbour's end may look like ours.
"""

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
