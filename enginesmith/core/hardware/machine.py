"""The facts about a machine that decide which engine it runs; GPU generations; the names of targets."""

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware import cpu_kinds
from enginesmith.core.hardware.cpu_kinds import CPU, KINDS, kind_named, this_kind
from enginesmith.core.requirements import Requirement, Runtime
from enginesmith.core.text import format_bytes, suggest
from enginesmith.core.types import CPU_KIND, Target

if TYPE_CHECKING:
    from enginesmith.core.hardware.cuda import GpuDevice

# NVIDIA GPU generations: compute capabilities, products and their memory.
#
# From NVIDIA's CUDA GPU list (compute capabilities) and GPU feature discovery's node labels
# (`nvidia.com/gpu.compute.major`, `.minor`, `nvidia.com/gpu.product`). Never select nodes by the `family` label: it has
# the same value for A100 and A10, and for B200 and RTX PRO 6000.


@dataclass(frozen=True)
class Generation:
    """One compute capability. products: short product name -> values of the node label `nvidia.com/gpu.product`."""

    compute_capability: tuple[int, int]
    family: str
    products: dict[str, tuple[str, ...]]

    @property
    def sm(self) -> str:
        """The architecture's name, such as 'sm_89'."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def labels(self) -> dict[str, str]:
        """The node labels that select this generation on Kubernetes; all values are strings."""
        major, minor = self.compute_capability
        return {"nvidia.com/gpu.compute.major": str(major), "nvidia.com/gpu.compute.minor": str(minor)}


GENERATIONS: tuple[Generation, ...] = (
    Generation((7, 5), "turing", {"t4": ("Tesla-T4",)}),
    Generation(
        (8, 0),
        "ampere",
        {"a100": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe")},
    ),
    Generation((8, 6), "ampere", {"a10": ("NVIDIA-A10",), "a10g": ("NVIDIA-A10G",), "a40": ("NVIDIA-A40",)}),
    Generation(
        (8, 9), "ada", {"l4": ("NVIDIA-L4",), "l40s": ("NVIDIA-L40S",), "rtx4090": ("NVIDIA-GeForce-RTX-4090",)}
    ),
    Generation(
        (9, 0),
        "hopper",
        {
            "h100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
            "h200": ("NVIDIA-H200",),
            "gh200": ("NVIDIA-GH200-480GB",),
        },
    ),
    Generation((10, 0), "blackwell", {"b200": ("NVIDIA-B200",)}),
    Generation((10, 3), "blackwell", {"b300": ("NVIDIA-B300-SXM6-AC",)}),
    Generation(
        (12, 0),
        "blackwell",
        {"rtxpro6000": ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",), "rtx5090": ("NVIDIA-GeForce-RTX-5090",)},
    ),
    Generation((12, 1), "blackwell", {"gb10": ("NVIDIA-GB10",)}),
)


# Products that are not in the table above, by compute capability: from NVIDIA's lists of CUDA GPUs, and of those that
# CUDA 13 no longer supports.
OTHER_PRODUCTS: dict[tuple[int, int], tuple[str, ...]] = {
    (3, 7): ("k80",),
    (5, 2): ("m4", "m40", "m60"),
    (6, 0): ("p100",),
    (6, 1): ("p4", "p40", "gtx1080", "gtx1080ti"),
    (7, 0): ("v100", "v100s", "titanv"),
    (7, 2): ("xavier",),
    (7, 5): ("rtx2080", "rtx2080ti", "gtx1660"),
    (8, 0): ("a30", "a800"),
    (8, 6): ("a2", "a16", "a4000", "a5000", "a6000", "rtx3080", "rtx3090"),
    (8, 7): ("orin",),
    (8, 9): ("l20", "l40", "rtx4080", "rtx6000ada"),
    (9, 0): ("h20", "h800"),
    (10, 0): ("gb200",),
    (10, 3): ("gb300",),
    (12, 0): ("rtx5080",),
}
OLDER_FAMILIES = {"kepler": (3, 7), "maxwell": (5, 2), "pascal": (6, 0), "volta": (7, 0)}


def generation_of(compute_capability: tuple[int, int]) -> Generation | None:
    """The generation with a compute capability; None if the table lacks it."""
    return next((g for g in GENERATIONS if g.compute_capability == compute_capability), None)


def product_of(compute_capability: tuple[int, int], label: str) -> str | None:
    """The short name of the product that the node label `label` names; None if the table lacks it."""
    generation = generation_of(compute_capability)
    products = generation.products if generation else {}
    return next((product for product, labels in products.items() if label in labels), None)


# The names of targets: a kind of CPU, a GPU generation or product, a compute capability, or all of them.

_FAMILY_ALIASES = {"ada-lovelace": "ada", "lovelace": "ada"}


def names() -> list[str]:
    """All names that a spec may use for a target or a group of targets."""
    target_names = ["cpu", "gpu", "all", *(kind.name for kind in KINDS)]
    for generation in GENERATIONS:
        target_names += [generation.sm, *generation.products]
    return target_names + sorted({g.family for g in GENERATIONS})


@lru_cache(maxsize=256)
def parse_targets(name: str) -> tuple[Target, ...]:
    """The targets that a name means, in order of capability.

    `sm_89` (or `sm89`, `8.9`), a product (`l4`), a family (`ampere`: each of its capabilities), `cpu` (this machine's
    kind of CPU), a kind of CPU (`x86-64-v3`, `avx512-vnni`, `arm64-dotprod`: KINDS), `gpu` (every generation) or `all`
    (`gpu` and `cpu`). Raises UnknownNameError with the nearest known name.
    """
    key = name.strip().lower().replace(" ", "")
    key = _FAMILY_ALIASES.get(key, key)
    if key == "cpu":
        return (CPU,)
    if kind := kind_named(key):
        return (Target(kind.name),)
    if key in ("gpu", "all"):
        gpus = tuple(Target(g.sm, g.compute_capability) for g in GENERATIONS)
        return gpus if key == "gpu" else (*gpus, CPU)
    sm = "sm_" + key.removeprefix("sm").lstrip("_").replace(".", "")
    product = key.replace("-", "").replace("_", "")
    targets = (
        [Target(g.sm, g.compute_capability) for g in GENERATIONS if g.sm == sm]
        or [Target(product, g.compute_capability, product) for g in GENERATIONS if product in g.products]
        or [Target(g.sm, g.compute_capability) for g in GENERATIONS if g.family == key]
    )
    if not targets:
        raise UnknownNameError(f"target {name!r} {_explain_unknown(key, product)}")
    return tuple(targets)


def match_targets(name: str, targets: Sequence[Target]) -> list[Target]:
    """The targets among `targets` that a name means. If none is equal, those of its generation that include it
    or that it includes: `sm_75` serves `t4`, and `t4` serves `sm_75`. Raises like `parse_targets`."""
    named_targets = parse_targets(name)
    return [target for target in targets if target in named_targets] or [
        target
        for target in targets
        for named_target in named_targets
        if target.compute_capability == named_target.compute_capability is not None
        and None in (target.product, named_target.product)
    ]


def _explain_unknown(key: str, product: str) -> str:
    """The reason why a name is no target: an unsupported GPU, a GPU named by its generation, or no GPU at all."""
    capabilities = {name: capability for capability, products in OTHER_PRODUCTS.items() for name in products}
    match = re.fullmatch(r"(?:sm_?)?([1-9][0-9]?)\.?([0-9])a?", key)
    capability = (int(match[1]), int(match[2])) if match else capabilities.get(product) or OLDER_FAMILIES.get(key)
    if capability is None:
        return f"is not known; {suggest(key, names())}"
    sm = "sm_{}{}".format(*capability)
    if generation_of(capability):
        return f"is not known by this name; give {sm}"
    refusal = "is not supported" if key == sm else f"is a GPU of {sm}: {sm} is not supported"
    return f"{refusal}; known: {', '.join(generation.sm for generation in GENERATIONS)}"


# The facts about a machine that decide which engine it runs, and the machine that `--target auto` selects.
#
# The compute capability, product, memory and CUDA version come from the driver's library, the driver's version from
# NVML (nvidia-ml-py, if installed) or the kernel module, and the runtimes' versions from the installed Python
# distributions, which are looked up only for the engines in question. A runtime that is no Python package (Triton's, a
# C++ server's) stays unknown unless the user states its version. Unknown facts are None; they reject no engine and are
# reported. Not run on a GPU.

AUTO = "auto"

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """A machine that engines are chosen for. None means unknown (for compute_capability: no GPU).

    cpu: the name of the kind of CPU (`cpu_kinds.CpuKind`).
    product: short name as in `targets` ('l4').  driver: the GPU driver's version, '580.65.06'.  cuda: the newest
    version that the driver supports, '13.0'.  memory_bytes: of the GPU.
    runtimes: versions by the distribution's name ('tensorrt-rtx'); a missing key is unknown.
    here: True for this machine, whose installed versions can be looked up.

    Raises InputError for a compute capability that is no pair of ints.
    """

    compute_capability: tuple[int, int] | None = None
    product: str | None = None
    driver: str | None = None
    cuda: str | None = None
    runtimes: Mapping[str, str] = field(default_factory=dict, hash=False)
    memory_bytes: int | None = None
    cpu: str | None = None
    here: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        capability = self.compute_capability
        is_pair = (
            isinstance(capability, tuple)
            and len(capability) == 2
            and all(isinstance(number, int) for number in capability)
        )
        if capability is not None and not is_pair:
            name = capability if isinstance(capability, str) else "l4"
            raise InputError(
                f"compute capability {capability!r}: give a pair such as (8, 9), or use Machine.from_name({name!r})"
            )

    @property
    def target(self) -> Target:
        """The machine as a build target."""
        if self.compute_capability is None:
            return CPU
        name = self.product or "sm_{}{}".format(*self.compute_capability)
        return Target(name, self.compute_capability, self.product)

    @property
    def is_cpu(self) -> bool:
        """Whether the machine has no GPU."""
        return self.compute_capability is None

    @property
    def name(self) -> str:
        """The name shown to users: 'sm_89 (l4)', 'cpu'."""
        return f"{self.target.sm} ({self.product})" if self.product else self.target.sm

    @property
    def saturates(self) -> bool:
        """Whether the CPU is known to add int8 products in 16 bits (`CpuKind.saturates`)."""
        kind = kind_named(self.cpu) if self.cpu else None
        return kind is not None and kind.saturates

    @property
    def platform(self) -> str | None:
        """The platform that shared libraries are built for: 'linux-x86_64'; None if the CPU is unknown."""
        kind = this_kind() if self.here else kind_named(self.cpu) if self.cpu else None
        return None if kind is None else f"{sys.platform if self.here else 'linux'}-{kind.machine}"

    def list_facts(self) -> dict[str, str]:
        """The known facts by name, as text for users: driver, CUDA, runtimes, memory, CPU."""
        versions = {"driver": self.driver, "CUDA": self.cuda, **self.runtimes}
        versions |= {"memory": format_bytes(self.memory_bytes) or None, "CPU": self.cpu if self.is_cpu else None}
        return {name: value for name, value in versions.items() if value is not None}

    def version_of(self, *distributions: str) -> str | None:
        """The version of the first of these distributions with a known version; None if there is none."""
        return next((self.runtimes[name] for name in distributions if name in self.runtimes), None)

    def lacking_instructions(self, level: str, flags: Iterable[str] = ()) -> tuple[str, ...] | None:
        """The CPU flags that the CPU lacks, among `flags` and those of an x86-64 level (or an architecture).

        Empty if it has all; None if the kind of CPU is unknown.
        """
        if self.here:
            return cpu_kinds.find_missing_flags(level) or tuple(sorted(set(flags) - cpu_kinds.machine_flags()))
        kind = kind_named(self.cpu) if self.cpu else None
        if kind is None:
            return None
        return tuple(sorted(set(flags) - kind.all_flags)) if kind.has_level(level) else (level,)

    def with_installed(self, requires: Iterable[Requirement]) -> "Machine":
        """This machine with the installed versions of the runtimes in `requires`; unchanged if it is another one."""
        if not self.here:
            return self
        runtimes = dict(self.runtimes)
        for requirement in requires:
            if isinstance(requirement, Runtime) and self.version_of(requirement.name, *requirement.packages) is None:
                package_versions = (
                    (name, _find_installed_version(name)) for name in (requirement.name, *requirement.packages)
                )
                runtimes |= next(({name: version} for name, version in package_versions if version), {})
        return replace(self, runtimes=runtimes)

    @classmethod
    def of(cls, target: Target) -> "Machine":
        """The machine of a build target; all other facts are unknown, for the target `cpu` the kind too."""
        kind = target.name if target.is_cpu and kind_named(target.name) else None
        return cls(target.compute_capability, target.product, cpu=kind)

    @classmethod
    def from_name(cls, name: str = AUTO) -> "Machine":
        """The machine that a target's name means. `cpu` is this machine's CPU; `auto` is this machine with its GPU (and
        the smallest memory if it has several).

        Raises UnknownNameError if the name means no target or several, and for `auto` if the GPUs are of several
        generations.
        """
        if name != AUTO:
            target = target_named(name)
            return cpu_here() if target == CPU else cls.of(target)
        from enginesmith.core.hardware import cuda

        if not (devices := cuda.gpus()):
            return cpu_here()
        min_memory = min(gpu.memory_bytes for gpu in devices)
        return replace(gpu_here(devices[0]), product=_target_of(devices).product, memory_bytes=min_memory or None)

    def with_facts(
        self,
        *,
        driver: str | None = None,
        cuda: str | None = None,
        memory_bytes: int | None = None,
        runtimes: Mapping[str, str | None] | None = None,
    ) -> "Machine":
        """A copy of the machine with these facts replaced; None keeps the known value.

        driver, cuda: versions of NVIDIA's driver and of the CUDA that it supports.
        runtimes: distribution -> version; None keeps the known version.
        """
        stated_versions = {name: version for name, version in (runtimes or {}).items() if version is not None}
        return replace(
            self,
            driver=driver or self.driver,
            cuda=cuda or self.cuda,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            runtimes={**self.runtimes, **stated_versions},
        )


def target_named(name: str) -> Target:
    """The target that a name means; `auto` is this machine's. Raises UnknownNameError if the name means none or
    several, and for `auto` if the GPUs are of several generations."""
    if name == AUTO:
        from enginesmith.core.hardware import cuda

        return _target_of(cuda.gpus())
    targets = parse_targets(name)
    if len(targets) > 1:
        raise UnknownNameError(
            f"target {name!r} stands for several: {', '.join(candidate.name for candidate in targets)}; name one"
        )
    return targets[0]


def cpu_here() -> Machine:
    """This machine, for engines that run on its CPU."""
    return Machine(cpu=this_kind().name, here=True)


def gpu_here(gpu: "GpuDevice") -> Machine:
    """This machine, for engines that run on one of its GPUs."""
    from enginesmith.core.hardware import cuda

    machine, size_bytes = replace(_machine_of(gpu), here=True), gpu.memory_bytes or None
    return machine.with_facts(driver=driver_version(), cuda=cuda.cuda_version(), memory_bytes=size_bytes)


def _target_of(devices: "tuple[GpuDevice, ...]") -> Target:
    targets = {_machine_of(gpu).target for gpu in devices}
    if len({target.sm for target in targets}) > 1:
        target_names = ", ".join(sorted(target.sm for target in targets))
        raise UnknownNameError(f"this machine has GPUs of several generations: {target_names}; name one with --target")
    return min(targets, key=lambda target: target.name) if targets else CPU


def _machine_of(gpu: "GpuDevice") -> Machine:
    """The machine of this GPU. The product is known if its name equals a node label's (with '-' for spaces)."""
    return Machine(gpu.compute_capability, product_of(gpu.compute_capability, gpu.name.strip().replace(" ", "-")))


def _find_installed_version(distribution: str) -> str | None:
    # Imported here, because it imports a mail parser and takes half of the client's import time.
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def driver_version() -> str | None:
    """The driver's version, from NVML, else from the kernel module."""
    with suppress(Exception):  # nvidia-ml-py is optional, and has its own error classes
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        version: str | bytes = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    with suppress(OSError):
        if match := re.search(r"Kernel Module.*?(\d{3,}(?:\.\d+)+)", _KERNEL_MODULE.read_text()):
            return match[1]
    return None


def describe_host() -> dict[str, str]:
    """Facts about this machine as text: name, system, machine, number of CPUs, kind of CPU, Python's version."""
    return {
        CPU_KIND: this_kind().name,
        "name": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
    }
