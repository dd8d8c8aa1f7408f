"""Whether an engine may be opened here, found from its request before a byte of it is loaded.

TensorRT itself says so only while it loads, in words that name neither version nor GPU (NVIDIA/TensorRT#2176, #3911).
"""

from collections.abc import Mapping, Sequence

from builders.backends.tensorrt.runtime.plugins import KEY
from enginery.core.hardware.compatibility import hardware_serves, runtime_of, version_serves
from enginery.core.hardware.cuda import Gpu
from enginery.core.types import BuildRequest, Scalar


def fitting_gpu(request: BuildRequest, gpus: Sequence[Gpu]) -> Gpu | None:
    """The GPU to open the engine on: one of its own compute capability, else one that it is compatible with."""
    target, options = request.target, dict(request.options)
    fitting = [
        gpu
        for gpu in gpus
        if hardware_serves(
            request.backend, options, request.precision, target.compute_capability, gpu.compute_capability
        )
    ]
    return min(fitting, key=lambda gpu: gpu.compute_capability != target.compute_capability, default=None)


def version_misfit(
    backend: str, options: Mapping[str, Scalar], toolchain: Mapping[str, str], here: Mapping[str, str]
) -> str | None:
    """Why the installed release, or a plugin library, is not the engine's; None when it is or cannot be told."""
    built, found = runtime_of(backend, toolchain), runtime_of(backend, here)
    if built and found and not version_serves(backend, options, built, found):
        cure = "" if options.get("version_compatible") is None else ", or build it with version_compatible"
        return (
            f"built with {backend} {built}, and {found} is installed; install {backend} {built}, "
            f"or build it again{cure}"
        )
    for name in toolchain:
        if name.startswith(KEY) and here.get(name) != toolchain[name]:
            path = name.removeprefix(KEY)
            what = "is not on this machine" if here.get(name, "absent") == "absent" else "is another library here"
            return f"plugin library {path}, which it was built with, {what}; put the same file there"
    return None
