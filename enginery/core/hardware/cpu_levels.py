"""The microarchitecture levels of x86-64: which CPU flags ahead-of-time compiled code requires.

The levels and their flags are the x86-64 psABI's ("Micro-Architecture Levels"); LLVM and GCC use the same names. Code
compiled for a level runs on every CPU that has the level's flags, so missing flags are found before the code is loaded.
"""

import platform
from functools import cache
from pathlib import Path

from enginery.core.types import BuildRequest

# Level -> the flags it adds to the one before, as /proc/cpuinfo spells them (pni is SSE3, abm is LZCNT).
_ADDED: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"]),
    "x86-64-v3": frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"]),
    "x86-64-v4": frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
}
LEVELS: tuple[str, ...] = tuple(_ADDED)
HOST = "host"


def find_missing_flags(level: str) -> tuple[str, ...]:
    """The CPU flags that code for `level` requires and this CPU does not have, sorted; empty if it has all.

    level: one of LEVELS, or the name of another architecture. If the architecture differs, its name is the result.
    """
    machine = platform.machine()
    if level not in _ADDED:
        return () if level == machine else (level,)
    if machine != "x86_64":
        return ("x86_64",)
    return tuple(sorted(flags_of_level(level) - machine_flags()))


def flags_of_level(level: str) -> frozenset[str]:
    """All CPU flags that one of LEVELS requires, including those of the lower levels."""
    return frozenset().union(*(_ADDED[name] for name in LEVELS[: LEVELS.index(level) + 1]))


def host_level() -> str:
    """The highest level that this CPU supports; on another architecture than x86-64 its name, such as 'aarch64'."""
    return next((level for level in reversed(LEVELS) if not find_missing_flags(level)), platform.machine())


def cpu_name() -> str:
    """The CPU's model name from /proc/cpuinfo, such as 'AMD EPYC'; its architecture where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def machine_flags() -> frozenset[str]:
    """This CPU's flags from /proc/cpuinfo ("flags" on x86, "Features" on Arm); empty without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])


def level_of(request: BuildRequest) -> str:
    """The level that a request's option `cpu` names; for 'host', the level of the machine that planned the request."""
    level = str(dict(request.options).get("cpu", HOST))
    return dict(request.toolchain).get("cpu", host_level()) if level == HOST else level
