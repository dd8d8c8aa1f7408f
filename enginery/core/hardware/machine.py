"""What a machine has, as far as it decides which engine runs there; and what `--target auto` means here.

The compute capability, product, memory and CUDA version come from the driver's own library, the driver's version from
NVML (nvidia-ml-py, if installed) or the kernel module, the runtimes' from what is installed for Python. A runtime that
is not a Python package (Triton's, a C++ server's) is not seen: it stays unknown, and can be stated. What is unknown is
None, is no reason to refuse an engine, and is said beside it. Not run on a GPU.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginery.core.errors import InputError, UnknownNameError
from enginery.core.hardware.cpu_kinds import kind_named, kind_of, this_kind
from enginery.core.hardware.cuda import Gpu, cuda_version, gpus
from enginery.core.hardware.targets import CPU, parse_targets, product_of
from enginery.core.text import format_bytes
from enginery.core.types import Target

AUTO = "auto"

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_RUNTIMES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx", "onnxruntime": "onnxruntime"}


@dataclass(frozen=True)
class Machine:
    """What engines are chosen for. None: unknown (compute_capability: no GPU).

    cpu: the kind of CPU (`enginery.core.hardware.cpu_kinds`).
    product: short name as in `enginery.core.hardware.targets` ('l4').  driver: of the GPU, '580.65.06'.  cuda: the newest that the
    driver supports, '13.0'.  tensorrt, tensorrt_rtx, onnxruntime: versions of the runtimes.  memory_bytes: of the GPU.
    here: whether it is this machine, where anything else that is installed can be asked for.
    """

    compute_capability: tuple[int, int] | None = None
    product: str | None = None
    driver: str | None = None
    cuda: str | None = None
    tensorrt: str | None = None
    tensorrt_rtx: str | None = None
    onnxruntime: str | None = None
    memory_bytes: int | None = None
    cpu: str | None = None
    here: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        found = self.compute_capability
        pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, int) for part in found)
        if found is not None and not pair:
            name = found if isinstance(found, str) else "l4"
            raise InputError(
                f"compute capability {found!r}: give a pair such as (8, 9), or use Machine.named({name!r})"
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
        """Whether it has no GPU."""
        return self.compute_capability is None

    def known(self) -> dict[str, str]:
        """What is known beside the kind of machine, for people."""
        found = {"driver": self.driver, "CUDA": self.cuda, "TensorRT": self.tensorrt, "TensorRT-RTX": self.tensorrt_rtx}
        found |= {"onnxruntime": self.onnxruntime, "memory": format_bytes(self.memory_bytes) or None}
        found |= {"CPU": self.cpu if self.is_cpu else None}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of(cls, target: Target) -> "Machine":
        """A machine of which only its kind is known; of the target `cpu` not even that."""
        kind = target.name if target.is_cpu and kind_named(target.name) else None
        return cls(target.compute_capability, target.product, cpu=kind)

    @classmethod
    def named(cls, name: str = AUTO) -> "Machine":
        """The machine that a target's name stands for; `auto` is this one, with all that can be seen of it.

        `cpu` is this machine's CPU. Its onnxruntime, which decides nothing, is remarked on for any CPU.
        Raises UnknownNameError for a name that stands for none or several, or GPUs of several generations here.
        """
        if name == AUTO:
            return local_machine()
        target = target_named(name)
        named = cls.of(target)
        if not named.is_cpu:
            return named
        return named.stating(onnxruntime=_installed("onnxruntime"), cpu=kind_of(target))

    def stating(self, **facts: str | int | None) -> "Machine":
        """The machine with these facts in place of what was seen; None changes nothing."""
        return replace(self, **{name: value for name, value in facts.items() if value is not None})  # type: ignore[arg-type]


def target_named(name: str) -> Target:
    """The one target that a name stands for; `auto` is this machine's. Raises UnknownNameError for none or several."""
    if name == AUTO:
        return local_target()
    found = parse_targets(name)
    if len(found) > 1:
        raise UnknownNameError(f"target {name!r} is several: {', '.join(t.name for t in found)}; name one")
    return found[0]


def local_target() -> Target:
    """This machine's target. Raises UnknownNameError when it has GPUs of several generations: a person must choose."""
    return _target_of(gpus())


def local_machine() -> Machine:
    """This machine. Of several GPUs of one generation the smallest memory counts. Raises as `local_target` does."""
    found = gpus()
    machine = Machine.of(_target_of(found))
    installed = {fact: _installed(name) for fact, name in _RUNTIMES.items()}
    machine = replace(machine, here=True)
    if not found:
        return machine.stating(**installed, cpu=this_kind().name)
    memory = min(gpu.memory_bytes for gpu in found) or None
    return machine.stating(driver=driver_version(), cuda=cuda_version(), memory_bytes=memory, **installed)


def _target_of(found: tuple[Gpu, ...]) -> Target:
    targets = {_target(gpu) for gpu in found}
    if len({target.sm for target in targets}) > 1:
        names = ", ".join(sorted(target.sm for target in targets))
        raise UnknownNameError(f"this machine has GPUs of several generations: {names}; name one with --target")
    return min(targets, key=lambda target: target.name) if targets else CPU


def _target(gpu: Gpu) -> Target:
    """A GPU as a target; its product is known when its name is one that node labels use (spaces become '-')."""
    product = product_of(gpu.compute_capability, gpu.name.strip().replace(" ", "-"))
    return Target(product or "sm_{}{}".format(*gpu.compute_capability), gpu.compute_capability, product)


def _installed(distribution: str) -> str | None:
    # Here, because it brings a parser of mail and half of the time that importing the client takes.
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def driver_version() -> str | None:
    """The driver's version, from NVML, else from the kernel module."""
    with suppress(Exception):  # nvidia-ml-py is optional, and its errors are its own
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        version: str | bytes = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    with suppress(OSError):
        if found := re.search(r"Kernel Module.*?(\d{3,}(?:\.\d+)+)", _KERNEL_MODULE.read_text()):
            return found[1]
    return None
