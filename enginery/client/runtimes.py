"""What an engine needs installed, for every backend but TensorRT's own, which have rules of their own (`needs`).

Which packages, and in which versions, is on record with each engine; whether others do is the backend's to say
(`builders.backends.fitting`). Neither needs a compiler: a serving node asks, and nothing is imported that it may not have.
"""

from builders.backends import discovery
from builders.backends.fitting import BuildOnly, packages, version_misfit
from enginery.core.errors import EngineryError
from enginery.core.hardware.cpu_kinds import kind_named
from enginery.core.hardware.cpu_levels import HOST, lacking
from enginery.core.hardware.machine import Machine
from enginery.core.types import Backend
from enginery.registry.manifest import EngineEntry


def unmet(entry: EngineEntry, machine: Machine) -> str | None:
    """Why what is installed on this very machine, or its CPU, does not open the engine; None where it is not known."""
    level = _level(entry)
    if not machine.here:
        known = kind_named(machine.cpu) if machine.cpu else None
        beyond = level and known and not known.has_level(level)
        return f"compiled for {level}, and the CPU is {machine.cpu}" if beyond else None
    if missing := lacking(level) if level else ():
        return f"compiled for {level}, and this CPU has no {', '.join(missing)}"
    backend = _backend(entry)
    return version_misfit(backend, entry.toolchain) if backend and backend.versions() else None


def remark(entry: EngineEntry, machine: Machine) -> str | None:
    """What it needs, where that could not be checked; None where it was, and where nothing is on record."""
    backend = _backend(entry)
    wanted = packages(entry.toolchain)
    unneeded = backend.build_only if isinstance(backend, BuildOnly) else ()
    listed = ", ".join(f"{name} {version}" for name, version in sorted(wanted.items()) if name not in unneeded)
    if not listed or (machine.here and backend and backend.versions()):
        return None
    if machine.here and backend:
        return f"needs {listed}; {entry.backend} is not installed here: {backend.install}"
    return f"needs {listed}; the versions {'here' if machine.here else 'there'} are unknown"


def _backend(entry: EngineEntry) -> Backend | None:
    """The backend with the engine's options; None for one of another installation."""
    try:
        return discovery.configure(entry.backend, dict(entry.options))
    except EngineryError:
        return None


def _level(entry: EngineEntry) -> str | None:
    """The level of x86-64, or other architecture, that a CPU engine was compiled for, where that is on record."""
    if entry.compute_capability is not None:
        return None
    level = entry.options.get("cpu")
    return entry.toolchain.get("cpu") if level == HOST else str(level) if level else None
