"""The device of this machine that the kit measures, its driver, and the versions of the software."""

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from builders.backends.installed import PackageNotFoundError, version
from enginesmith.core.errors import UnavailableError
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.hardware.gpu_generations import product_of
from enginesmith.core.types import Target

_DISTRIBUTIONS = ("enginesmith", "torch", "triton", "numpy", "onnx")


@dataclass(frozen=True)
class KitDevice:
    """The device that is measured. device: 'cuda' or 'cpu', as in torch.  cuda: the driver's CUDA version.

    label: of the GPU, as GPU feature discovery labels its node.  driver: its version; '' for the CPU.
    """

    device: str
    name: str
    label: str = ""
    memory_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    compute_capability: tuple[int, int] | None = None
    product: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.compute_capability is None

    @property
    def target(self) -> Target:
        """The target of engines for this device."""
        capability = self.compute_capability
        return CPU if capability is None else Target("sm_{}{}".format(*capability), capability, self.product)


def find_device(kind: str) -> KitDevice:
    """The CPU, or this machine's first GPU. Raises UnavailableError without one, or without a torch that sees it."""
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return KitDevice("cpu", platform.processor() or platform.machine(), memory_bytes=memory)
    found = cuda.gpus()
    if not found:
        raise UnavailableError(
            "no NVIDIA GPU on this machine, or no driver; run the kit with --device cpu to try it out"
        )
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError(
            f"torch {torch.__version__} does not see the GPU; install a build of torch for CUDA {cuda.cuda_version()}"
        )
    gpu = found[0]
    label, capability = gpu.name.replace(" ", "-"), gpu.compute_capability
    versions = driver_version(), cuda.cuda_version() or ""
    product = product_of(capability, label)
    return KitDevice("cuda", gpu.name, label, gpu.memory_bytes, *versions, capability, product)


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the NVIDIA driver's kernel module; '' where it is not known."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def software() -> dict[str, str]:
    """Versions of Python, the system and the packages that measure."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch := sys.modules.get("torch"):
        found["torch"] = str(torch.__version__)
    return found
