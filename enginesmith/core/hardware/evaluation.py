"""Evaluates an engine's requirements on a machine: each is met, unmet or unknown, with the reason."""

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from enginesmith.core import requirements
from enginesmith.core.hardware.cpu_kinds import machine_flags
from enginesmith.core.hardware.machine import Machine, driver_version
from enginesmith.core.requirements import Requirement, is_within, numbers, same_version
from enginesmith.core.text import format_bytes, run_command

# Facts of an installation that the keys of torch's compile caches hold, by name; read without importing torch.
#
# Inductor names a compiled kernel by its source and by the compiler's whole command line (torch 2.13,
# `_inductor.codecache.CppCodeCache`), in which the folders of Python and torch stand; it compiles for `-march=native`;
# and the probes of vector instructions are named by the C++ compiler's version. What it finds under no name it
# compiles.

INSTRUCTIONS = "CPU instructions"
ABSENT = "absent"
# Of the flags of /proc/cpuinfo those that stand for instructions which compilers emit; the others come and go with the
# kernel and its mitigations.
_EMITTED = ("abm", "adx", "amx", "asimd", "avx", "bmi", "f16c", "fma", "gfni", "movbe", "popcnt", "sse", "ssse3", "sve")


def list_facts(cuda: bool) -> dict[str, str]:
    """The facts of this installation: name -> text, 'absent' where there is none. cuda: whether for code of a GPU."""
    readers: dict[str, Callable[[], str | None]] = {
        "Python": platform.python_version,
        "Python's headers": lambda: sysconfig.get_paths()["include"],
        "folder of torch": _find_torch,
        "C++ compiler": lambda: _describe_compiler(os.environ.get("CXX", "g++")),
        INSTRUCTIONS: lambda: " ".join(sorted(flag for flag in machine_flags() if flag.startswith(_EMITTED))),
    }
    if cuda:
        readers["driver"] = driver_version
    return {name: reader() or ABSENT for name, reader in readers.items()}


def _find_torch() -> str | None:
    module_spec = find_spec("torch")
    return str(Path(module_spec.origin).parent) if module_spec and module_spec.origin else None


@cache
def _describe_compiler(command: str) -> str | None:
    """The first line of what a compiler says of its version: 'g++ (Debian 12.2.0-14) 12.2.0'."""
    if (path := shutil.which(command)) is None:
        return None
    try:
        said = run_command([path, "--version"], 20.0, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.decode(errors="replace").partition("\n")[0].strip() or None if said.returncode == 0 else None


# Evaluates an engine's requirements on a machine: each is met, unmet or unknown, with the reason in words.
#
# An unknown fact about the machine rules no engine out, and is reported. Rules and where they are from:
#
# - A GPU runs code of its own compute capability; a cubin of capability X.y also runs on X.z where z >= y (CUDA C++
#   Programming Guide, "Binary Compatibility").
# - The driver must be as new as the CUDA that a runtime's wheels are for (CUDA release notes, "Minimum Required Driver
#   Version for CUDA Minor Version Compatibility").
# - An engine holds its weights, and they go into the GPU's memory: its size is the least that it needs.

_NOT_KNOWN = "which this enginesmith does not know; upgrade enginesmith"


@dataclass(frozen=True)
class RequirementFinding:
    """The result of one requirement on one machine. words: the reason, or a remark; '' where there is none."""

    requirement: Requirement
    state: Literal["met", "unmet", "unknown"]
    words: str = ""

    @property
    def rules_out(self) -> bool:
        """Whether the engine must not be used on that machine."""
        return self.state == "unmet" and self.requirement.strict


def evaluate(requires: Iterable[Requirement], machine: Machine) -> tuple[RequirementFinding, ...]:
    """The result of each requirement on a machine, in the same order.

    For the local machine the installed versions must have been looked up before (`Machine.with_installed`).
    """
    return tuple(judge(requirement, machine) for requirement in requires)


def judge(requirement: Requirement, machine: Machine) -> RequirementFinding:  # noqa: C901 - a case for each kind
    """The result of one requirement on a machine."""
    match requirement:
        case requirements.Gpu():
            return _judge_gpu(requirement, machine)
        case requirements.Cpu():
            return _judge_cpu(requirement, machine)
        case requirements.Instructions():
            return _judge_instructions(requirement, machine)
        case requirements.Runtime():
            return _judge_runtime(requirement, machine)
        case requirements.Driver():
            return _judge_driver(requirement, machine)
        case requirements.GpuMemory():
            return _judge_memory(requirement, machine)
        case requirements.Product():  # an unknown product is not remarked on
            return _make_finding(requirement, machine.product not in (None, requirement.product), requirement.warning)
        case requirements.Library():
            return _judge_library(requirement, machine)
        case requirements.WideSums():
            return _judge_sums(requirement, machine)
        case requirements.Weights():
            return RequirementFinding(requirement, "met")  # they come with the engine
        case requirements.Installation():
            return _judge_installation(requirement, machine)
        case requirements.Unknown():
            return RequirementFinding(requirement, "unmet", f"needs {requirement.kind[:40]!r}, {_NOT_KNOWN}")


def _judge_gpu(item: requirements.Gpu, machine: Machine) -> RequirementFinding:
    """Whether the machine's GPU is such a one."""
    here = machine.compute_capability
    rules = {
        "exact": here == item.capability,
        "family": here is not None and here[0] == item.capability[0] and here >= item.capability,
        "at_least": here is not None and here >= item.capability,
    }
    if item.match not in rules:
        return RequirementFinding(item, "unmet", f"needs a GPU by the rule {item.match[:40]!r}, {_NOT_KNOWN}")
    return _make_finding(item, not rules[item.match], f"built for {item.target}; this is {machine.name}")


def _judge_cpu(item: requirements.Cpu, machine: Machine) -> RequirementFinding:
    """Whether engines for a CPU are chosen for the machine, and its CPU is of that kind."""
    if not machine.is_cpu:
        return RequirementFinding(item, "unmet", f"built for {item.target}; this is {machine.name}")
    if item.only and machine.cpu is None:
        return RequirementFinding(item, "unknown", f"laid out for {item.only} CPUs; the kind of CPU here is unknown")
    if item.only and machine.cpu != item.only:
        return RequirementFinding(item, "unmet", f"laid out for {item.only} CPUs, and this one is {machine.cpu}")
    return RequirementFinding(item, "met")


def _judge_instructions(item: requirements.Instructions, machine: Machine) -> RequirementFinding:
    """Whether the machine's CPU has them."""
    missing = machine.lacking_instructions(item.level, item.flags)
    if missing is None:
        return RequirementFinding(item, "unknown", f"compiled for {item.level}; the kind of CPU is unknown")
    if not missing:
        return RequirementFinding(item, "met")
    here = f"this CPU has no {', '.join(missing)}" if machine.here else f"the CPU is {machine.cpu}"
    return RequirementFinding(item, "unmet", f"compiled for {item.level}, and {here}")


def _judge_sums(item: requirements.WideSums, machine: Machine) -> RequirementFinding:
    """Whether the machine's int8 kernels add in 32 bits."""
    if machine.cpu is None:
        return RequirementFinding(item, "unknown", "its int8 sums are wrong on x86-64 without VNNI; the CPU is unknown")
    words = f"its int8 sums saturate on {machine.cpu}, which has no VNNI; build it for the target {machine.cpu}"
    return _make_finding(item, machine.saturates, words)


def _judge_runtime(item: requirements.Runtime, machine: Machine) -> RequirementFinding:
    """Whether the version on the machine opens the engine."""
    here = machine.version_of(item.name, *item.packages)
    if not item.version:
        return RequirementFinding(item, "unknown", f"its {item.title or item.name} version is not on record")
    about = f"{item.remark} {item.version}" if item.remark else f"needs {item.wanted_version}"
    if here is None:
        lack = "it is not installed here" if machine.here else "the version here is unknown"
        return RequirementFinding(item, "unknown", f"{about}; {lack}")
    opens = same_version(item.version, here) or any(is_within(here, *limits) for limits in item.loads)
    differs = item.remark and here != item.version
    words = f"{about}; {here} is here" if differs else "" if opens else f"needs {item.wanted_version}, found {here}"
    return RequirementFinding(item, "met" if opens else "unmet", words)


def _judge_installation(item: requirements.Installation, machine: Machine) -> RequirementFinding:
    """Whether this installation has the same facts; the first that differs is the reason."""
    if not machine.here:
        return RequirementFinding(item, "unknown", "made for one installation of torch; the one there is unknown")
    here = list_facts(cuda=not machine.is_cpu)
    differing = [(name, text, here.get(name, ABSENT)) for name, text in item.facts if here.get(name, ABSENT) != text]
    if not differing:
        return RequirementFinding(item, "met")
    name, built, installed_version = differing[0]
    return RequirementFinding(item, "unmet", f"stale: {_describe_difference(name, built, installed_version)}")


def _describe_difference(name: str, built: str, here: str) -> str:
    """'made with Python 3.11.6, and 3.11.7 is here'; of instructions only those that differ."""
    if name != INSTRUCTIONS:
        return f"made with {name} {built}, and {here} is here"
    lacking, new = sorted({*built.split()} - {*here.split()}), sorted({*here.split()} - {*built.split()})
    words = [f"lacks {', '.join(lacking)}"] if lacking else []
    words += [f"has {', '.join(new)} beside them"] if new else []
    return f"made for a CPU with other instructions; this one {' and '.join(words)}"


def _judge_driver(item: requirements.Driver, machine: Machine) -> RequirementFinding:
    """Whether the machine's driver is as new."""
    if machine.driver:
        too_old = numbers(machine.driver) < numbers(item.version)
        return _make_finding(item, too_old, f"needs driver >= {item.version}, found {machine.driver}")
    if machine.cuda and item.cuda:
        too_old = numbers(machine.cuda) < numbers(item.cuda)
        return _make_finding(item, too_old, f"needs CUDA {item.cuda}, the driver supports {machine.cuda}")
    return RequirementFinding(item, "unknown", f"needs driver >= {item.version}; the driver here is unknown")


def _judge_memory(item: requirements.GpuMemory, machine: Machine) -> RequirementFinding:
    """Whether the GPU has as much."""
    here = machine.memory_bytes
    if here is None:
        return RequirementFinding(item, "unknown", "the GPU's memory is unknown")
    words = f"needs at least {format_bytes(item.size_bytes)}, the GPU has {format_bytes(here)}"
    return _make_finding(item, item.size_bytes > here, words)


def _judge_library(item: requirements.Library, machine: Machine) -> RequirementFinding:
    """Whether the library was built for the machine's platform and a CUDA that its driver runs."""
    if machine.platform is None:
        return RequirementFinding(item, "unknown", f"needs the library {item.name}; the platform there is unknown")
    if machine.cuda is None and not machine.is_cpu:
        return RequirementFinding(item, "unknown", f"needs the library {item.name}; the CUDA there is unknown")
    absence = item.explain_absence(machine.platform, *numbers(machine.cuda or "0")[:1])
    return _make_finding(item, bool(absence), absence)


def _make_finding(requirement: Requirement, unmet: bool, words: str) -> RequirementFinding:
    return RequirementFinding(requirement, "unmet", words) if unmet else RequirementFinding(requirement, "met")
