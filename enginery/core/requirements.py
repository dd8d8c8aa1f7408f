"""What an engine needs of the machine that runs it, as data: written into the manifest when it is built.

A backend lists requirements (`Backend.requires`); everybody else evaluates (`hardware.evaluation`) or renders them and
knows no compiler. A strict one that a machine is known not to meet rules the engine out there; any other is a remark.
Standard library only: a serving node imports it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, Protocol, get_args

from enginery.core.version_numbers import numbers

Capability = tuple[int, int]

_DRIVER_OF_CUDA = {12: "525", 13: "580"}


class _Strict:
    """Rules the engine out on a machine that is known not to meet it."""

    strict: ClassVar[bool] = True


@dataclass(frozen=True)
class Gpu(_Strict):
    """A GPU of a compute capability. target: the name of what the engine was built for ('l4').

    match: 'exact', 'family' (the same major number, and at least the minor one) or 'at_least'.
    """

    target: str
    capability: Capability
    match: str = "exact"
    kind: Literal["gpu"] = "gpu"


@dataclass(frozen=True)
class Cpu(_Strict):
    """A machine that runs models on its CPU. target: the name of what the engine was built for ('cpu').

    only: the one kind of CPU (`enginery.core.hardware.cpu_kinds`) that it is laid out for; '' is any.
    """

    target: str
    only: str = ""
    kind: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class Instructions(_Strict):
    """Instructions that native code of the engine has. level: of x86-64, or an architecture.  flags: beyond it, as
    /proc/cpuinfo spells them."""

    level: str
    flags: tuple[str, ...] = ()
    kind: Literal["instructions"] = "instructions"


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


@dataclass(frozen=True)
class Driver(_Strict):
    """A driver of the GPU, at least of that version. cuda: the CUDA version that stands in for an unknown driver."""

    version: str
    cuda: str = ""
    kind: Literal["driver"] = "driver"


@dataclass(frozen=True)
class Memory(_Strict):
    """Memory of the GPU, in bytes."""

    size_bytes: int
    kind: Literal["memory"] = "memory"


@dataclass(frozen=True)
class Product:
    """The product that the engine was tuned for ('l4'). warning: what is said of another one."""

    product: str
    warning: str
    kind: Literal["product"] = "product"
    strict: ClassVar[bool] = False


@dataclass(frozen=True)
class Library(_Strict):
    """A shared library with operators of the engine: the very file. sha256: its digest."""

    path: str
    sha256: str
    kind: Literal["library"] = "library"


@dataclass(frozen=True)
class SessionOption:
    """A setting that the engine must be opened with where int8 kernels add in 16 bits (`CpuKind.saturates`)."""

    name: str
    value: str
    kind: Literal["session_option"] = "session_option"
    strict: ClassVar[bool] = False


@dataclass(frozen=True)
class Weights(_Strict):
    """The ONNX model beside the engine, which leaves its weights out. model: its digest. Whoever pulls brings it."""

    model: str
    kind: Literal["weights"] = "weights"


@dataclass(frozen=True)
class Unknown(_Strict):
    """A requirement that a newer writer has. kind: its name.  text: as it was written, as canonical JSON."""

    kind: str
    text: str


# What a backend may ask for.
Known = Gpu | Cpu | Instructions | Runtime | Driver | Memory | Product | Library | SessionOption | Weights
Requirement = Known | Unknown
KINDS: dict[str, type[Known]] = {each.kind: each for each in get_args(Known)}


def hardware_of(requires: Iterable[Requirement]) -> Gpu | Cpu | None:
    """The processor that runs the engine; None for one that runs anywhere."""
    return next((item for item in requires if isinstance(item, Gpu | Cpu)), None)


def to_json(requirement: Requirement) -> dict[str, object]:
    """A requirement as a JSON object that names its kind; an unknown one as it was read."""
    if isinstance(requirement, Unknown):
        return dict(json.loads(requirement.text))
    return asdict(requirement)


class _Target(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def compute_capability(self) -> Capability | None: ...


def for_target(target: _Target, *, only: str = "") -> Gpu | Cpu:
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
