"""What an engine needs of the machine that runs it, as data: written into the manifest when it is built.

A backend lists requirements (`Backend.requires`); everybody else evaluates or renders them and knows no compiler.
A requirement that a machine is known not to meet rules the engine out there if it is strict; otherwise it is a remark.
What is not known of a machine rules nothing out, and is said. Standard library only: a serving node imports it.

Rules and where they are from:

- A GPU runs code of its own compute capability; a cubin of capability X.y also runs on X.z where z >= y (CUDA C++
  Programming Guide, "Binary Compatibility").
- The driver must be as new as the CUDA that a runtime's wheels are for (CUDA release notes, "Minimum Required Driver
  Version for CUDA Minor Version Compatibility"), and as the nvcc that compiled an engine's kernels.
- An engine holds its weights, and they go into the GPU's memory: its size is the least that it needs.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from builders.text import format_bytes

if TYPE_CHECKING:
    from builders.machine import Machine
    from builders.types import Target

Capability = tuple[int, int]
State = Literal["met", "unmet", "unknown"]

_DRIVER_OF_CUDA = {12: "525", 13: "580"}
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Finding:
    """What one requirement comes to on one machine. words: why, where it is not plainly met."""

    requirement: "Requirement"
    state: State
    words: str = ""

    @property
    def rules_out(self) -> bool:
        """Whether the engine must not be used on that machine."""
        return self.state == "unmet" and self.requirement.strict


@dataclass(frozen=True)
class Gpu:
    """A GPU of a compute capability. target: the name of what the engine was built for ('l4').

    match: 'exact', 'family' (the same major number, and at least the minor one) or 'at_least'.
    """

    target: str
    capability: Capability
    match: str = "exact"
    kind: Literal["gpu"] = "gpu"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:
        """Whether the machine's GPU is such a one."""
        here = machine.compute_capability
        if self.match not in ("exact", "family", "at_least"):
            return Finding(
                self,
                "unmet",
                f"needs a GPU by the rule {self.match[:40]!r}, which this enginery does not know; upgrade enginery",
            )
        fits = (
            here is not None
            and {
                "exact": here == self.capability,
                "family": here[0] == self.capability[0] and here >= self.capability,
                "at_least": here >= self.capability,
            }[self.match]
        )
        return Finding(self, "met") if fits else _elsewhere(self, self.target, machine)


@dataclass(frozen=True)
class Cpu:
    """A machine that runs models on its CPU. target: the name of what the engine was built for ('cpu').

    only: the one kind of CPU (`builders.cpu_kinds`) that it is laid out for; '' is any.
    """

    target: str
    only: str = ""
    kind: Literal["cpu"] = "cpu"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:
        """Whether engines for a CPU are chosen for the machine, and its CPU is of that kind."""
        if not machine.is_cpu:
            return _elsewhere(self, self.target, machine)
        if self.only and machine.cpu is None:
            return Finding(self, "unknown", f"laid out for {self.only} CPUs; the kind of CPU here is unknown")
        if self.only and machine.cpu != self.only:
            return Finding(self, "unmet", f"laid out for {self.only} CPUs, and this one is {machine.cpu}")
        return Finding(self, "met")


@dataclass(frozen=True)
class Instructions:
    """Instructions that native code of the engine has. level: of x86-64, or an architecture.  flags: beyond it, as
    /proc/cpuinfo spells them."""

    level: str
    flags: tuple[str, ...] = ()
    kind: Literal["instructions"] = "instructions"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:
        """Whether the machine's CPU has them."""
        missing = machine.lacking_instructions(self.level, self.flags)
        if missing is None:
            return Finding(self, "unknown", f"compiled for {self.level}; the kind of CPU is unknown")
        if not missing:
            return Finding(self, "met")
        here = f"this CPU has no {', '.join(missing)}" if machine.here else f"the CPU is {machine.cpu}"
        return Finding(self, "unmet", f"compiled for {self.level}, and {here}")


@dataclass(frozen=True)
class Runtime:
    """A library that opens the engine, in versions that can.

    name: of the installed distribution, as in `Machine.runtimes`.  packages: others that tell the same version.
    version: that made the engine; '' is not on record.  loads: ranges (first, below) of other versions that open it; a
    below of '' is open.  title: what it is called for people.
    remark: begins what is said of a version other than `version`: 'saved by onnxruntime'.  strict: whether a version
    that is in no range rules the engine out; if not, it is remarked on alone.
    """

    name: str
    version: str
    title: str = ""
    loads: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    strict: bool = True
    remark: str = ""
    kind: Literal["runtime"] = "runtime"

    @property
    def wanted(self) -> str:
        """For people: 'TensorRT 10.16.1', 'jaxlib 0.6 or later'."""
        return f"{self.title or self.name} {self.version}{' or later' if self.loads else ''}"

    def judge(self, machine: "Machine") -> Finding:
        """Whether the version on the machine opens the engine."""
        here = machine.version_of(self.name, *self.packages)
        if not self.version:
            return Finding(self, "unknown", f"its {self.title or self.name} version is not on record")
        if here is None:
            about = "it is not installed here" if machine.here else "the version here is unknown"
            return Finding(self, "unknown", self._about(about))
        opens = same_version(self.version, here) or any(_within(here, *limits) for limits in self.loads)
        differs = self.remark and here != self.version
        words = self._about(f"{here} is here") if differs else "" if opens else f"needs {self.wanted}, found {here}"
        return Finding(self, "met" if opens else "unmet", words)

    def _about(self, here: str) -> str:
        begin = f"{self.remark} {self.version}" if self.remark else f"needs {self.wanted}"
        return f"{begin}; {here}"


@dataclass(frozen=True)
class Driver:
    """A driver of the GPU, at least of that version. cuda: the CUDA version that stands in for an unknown driver."""

    version: str
    cuda: str = ""
    kind: Literal["driver"] = "driver"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:
        """Whether the machine's driver is as new."""
        if machine.driver:
            too_old = numbers(machine.driver) < numbers(self.version)
            return _decided(self, too_old, f"needs driver >= {self.version}, found {machine.driver}")
        if machine.cuda and self.cuda:
            too_old = numbers(machine.cuda) < numbers(self.cuda)
            return _decided(self, too_old, f"needs CUDA {self.cuda}, the driver supports {machine.cuda}")
        return Finding(self, "unknown", f"needs driver >= {self.version}; the driver here is unknown")


@dataclass(frozen=True)
class Memory:
    """Memory of the GPU, in bytes."""

    size_bytes: int
    kind: Literal["memory"] = "memory"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:
        """Whether the GPU has as much."""
        here = machine.memory_bytes
        if here is None:
            return Finding(self, "unknown", "the GPU's memory is unknown")
        words = f"needs at least {format_bytes(self.size_bytes)}, the GPU has {format_bytes(here)}"
        return _decided(self, self.size_bytes > here, words)


@dataclass(frozen=True)
class Product:
    """The product that the engine was tuned for ('l4'). warning: what is said of another one."""

    product: str
    warning: str
    kind: Literal["product"] = "product"
    strict: ClassVar[bool] = False

    def judge(self, machine: "Machine") -> Finding:
        """Whether the GPU is of that product; an unknown product is not remarked on."""
        return _decided(self, machine.product not in (None, self.product), self.warning)


@dataclass(frozen=True)
class Library:
    """A shared library with operators of the engine: the very file. sha256: its digest."""

    path: str
    sha256: str
    kind: Literal["library"] = "library"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:
        """Whether that file is on the machine; known of this machine alone."""
        here = machine.libraries.get(self.path)
        if here is None:
            return Finding(self, "unknown", f"needs the library {self.path}; whether it is there is unknown")
        what = "is another one here" if here else "is not on this machine"
        words = f"needs the library {self.path}, which {what}; put the file there that it was built with"
        return _decided(self, here != self.sha256, words)


@dataclass(frozen=True)
class SessionOption:
    """A setting that the engine must be opened with where int8 kernels add in 16 bits (`CpuKind.saturates`)."""

    name: str
    value: str
    kind: Literal["session_option"] = "session_option"
    strict: ClassVar[bool] = False

    def judge(self, machine: "Machine") -> Finding:
        """Whether the machine's CPU does without; an unknown CPU is not remarked on."""
        words = f"{machine.cpu} has no VNNI: open it with {self.name} = {self.value}, or its sums saturate"
        return _decided(self, machine.saturates, words)


@dataclass(frozen=True)
class Weights:
    """The ONNX model beside the engine, which leaves its weights out. model: its digest. Whoever pulls brings it."""

    model: str
    kind: Literal["weights"] = "weights"
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:  # noqa: ARG002 - every machine can hold it
        """Met: it comes with the engine."""
        return Finding(self, "met")


@dataclass(frozen=True)
class Unknown:
    """A requirement that a newer writer has. kind: its name.  text: as it was written, as canonical JSON."""

    kind: str
    text: str
    strict: ClassVar[bool] = True

    def judge(self, machine: "Machine") -> Finding:  # noqa: ARG002 - nobody can tell
        """Unmet: what is not understood cannot be checked."""
        return Finding(self, "unmet", f"needs {self.kind[:40]!r}, which this enginery does not know; upgrade enginery")


# What a backend may ask for.
Known = Gpu | Cpu | Instructions | Runtime | Driver | Memory | Product | Library | SessionOption | Weights
Requirement = Known | Unknown
KINDS: dict[str, type[Known]] = {each.kind: each for each in get_args(Known)}


def evaluate(requires: Iterable[Requirement], machine: "Machine") -> tuple[Finding, ...]:
    """What each requirement comes to on a machine, in their order.

    On this very machine the installed versions must have been looked up (`Machine.looking_up`).
    """
    return tuple(requirement.judge(machine) for requirement in requires)


def hardware_of(requires: Iterable[Requirement]) -> "Gpu | Cpu | None":
    """The processor that runs the engine; None for one that runs anywhere."""
    return next((item for item in requires if isinstance(item, Gpu | Cpu)), None)


def to_json(requirement: Requirement) -> dict[str, Any]:
    """A requirement as a JSON object that names its kind; an unknown one as it was read."""
    if isinstance(requirement, Unknown):
        return dict(json.loads(requirement.text))
    return asdict(requirement)


def for_target(target: "Target", *, only: str = "") -> "Gpu | Cpu":
    """The usual requirement: a GPU of the target's compute capability, or a CPU (only: of that kind)."""
    if target.compute_capability is None:
        return Cpu(target.name, only)
    return Gpu(target.name, target.compute_capability)


def same_versions(toolchain: Mapping[str, str], *names: str) -> tuple[Runtime, ...]:
    """The usual requirement of runtimes: the versions of these distributions that built the engine."""
    return tuple(Runtime(name, toolchain[name]) for name in names if name in toolchain)


def later_versions(
    toolchain: Mapping[str, str], name: str, *, strict: bool = True, remark: str = ""
) -> tuple[Runtime, ...]:
    """A runtime whose later releases open what an earlier one wrote; none where its version is not on record."""
    built = toolchain.get(name)
    return (Runtime(name, built, loads=((built, ""),), strict=strict, remark=remark),) if built else ()


def driver_for(toolchain: Mapping[str, str]) -> tuple[Driver, ...]:
    """The oldest driver for a GPU engine: the one on record, else that of the oldest CUDA of its wheels and nvcc."""
    wheels = (number for number in _DRIVER_OF_CUDA for name in toolchain if f"-cu{number}" in name)
    cuda = min((*wheels, *numbers(toolchain.get("nvcc", ""))[:1]), default=0)
    driver = toolchain.get("driver") or _DRIVER_OF_CUDA.get(cuda)
    return (Driver(driver, str(cuda or "")),) if driver else ()


def numbers(version: str) -> tuple[int, ...]:
    """'10.16.1' as (10, 16, 1); what is no number of at most 18 digits ends it."""
    plain = takewhile(lambda part: part.isdecimal() and len(part) <= _MOST_DIGITS, version.split("."))
    return tuple(map(int, plain))


def same_version(built: str, here: str) -> bool:
    """Whether two versions are equal as far as both are given; what is not all numbers is compared as it stands."""
    plain = all(part.isdecimal() for part in f"{built}.{here}".split("."))
    return built == here or (plain and all(a == b for a, b in zip(numbers(built), numbers(here), strict=False)))


def _within(here: str, first: str, below: str) -> bool:
    """Whether a version is in [first, below), each compared as far as both are given."""
    (low, above), (under, high) = _cut(first, here), _cut(here, below)
    return low <= above and (not below or under < high)


def _cut(one: str, other: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two versions' numbers, as many as both have."""
    found = numbers(one), numbers(other)
    count = min(map(len, found))
    return found[0][:count], found[1][:count]


def _decided(requirement: Requirement, unmet: bool, words: str) -> Finding:
    return Finding(requirement, "unmet", words) if unmet else Finding(requirement, "met")


def _elsewhere(requirement: Requirement, target: str, machine: "Machine") -> Finding:
    return Finding(requirement, "unmet", f"built for {target}; this is {machine.name}")
