"""What an engine's requirements come to on a machine: met, unmet or unknown, and why in words.

What is not known of a machine rules nothing out, and is said.

Rules and where they are from:

- A GPU runs code of its own compute capability; a cubin of capability X.y also runs on X.z where z >= y (CUDA C++
  Programming Guide, "Binary Compatibility").
- The driver must be as new as the CUDA that a runtime's wheels are for (CUDA release notes, "Minimum Required Driver
  Version for CUDA Minor Version Compatibility"), and as the nvcc that compiled an engine's kernels.
- An engine holds its weights, and they go into the GPU's memory: its size is the least that it needs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import singledispatch
from typing import Literal

from enginery.core.hardware.machine import Machine
from enginery.core.requirements import (
    Cpu,
    Driver,
    Gpu,
    Instructions,
    Library,
    Memory,
    Product,
    Requirement,
    Runtime,
    SessionOption,
    Unknown,
    Weights,
)
from enginery.core.text import format_bytes
from enginery.core.version_numbers import is_within, numbers, same_version

_NOT_KNOWN = "which this enginery does not know; upgrade enginery"


@dataclass(frozen=True)
class Finding:
    """What one requirement comes to on one machine. words: why, where it is not plainly met."""

    requirement: Requirement
    state: Literal["met", "unmet", "unknown"]
    words: str = ""

    @property
    def rules_out(self) -> bool:
        """Whether the engine must not be used on that machine."""
        return self.state == "unmet" and self.requirement.strict


def evaluate(requires: Iterable[Requirement], machine: Machine) -> tuple[Finding, ...]:
    """What each requirement comes to on a machine, in their order.

    On this very machine the installed versions must have been looked up (`Machine.looking_up`).
    """
    return tuple(judge(requirement, machine) for requirement in requires)


@singledispatch
def judge(requirement: Requirement, machine: Machine) -> Finding:
    """What one requirement comes to on a machine."""
    raise TypeError(f"{type(requirement).__name__} of {machine.name} is no requirement")


@judge.register
def _judge_gpu(item: Gpu, machine: Machine) -> Finding:
    """Whether the machine's GPU is such a one."""
    here = machine.compute_capability
    rules = {
        "exact": here == item.capability,
        "family": here is not None and here[0] == item.capability[0] and here >= item.capability,
        "at_least": here is not None and here >= item.capability,
    }
    if item.match not in rules:
        return Finding(item, "unmet", f"needs a GPU by the rule {item.match[:40]!r}, {_NOT_KNOWN}")
    return _decided(item, not rules[item.match], f"built for {item.target}; this is {machine.name}")


@judge.register
def _judge_cpu(item: Cpu, machine: Machine) -> Finding:
    """Whether engines for a CPU are chosen for the machine, and its CPU is of that kind."""
    if not machine.is_cpu:
        return Finding(item, "unmet", f"built for {item.target}; this is {machine.name}")
    if item.only and machine.cpu is None:
        return Finding(item, "unknown", f"laid out for {item.only} CPUs; the kind of CPU here is unknown")
    if item.only and machine.cpu != item.only:
        return Finding(item, "unmet", f"laid out for {item.only} CPUs, and this one is {machine.cpu}")
    return Finding(item, "met")


@judge.register
def _judge_instructions(item: Instructions, machine: Machine) -> Finding:
    """Whether the machine's CPU has them."""
    missing = machine.lacking_instructions(item.level, item.flags)
    if missing is None:
        return Finding(item, "unknown", f"compiled for {item.level}; the kind of CPU is unknown")
    if not missing:
        return Finding(item, "met")
    here = f"this CPU has no {', '.join(missing)}" if machine.here else f"the CPU is {machine.cpu}"
    return Finding(item, "unmet", f"compiled for {item.level}, and {here}")


@judge.register
def _judge_runtime(item: Runtime, machine: Machine) -> Finding:
    """Whether the version on the machine opens the engine."""
    here = machine.version_of(item.name, *item.packages)
    if not item.version:
        return Finding(item, "unknown", f"its {item.title or item.name} version is not on record")
    if here is None:
        about = "it is not installed here" if machine.here else "the version here is unknown"
        return Finding(item, "unknown", _about(item, about))
    opens = same_version(item.version, here) or any(is_within(here, *limits) for limits in item.loads)
    differs = item.remark and here != item.version
    words = _about(item, f"{here} is here") if differs else "" if opens else f"needs {item.wanted}, found {here}"
    return Finding(item, "met" if opens else "unmet", words)


@judge.register
def _judge_driver(item: Driver, machine: Machine) -> Finding:
    """Whether the machine's driver is as new."""
    if machine.driver:
        too_old = numbers(machine.driver) < numbers(item.version)
        return _decided(item, too_old, f"needs driver >= {item.version}, found {machine.driver}")
    if machine.cuda and item.cuda:
        too_old = numbers(machine.cuda) < numbers(item.cuda)
        return _decided(item, too_old, f"needs CUDA {item.cuda}, the driver supports {machine.cuda}")
    return Finding(item, "unknown", f"needs driver >= {item.version}; the driver here is unknown")


@judge.register
def _judge_memory(item: Memory, machine: Machine) -> Finding:
    """Whether the GPU has as much."""
    here = machine.memory_bytes
    if here is None:
        return Finding(item, "unknown", "the GPU's memory is unknown")
    words = f"needs at least {format_bytes(item.size_bytes)}, the GPU has {format_bytes(here)}"
    return _decided(item, item.size_bytes > here, words)


@judge.register
def _judge_product(item: Product, machine: Machine) -> Finding:
    """Whether the GPU is of that product; an unknown product is not remarked on."""
    return _decided(item, machine.product not in (None, item.product), item.warning)


@judge.register
def _judge_library(item: Library, machine: Machine) -> Finding:
    """Whether that file is on the machine; known of this machine alone."""
    here = machine.libraries.get(item.path)
    if here is None:
        return Finding(item, "unknown", f"needs the library {item.path}; whether it is there is unknown")
    what = "is another one here" if here else "is not on this machine"
    words = f"needs the library {item.path}, which {what}; put the file there that it was built with"
    return _decided(item, here != item.sha256, words)


@judge.register
def _judge_session_option(item: SessionOption, machine: Machine) -> Finding:
    """Whether the machine's CPU does without; an unknown CPU is not remarked on."""
    words = f"{machine.cpu} has no VNNI: open it with {item.name} = {item.value}, or its sums saturate"
    return _decided(item, machine.saturates, words)


@judge.register
def _judge_weights(item: Weights, machine: Machine) -> Finding:  # noqa: ARG001 - every machine can hold them
    """Met: it comes with the engine."""
    return Finding(item, "met")


@judge.register
def _judge_unknown(item: Unknown, machine: Machine) -> Finding:  # noqa: ARG001 - nobody can tell
    """Unmet: what is not understood cannot be checked."""
    return Finding(item, "unmet", f"needs {item.kind[:40]!r}, {_NOT_KNOWN}")


def _about(item: Runtime, here: str) -> str:
    begin = f"{item.remark} {item.version}" if item.remark else f"needs {item.wanted}"
    return f"{begin}; {here}"


def _decided(requirement: Requirement, unmet: bool, words: str) -> Finding:
    return Finding(requirement, "unmet", words) if unmet else Finding(requirement, "met")
