"""The CPU of this machine: its instruction sets, and the levels of x86-64 that compilers build for.

Levels are those of the x86-64 psABI ("Micro-Architecture Levels"): v3 is AVX2, v4 is AVX-512. Named as Linux names the
flags in /proc/cpuinfo.
"""

import platform
from pathlib import Path

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# From the highest to the lowest.
LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}


def cpu_flags() -> set[str]:
    """The instruction sets of this machine's CPU; none where that is not known."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    return set(next(lines, "").split())


def host_level() -> str | None:
    """The highest level that this CPU has; None below v3, and on other machines than x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    flags = cpu_flags()
    return next((level for level, needs in LEVELS.items() if needs <= flags), None)


def missing_flags(level: str) -> tuple[str, ...]:
    """What this CPU lacks of a level, sorted. Raises KeyError for an unknown one."""
    return tuple(sorted(LEVELS[level] - cpu_flags()))
