"""What an engine needs of the machine that runs it, beside the GPU it was built for: runtime, driver, memory.

Rules and where they are from:

- Which release of TensorRT runs an engine, and which GPU beside the one it was built for: `enginery.core.hardware.compatibility`.
- The driver must be as new as the CUDA that the wheels of the runtime are for (CUDA release notes, "Minimum Required
  Driver Version for CUDA Minor Version Compatibility"), and as the nvcc that compiled an engine's kernels.
- What engines of other compilers need installed, and of a CPU: `runtimes`.
- An engine holds its weights, and they go into the GPU's memory: its size is the least that it needs.
"""

from enginery.core.hardware.compatibility import numbers, runtime_of, version_serves
from enginery.core.hardware.cpu_kinds import EXACT_SESSION, SATURATES, kind_named
from enginery.core.hardware.machine import Machine
from enginery.core.text import format_bytes
from enginery.registry.manifest import EngineEntry

_TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
_DRIVER_OF_CUDA = {12: "525", 13: "580"}


def unmet(entry: EngineEntry, machine: Machine) -> str | None:
    """The first need that this machine is known not to meet; None if there is none."""
    reason = _version_unmet(entry, machine)
    return reason if reason or not _on_gpu(entry) else _gpu_unmet(entry, machine)


def remarks(entry: EngineEntry, machine: Machine) -> tuple[str, ...]:
    """What could not be checked, or differs without being a reason."""
    if entry.backend == "onnxruntime":
        return (*_other_onnxruntime(entry, machine), *_saturating(entry, machine))
    said = [_version_remark(entry, machine)]
    if _on_gpu(entry):
        driver = _driver(entry)
        if driver and machine.driver is None and machine.cuda is None:
            said.append(f"needs driver >= {driver}; the driver here is unknown")
        if machine.memory_bytes is None:
            said.append("the GPU's memory is unknown")
        said.extend(_other_gpu(entry, machine))
    return tuple(words for words in said if words)


def _on_gpu(entry: EngineEntry) -> bool:
    return entry.compute_capability is not None or entry.backend in _TITLES


def _version_unmet(entry: EngineEntry, machine: Machine) -> str | None:
    if entry.backend == "onnxruntime":
        return None
    if entry.backend not in _TITLES:
        # Here, because finding backends brings what takes half of the client's time to import.
        from enginery.client import runtimes

        return runtimes.unmet(entry, machine)
    needs, found = _runtime(entry), _found(entry, machine)
    if needs and found and not version_serves(entry.backend, entry.options, needs, found):
        return f"needs {_TITLES[entry.backend]} {needs}, found {found}"
    return None


def _gpu_unmet(entry: EngineEntry, machine: Machine) -> str | None:
    driver = _driver(entry)
    if driver and machine.driver and numbers(machine.driver) < numbers(driver):
        return f"needs driver >= {driver}, found {machine.driver}"
    cuda = _cuda(entry)
    if cuda and not machine.driver and machine.cuda and numbers(machine.cuda) < (cuda,):
        return f"needs CUDA {cuda}, the driver supports {machine.cuda}"
    size = entry.size_bytes or 0
    if machine.memory_bytes is not None and size > machine.memory_bytes:
        return f"needs at least {format_bytes(size)}, the GPU has {format_bytes(machine.memory_bytes)}"
    return None


def _version_remark(entry: EngineEntry, machine: Machine) -> str | None:
    if entry.backend not in _TITLES:
        from enginery.client import runtimes

        return runtimes.remark(entry, machine)
    title, needs = _TITLES[entry.backend], _runtime(entry)
    if needs is None:
        return f"its {title} version is not on record"
    return f"needs {title} {needs}; the version here is unknown" if _found(entry, machine) is None else None


def _other_gpu(entry: EngineEntry, machine: Machine) -> tuple[str, ...]:
    """What is to be said of a GPU that the engine was not built on, where it may run all the same."""
    if entry.compute_capability not in (None, machine.compute_capability):
        return (f"{entry.status} on {entry.hardware.sm}, and not tried on {machine.target.sm}",)
    alike = entry.product is None or machine.product in (None, entry.product)
    if alike or entry.backend != "tensorrt" or entry.options.get("hardware_compatibility") != "none":
        return ()
    return ("TensorRT warns of errors on another product, but for engines with hardware_compatibility",)


def _other_onnxruntime(entry: EngineEntry, machine: Machine) -> tuple[str, ...]:
    built, here = entry.toolchain.get("onnxruntime"), machine.onnxruntime
    if not built or built == here:
        return ()
    return (f"saved by onnxruntime {built}; " + (f"{here} is here" if here else "the version here is unknown"),)


def _saturating(entry: EngineEntry, machine: Machine) -> tuple[str, ...]:
    """What a server must ask ONNX Runtime for, which this project's own sessions do."""
    if not needs_exact_session(entry, machine):
        return ()
    name, value = EXACT_SESSION
    return (f"{machine.cpu} has no VNNI: open it with {name} = {value}, or its sums saturate",)


def needs_exact_session(entry: EngineEntry, machine: Machine) -> bool:
    """Whether the machine's CPU would saturate an engine's integer sums, unless it is opened to be exact."""
    kind = kind_named(machine.cpu) if machine.cpu else None
    return SATURATES in entry.notes and kind is not None and kind.saturates


def _runtime(entry: EngineEntry) -> str | None:
    return runtime_of(entry.backend, entry.toolchain)


def _found(entry: EngineEntry, machine: Machine) -> str | None:
    return machine.tensorrt_rtx if entry.backend == "tensorrt-rtx" else machine.tensorrt


def _driver(entry: EngineEntry) -> str | None:
    """The oldest driver: the one on record, else that of the one CUDA version that its wheels are for."""
    if "driver" in entry.toolchain:
        return entry.toolchain["driver"]
    return _DRIVER_OF_CUDA.get(_cuda(entry) or 0)


def _cuda(entry: EngineEntry) -> int | None:
    """The CUDA version that the runtime's wheels are for, or whose nvcc compiled the kernels."""
    found = [number for number in _DRIVER_OF_CUDA for name in entry.toolchain if f"-cu{number}" in name]
    nvcc = numbers(entry.toolchain.get("nvcc", ""))[:1]
    return min((*found, *nvcc), default=None)
