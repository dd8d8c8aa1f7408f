"""Kinds of CPU and the levels of x86-64.

Levels of x86-64 and their CPU flags are the psABI's ("Micro-Architecture Levels"); LLVM and GCC use the same names.
Code compiled for a level runs on every CPU that has the level's flags, named as in /proc/cpuinfo.

Each kind of CPU is its own target, because the same engine gives different numbers at a different speed on each. Kinds
differ in the arithmetic of integer kernels. On x86-64 without a dot-product instruction (VNNI), ONNX Runtime multiplies
uint8 by int8 with VPMADDUBSW, which adds pairs of products in 16 bits and saturates (Intel SDM, "PMADDUBSW";
onnxruntime's documentation, "Quantize ONNX Models", "When and why do I need to try U8U8?"). VNNI (VPDPBUSD), AMX
(TDPBUSD) and Arm's kernels add in 32 bits.
"""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from enginesmith.core.types import CPU_KIND, BuildRequest, Target

# Level -> the flags that it adds to the level below, named as in /proc/cpuinfo (pni is SSE3, abm is LZCNT).
_ADDED: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"]),
    "x86-64-v3": frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"]),
    "x86-64-v4": frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
}

LEVELS: tuple[str, ...] = tuple(_ADDED)

HOST = "host"


def find_missing_flags(level: str) -> tuple[str, ...]:
    """The CPU flags that code for `level` requires and this CPU lacks, sorted; empty if it has all.

    level: one of LEVELS, or another architecture. On a machine of another one, the result is that architecture.
    """
    architecture = platform.machine()
    if level not in _ADDED:
        return () if level == architecture else (level,)
    if architecture != "x86_64":
        return ("x86_64",)
    return tuple(sorted(flags_of_level(level) - machine_flags()))


def flags_of_level(level: str) -> frozenset[str]:
    """All CPU flags that one of LEVELS requires, with those of the lower levels; empty for another architecture."""
    count = LEVELS.index(level) + 1 if level in LEVELS else 0
    return frozenset().union(*(_ADDED[name] for name in LEVELS[:count]))


def host_level() -> str:
    """The highest x86-64 level that this CPU supports; the name of any other architecture, such as 'aarch64'."""
    return next((level for level in reversed(LEVELS) if not find_missing_flags(level)), platform.machine())


def cpu_name() -> str:
    """The CPU's model name from /proc/cpuinfo, such as 'AMD EPYC'; the architecture if the file has none."""
    if (lines := _read_cpuinfo()) is None:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def machine_flags() -> frozenset[str]:
    """This CPU's flags from /proc/cpuinfo ("flags" on x86, "Features" on Arm); empty if the file is missing."""
    lines = _read_cpuinfo() or []
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])


def _read_cpuinfo() -> list[str] | None:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None


def level_of(request: BuildRequest) -> str:
    """The level in a request's option `cpu`; for 'host', the level of the machine that planned the request."""
    level = str(dict(request.options).get("cpu", HOST))
    return dict(request.toolchain).get("cpu", host_level()) if level == HOST else level


@dataclass(frozen=True)
class CpuKind:
    """A kind of CPU that engines are built for and proven on.

    level: the x86-64 level, or the architecture, that its code is compiled for.  flags: CPU flags beyond that level.
    saturates: whether ONNX Runtime's uint8 x int8 kernels add in 16 bits on it.
    aliases: other names that a spec may use.
    """

    name: str
    level: str
    flags: frozenset[str] = frozenset()
    saturates: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def machine(self) -> str:
        """The architecture, as `platform.machine()` names it on Linux."""
        return "x86_64" if self.level in LEVELS else self.level

    @property
    def all_flags(self) -> frozenset[str]:
        """The CPU flags of this kind, including those of its level."""
        return self.flags | flags_of_level(self.level)

    def has_level(self, level: str) -> bool:
        """Whether this kind runs code that was compiled for an x86-64 level or for another architecture."""
        if level not in LEVELS or self.level not in LEVELS:
            return level == self.level
        return flags_of_level(level) <= flags_of_level(self.level)


# From the general to the specific: a CPU belongs to the last kind whose flags it has.
KINDS: tuple[CpuKind, ...] = (
    CpuKind("x86-64", "x86-64", saturates=True),
    CpuKind("x86-64-v3", "x86-64-v3", saturates=True, aliases=("avx2",)),
    CpuKind("x86-64-v3-vnni", "x86-64-v3", frozenset(["avx_vnni"]), aliases=("avx-vnni",)),
    CpuKind("x86-64-v4", "x86-64-v4", saturates=True, aliases=("avx512",)),
    CpuKind("x86-64-v4-vnni", "x86-64-v4", frozenset(["avx512_vnni"]), aliases=("avx512-vnni",)),
    CpuKind("x86-64-v4-amx", "x86-64-v4", frozenset(["avx512_vnni", "amx_tile", "amx_int8"]), aliases=("amx",)),
    CpuKind("arm64", "aarch64", aliases=("aarch64",)),
    CpuKind("arm64-dotprod", "aarch64", frozenset(["asimddp"])),
    CpuKind("arm64-i8mm", "aarch64", frozenset(["asimddp", "i8mm"])),
)


_BY_NAME = {name: kind for kind in KINDS for name in (kind.name, *kind.aliases)}


def kind_named(name: str) -> CpuKind | None:
    """The kind of CPU with this name or alias; None if there is none."""
    return _BY_NAME.get(name)


def this_kind() -> CpuKind:
    """The kind of this machine's CPU; a kind named after the architecture if none of `KINDS` matches."""
    architecture, flags = _architecture(), machine_flags()
    fitting_kinds = [kind for kind in KINDS if architecture == kind.machine and kind.all_flags <= flags]
    return fitting_kinds[-1] if fitting_kinds else CpuKind(architecture, architecture)


def _architecture() -> str:
    """This machine's architecture, named as on Linux."""
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def kind_of(target: Target) -> str:
    """The name of a CPU target's kind; the target `cpu` means this machine's kind."""
    return this_kind().name if target.name == CPU.name else target.name


def kind_built_for(request: BuildRequest) -> CpuKind | None:
    """The kind of CPU that an engine is built for; None for a GPU, or a CPU of none of `KINDS`."""
    name = dict(request.toolchain).get(CPU_KIND) or kind_of(request.target)
    return kind_named(name) if request.target.is_cpu else None


def refusal(request: BuildRequest, title: str) -> str | None:
    """The reason why a compiler cannot compile a request's kind of CPU on this machine; None if it can."""
    kind, level = kind_named(request.target.name), level_of(request)
    if kind is None:
        return None
    if kind.machine != (architecture := _architecture()):
        return (
            f"{title} compiles for {architecture} CPUs on this machine, not for {kind.name}; use onnxruntime, "
            "or build on such a CPU"
        )
    if not kind.has_level(level):
        return f"its option cpu is {level!r}, beyond {kind.name}; set backends.{request.backend}.cpu lower"
    return None


def why_no_proof(request: BuildRequest) -> str | None:
    """The reason why a run on this machine cannot prove a CPU engine; None if it can, and for GPU engines."""
    required_kind, machine_kind = dict(request.toolchain).get(CPU_KIND) or kind_of(request.target), this_kind().name
    if not request.target.is_cpu or required_kind == machine_kind:
        return None
    return (
        f"it needs a run on {required_kind}; the CPU on this machine is {machine_kind}, and has other "
        "kernels: `enginesmith validate` there proves it"
    )


CPU = Target("cpu")
