"""Kinds of CPU: targets of their own, since one engine gives other numbers, at other speed, on each of them.

What divides them is the arithmetic that integer kernels use. On x86-64 without a dot-product instruction (VNNI), ONNX
Runtime multiplies uint8 by int8 with VPMADDUBSW, which adds pairs of products in 16 bits and saturates (Intel SDM,
"PMADDUBSW"; onnxruntime's documentation, "Quantize ONNX Models", "When and why do I need to try U8U8?"). VNNI
(VPDPBUSD) and AMX (TDPBUSD) add in 32 bits. Arm's kernels do, too, with and without its dot products and i8mm.

Levels of x86-64 are the psABI's (`cpu_levels`); the flags are those of /proc/cpuinfo. Standard library only.
"""

import platform
from dataclasses import dataclass

from enginery.core.hardware import cpu_levels
from enginery.core.hardware.cpu_levels import LEVELS, flags_of_level, level_of
from enginery.core.types import CPU_KIND, BuildRequest, Target

THIS_MACHINE = "cpu"
# The entry of an ONNX Runtime session that makes int8 exact where its kernels saturate, by uint8 weights
# (onnxruntime_session_options_config_keys.h). It does so wherever it is set, and with VNNI it only costs speed.
EXACT_SESSION = ("session.x64quantprecision", "1")
# The note of an engine whose file holds int8 weights that saturate there (`builders.backends.onnxruntime.saturation`).
SATURATES = f"its int8 weights saturate on x86-64 without VNNI: open it there with {' = '.join(EXACT_SESSION)}"


@dataclass(frozen=True)
class CpuKind:
    """A kind of CPU that engines are built for and proven on.

    level: of x86-64, or the architecture, that code for it is compiled for.  flags: it has them beyond that level.
    saturates: whether ONNX Runtime's uint8 x int8 kernels add in 16 bits there.
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

    def has_level(self, level: str) -> bool:
        """Whether it runs code that is compiled for a level of x86-64, or for another architecture."""
        if level not in LEVELS or self.level not in LEVELS:
            return level == self.level
        return flags_of_level(level) <= flags_of_level(self.level)

    def is_in(self, machine: str, flags: frozenset[str]) -> bool:
        """Whether a CPU of this architecture, with these flags, runs what is built for this kind."""
        needed = self.flags | (flags_of_level(self.level) if self.level in LEVELS else frozenset())
        return machine == self.machine and needed <= flags


# From the plain to the special: a CPU is of the last kind whose flags it has.
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
_MACHINES = {"arm64": "aarch64", "AMD64": "x86_64"}


def kind_named(name: str) -> CpuKind | None:
    """The kind of that name or alias; None for a name of none."""
    return _BY_NAME.get(name)


def this_kind() -> CpuKind:
    """The kind of this machine's CPU; one of its architecture alone where it is none of `KINDS`."""
    machine = _MACHINES.get(platform.machine(), platform.machine())
    found = [kind for kind in KINDS if kind.is_in(machine, cpu_levels.machine_flags())]
    return found[-1] if found else CpuKind(machine, machine)


def kind_of(target: Target) -> str:
    """The name of the kind of CPU that a CPU target stands for: `cpu` is this machine's."""
    return this_kind().name if target.name == THIS_MACHINE else target.name


def refusal(request: BuildRequest, title: str) -> str | None:
    """Why a compiler (title: its name) makes no code on this machine for the kind of CPU that a request names."""
    kind, level = kind_named(request.target.name), level_of(request)
    if kind is None:
        return None
    if kind.machine != (here := _MACHINES.get(platform.machine(), platform.machine())):
        return f"{title} compiles for {here} CPUs on this machine, not for {kind.name}; use onnxruntime, or build there"
    if not kind.has_level(level):
        return f"its option cpu is {level!r}, beyond {kind.name}; set backends.{request.backend}.cpu lower"
    return None


def why_no_proof(request: BuildRequest) -> str | None:
    """Why a run on this machine proves nothing for a CPU engine; None when it does. Of GPUs nothing is asked here."""
    wanted, here = dict(request.toolchain).get(CPU_KIND) or kind_of(request.target), this_kind().name
    if not request.target.is_cpu or wanted == here:
        return None
    return f"it needs a run on {wanted}; this CPU is {here}, and has other kernels: `enginery validate` there proves it"
