"""What code that was compiled ahead of time needs of the CPU that runs it: the microarchitecture levels of x86-64.

The levels and their flags are the x86-64 psABI's ("Micro-Architecture Levels"); LLVM and GCC know them by these names.
A level says more than a model's name: code compiled for x86-64-v3 runs on every CPU that has its flags, whoever made
it, and what is missing on this one can be said before the first illegal instruction.
"""

import platform
from functools import cache
from pathlib import Path

from enginery.core.errors import EngineryError
from enginery.core.types import BuildRequest, Engine

# Level -> the flags it adds to the one before, as /proc/cpuinfo spells them (pni is SSE3, abm is LZCNT).
_ADDED: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"]),
    "x86-64-v3": frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"]),
    "x86-64-v4": frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
}
LEVELS: tuple[str, ...] = tuple(_ADDED)
HOST = "host"


def lacking(level: str) -> tuple[str, ...]:
    """Flags that code for `level` needs and this CPU lacks, sorted; its architecture where that is another.

    level: one of LEVELS, or another architecture's name, which needs just that.
    """
    machine = platform.machine()
    if level not in _ADDED:
        return () if level == machine else (level,)
    if machine != "x86_64":
        return ("x86_64",)
    return tuple(sorted(flags_of_level(level) - machine_flags()))


def flags_of_level(level: str) -> frozenset[str]:
    """Every flag that one of LEVELS needs."""
    return frozenset().union(*(_ADDED[name] for name in LEVELS[: LEVELS.index(level) + 1]))


def host_level() -> str:
    """The highest level that this CPU has; on another architecture its name, such as 'aarch64'."""
    return next((level for level in reversed(LEVELS) if not lacking(level)), platform.machine())


def cpu_name() -> str:
    """What the CPU calls itself, such as 'AMD EPYC'; its architecture where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def machine_flags() -> frozenset[str]:
    """The flags of this CPU as /proc/cpuinfo names them ("flags" on x86, "Features" on Arm); none where it is not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])


def level_of(request: BuildRequest) -> str:
    """The level that a request with an option `cpu` names; of 'host', the one of the machine that planned it."""
    level = str(dict(request.options).get("cpu", HOST))
    return dict(request.toolchain).get("cpu", host_level()) if level == HOST else level


def check_cpu(engine: Engine) -> None:
    """Raise EngineryError when this CPU lacks what the engine's code was compiled for."""
    level = level_of(engine.request)
    if missing := lacking(level):
        raise EngineryError(
            f"{engine.path.name} is compiled for {level}, and this CPU has no {', '.join(missing)}; run it on another, "
            f"or build it with backends.{engine.request.backend}.cpu = {host_level()!r}"
        )
