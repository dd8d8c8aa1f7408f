"""Which engines run with which runtime and on which GPU: the rules, for whoever builds, chooses or opens an engine.

Sources: NVIDIA, TensorRT 11.4 documentation, "Engine Compatibility" and "Support Matrix" (versions, hardware levels);
the documentation of `HardwareCompatibilityLevel` in the bindings (10.16, 11.4); TensorRT-RTX documentation, "Engine
Compatibility". Standard library only: a serving node imports it. Not tried on a GPU.

- A TensorRT engine runs with the release that built it. One that is version compatible runs with later releases of the
  same major version too, and with TensorRT 11 if 10 built it, with 10 if 8 did.
- A TensorRT-RTX engine runs with the release that built it.
- An engine runs on the compute capability that it was built for. One of TensorRT with hardware compatibility
  `ampere_plus` runs on every GPU from Ampere (8.0) on, as far as that has the precision at all.
"""

from collections.abc import Mapping

from enginery.core.types import Scalar

Capability = tuple[int, int]

_AMPERE: Capability = (8, 0)
# (built with, runs with): pairs of major versions, besides equal ones.
_ACROSS_MAJORS = {(10, 11), (8, 10)}


def runtime_of(backend: str, toolchain: Mapping[str, str]) -> str | None:
    """The version of a backend's runtime in a toolchain, from whichever of its wheels is there."""
    names = [backend, *(name for name in sorted(toolchain) if name.startswith(f"{backend}-cu"))]
    return next((toolchain[name] for name in names if name in toolchain), None)


def version_serves(backend: str, options: Mapping[str, Scalar], built: str, here: str) -> bool:
    """Whether the runtime of version `here` loads an engine that `built` made.

    Versions are compared as far as both are given, so 10.16 stands for every 10.16.x.
    """
    pairs = list(zip(numbers(built), numbers(here), strict=False))
    if all(before == now for before, now in pairs):
        return True
    if backend != "tensorrt" or options.get("version_compatible") is not True:
        return False
    majors = pairs[0]
    return majors in _ACROSS_MAJORS or (
        majors[0] == majors[1] and [before for before, _ in pairs] < [now for _, now in pairs]
    )


def hardware_serves(
    backend: str, options: Mapping[str, Scalar], precision: str, built: Capability | None, here: Capability | None
) -> bool:
    """Whether an engine built for one compute capability runs on another (None: the CPU)."""
    if built == here:
        return True
    if built is None or here is None or not _portable(backend, options):
        return False
    return min(built, here) >= _AMPERE and hardware_lacks(precision, here) is None


def hardware_lacks(precision: str, capability: Capability) -> str | None:
    """Why a GPU cannot compute in a precision, with what to use instead."""
    sm = "sm_{}{}".format(*capability)
    if precision == "bf16" and capability < _AMPERE:
        return f"{sm} has no bfloat16; use fp16"
    if precision == "fp8" and capability < (8, 9):
        return f"{sm} has no FP8 (e4m3), which begins with sm_89; use int8"
    return None


def numbers(version: str) -> tuple[int, ...]:
    """'10.16.1' as (10, 16, 1); what is no number ends it."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def _portable(backend: str, options: Mapping[str, Scalar]) -> bool:
    return backend == "tensorrt" and options.get("hardware_compatibility") == "ampere_plus"
