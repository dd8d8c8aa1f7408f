"""Evaluates an engine's requirements on a machine: each is met, unmet or unknown, with a reason."""

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

# Facts of an installation that the keys of torch's compile caches contain, by name; read without importing torch.
#
# Inductor names a compiled kernel by its source and the compiler's whole command line (torch 2.13,
# `_inductor.codecache.CppCodeCache`), which contains the folders of Python and torch. It compiles for `-march=native`,
# and names the probes of vector instructions by the C++ compiler's version. It compiles each kernel whose name is not
# cached.

INSTRUCTIONS = "CPU instructions"
ABSENT = "absent"
# The flags of /proc/cpuinfo for instructions that compilers emit. Other flags depend on the kernel and its mitigations.
_EMITTED = ("abm", "adx", "amx", "asimd", "avx", "bmi", "f16c", "fma", "gfni", "movbe", "popcnt", "sse", "ssse3", "sve")


def list_facts(cuda: bool) -> dict[str, str]:
    """The facts of this installation: name -> text, or 'absent'. cuda: whether to include those of GPU code."""
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
    """The first line of a compiler's version text: 'g++ (Debian 12.2.0-14) 12.2.0'."""
    if (path := shutil.which(command)) is None:
        return None
    try:
        process = run_command([path, "--version"], 20.0, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        process.stdout.decode(errors="replace").partition("\n")[0].strip() or None if process.returncode == 0 else None
    )


# Evaluates an engine's requirements on a machine.
#
# An unknown fact about the machine rejects no engine, and is reported. Rules and their sources:
#
# - A GPU runs code of its own compute capability; a cubin of capability X.y also runs on X.z where z >= y (CUDA C++
#   Programming Guide, "Binary Compatibility").
# - The driver must be as new as the CUDA that a runtime's wheels are for (CUDA release notes, "Minimum Required Driver
#   Version for CUDA Minor Version Compatibility").
# - An engine contains its weights, which go into the GPU's memory: the engine's size is the least memory that it needs.

_NOT_KNOWN = "which this enginesmith does not know; upgrade enginesmith"


@dataclass(frozen=True)
class RequirementFinding:
    """The result of one requirement on one machine. words: the reason, or a remark; '' if there is none."""

    requirement: Requirement
    state: Literal["met", "unmet", "unknown"]
    words: str = ""

    @property
    def rules_out(self) -> bool:
        """Whether this result rejects the engine for the machine."""
        return self.state == "unmet" and self.requirement.strict


def evaluate(requires: Iterable[Requirement], machine: Machine) -> tuple[RequirementFinding, ...]:
    """The result of each requirement on a machine, in the same order.

    For the local machine, look up the installed versions first (`Machine.with_installed`).
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
        case requirements.Product():  # no remark if the product is unknown
            return _make_finding(requirement, machine.product not in (None, requirement.product), requirement.warning)
        case requirements.Library():
            return _judge_library(requirement, machine)
        case requirements.WideSums():
            return _judge_sums(requirement, machine)
        case requirements.Weights():
            return RequirementFinding(requirement, "met")  # the weights are downloaded with the engine
        case requirements.Installation():
            return _judge_installation(requirement, machine)
        case requirements.Unknown():
            return RequirementFinding(requirement, "unmet", f"needs {requirement.kind[:40]!r}, {_NOT_KNOWN}")


def _judge_gpu(gpu: requirements.Gpu, machine: Machine) -> RequirementFinding:
    capability = machine.compute_capability
    matches = {
        "exact": capability == gpu.capability,
        "family": capability is not None and capability[0] == gpu.capability[0] and capability >= gpu.capability,
        "at_least": capability is not None and capability >= gpu.capability,
    }
    if gpu.match not in matches:
        return RequirementFinding(gpu, "unmet", f"needs a GPU by the rule {gpu.match[:40]!r}, {_NOT_KNOWN}")
    return _make_finding(gpu, not matches[gpu.match], f"built for {gpu.target}; this is {machine.name}")


def _judge_cpu(cpu: requirements.Cpu, machine: Machine) -> RequirementFinding:
    if not machine.is_cpu:
        return RequirementFinding(cpu, "unmet", f"built for {cpu.target}; this is {machine.name}")
    if cpu.only and machine.cpu is None:
        return RequirementFinding(cpu, "unknown", f"laid out for {cpu.only} CPUs; the kind of CPU here is unknown")
    if cpu.only and machine.cpu != cpu.only:
        return RequirementFinding(cpu, "unmet", f"laid out for {cpu.only} CPUs, and this one is {machine.cpu}")
    return RequirementFinding(cpu, "met")


def _judge_instructions(code: requirements.Instructions, machine: Machine) -> RequirementFinding:
    missing_flags = machine.lacking_instructions(code.level, code.flags)
    if missing_flags is None:
        return RequirementFinding(code, "unknown", f"compiled for {code.level}; the kind of CPU is unknown")
    if not missing_flags:
        return RequirementFinding(code, "met")
    cpu_text = f"this CPU has no {', '.join(missing_flags)}" if machine.here else f"the CPU is {machine.cpu}"
    return RequirementFinding(code, "unmet", f"compiled for {code.level}, and {cpu_text}")


def _judge_sums(sums: requirements.WideSums, machine: Machine) -> RequirementFinding:
    if machine.cpu is None:
        return RequirementFinding(sums, "unknown", "its int8 sums are wrong on x86-64 without VNNI; the CPU is unknown")
    reason = f"its int8 sums saturate on {machine.cpu}, which has no VNNI; build it for the target {machine.cpu}"
    return _make_finding(sums, machine.saturates, reason)


def _judge_runtime(runtime: requirements.Runtime, machine: Machine) -> RequirementFinding:
    version = machine.version_of(runtime.name, *runtime.packages)
    if not runtime.version:
        return RequirementFinding(runtime, "unknown", f"its {runtime.title or runtime.name} version is not on record")
    requirement_text = f"{runtime.remark} {runtime.version}" if runtime.remark else f"needs {runtime.wanted_version}"
    if version is None:
        absence = "it is not installed here" if machine.here else "the version here is unknown"
        return RequirementFinding(runtime, "unknown", f"{requirement_text}; {absence}")
    is_fitting = same_version(runtime.version, version) or any(is_within(version, *limits) for limits in runtime.loads)
    is_different = runtime.remark and version != runtime.version
    reason = (
        f"{requirement_text}; {version} is here"
        if is_different
        else ""
        if is_fitting
        else f"needs {runtime.wanted_version}, found {version}"
    )
    return RequirementFinding(runtime, "met" if is_fitting else "unmet", reason)


def _judge_installation(setup: requirements.Installation, machine: Machine) -> RequirementFinding:
    """Whether this installation has the same facts. The reason is the first fact that differs."""
    if not machine.here:
        return RequirementFinding(setup, "unknown", "made for one installation of torch; the one there is unknown")
    host_facts = list_facts(cuda=not machine.is_cpu)
    differences = [
        (name, text, host_facts.get(name, ABSENT)) for name, text in setup.facts if host_facts.get(name, ABSENT) != text
    ]
    if not differences:
        return RequirementFinding(setup, "met")
    name, built_value, present_value = differences[0]
    return RequirementFinding(setup, "unmet", f"stale: {_describe_difference(name, built_value, present_value)}")


def _describe_difference(name: str, built_value: str, present_value: str) -> str:
    """'made with Python 3.11.6, but this machine has 3.11.7'; for instructions, only those that differ."""
    if name != INSTRUCTIONS:
        present_text = "it is absent here" if present_value == ABSENT else f"this machine has {present_value}"
        return f"made with {name} {built_value}, but {present_text}"
    missing_flags = sorted({*built_value.split()} - {*present_value.split()})
    extra_flags = sorted({*present_value.split()} - {*built_value.split()})
    phrases = [f"lacks {', '.join(missing_flags)}"] if missing_flags else []
    phrases += [f"has {', '.join(extra_flags)} in addition"] if extra_flags else []
    return f"made for a CPU with other instructions; this one {' and '.join(phrases)}"


def _judge_driver(driver: requirements.Driver, machine: Machine) -> RequirementFinding:
    if machine.driver:
        is_too_old = numbers(machine.driver) < numbers(driver.version)
        return _make_finding(driver, is_too_old, f"needs driver >= {driver.version}, found {machine.driver}")
    if machine.cuda and driver.cuda:
        is_too_old = numbers(machine.cuda) < numbers(driver.cuda)
        return _make_finding(driver, is_too_old, f"needs CUDA {driver.cuda}, the driver supports {machine.cuda}")
    return RequirementFinding(driver, "unknown", f"needs driver >= {driver.version}; the driver here is unknown")


def _judge_memory(memory: requirements.GpuMemory, machine: Machine) -> RequirementFinding:
    size_bytes = machine.memory_bytes
    if size_bytes is None:
        return RequirementFinding(memory, "unknown", "the GPU's memory is unknown")
    reason = f"needs at least {format_bytes(memory.size_bytes)}, but the GPU has {format_bytes(size_bytes)}"
    return _make_finding(memory, memory.size_bytes > size_bytes, reason)


def _judge_library(library: requirements.Library, machine: Machine) -> RequirementFinding:
    """Whether a library was built for the machine's platform and for a CUDA version that its driver runs."""
    if machine.platform is None:
        return RequirementFinding(
            library, "unknown", f"needs the library {library.name}; the platform there is unknown"
        )
    if machine.cuda is None and not machine.is_cpu:
        return RequirementFinding(library, "unknown", f"needs the library {library.name}; the CUDA there is unknown")
    absence = library.explain_absence(machine.platform, *numbers(machine.cuda or "0")[:1])
    return _make_finding(library, bool(absence), absence)


def _make_finding(requirement: Requirement, unmet: bool, words: str) -> RequirementFinding:
    return RequirementFinding(requirement, "unmet", words) if unmet else RequirementFinding(requirement, "met")
