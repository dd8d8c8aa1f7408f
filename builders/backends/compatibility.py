"""Whether an engine may be opened by a backend on this machine: asked before any runtime sees its bytes.

Runtimes say no to a foreign engine with cryptic words, with a crash or not at all. What decides follows from the
engine's request (`Backend.requires`), so that nothing has to be loaded to find out. Standard library only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from builders.backends import discovery
from enginery.core.errors import EngineryError, IntegrityError
from enginery.core.hardware import cuda
from enginery.core.hardware.evaluation import RequirementFinding, evaluate, judge
from enginery.core.hardware.machine import Machine, cpu_here, gpu_here
from enginery.core.requirements import Gpu, Requirement, Runtime, hardware_of
from enginery.core.types import Backend, BuildRequest, Engine, Session, Target


@contextmanager
def open_engine(engine: Engine) -> Iterator[Session]:
    """The engine, opened by the backend of its request. Raises as `check_compatible` and `Backend.open` do."""
    backend = discovery.configure(engine.request.backend, dict(engine.request.options))
    check_compatible(backend, engine)
    with backend.open(engine) as session:
        yield session


def check_compatible(backend: Backend, engine: Engine) -> None:
    """Raise EngineryError unless `backend` can open `engine` here, IntegrityError where its file is not whole.

    In this order: another backend's, not installed, another version, hardware that is not here, a file of another size.
    """
    if reason := find_incompatibility(backend, engine.request):
        raise EngineryError(f"{engine.path.name}: {reason}")
    size = engine.path.stat().st_size if engine.path.exists() else None
    if size != engine.size_bytes:
        found = "is not there" if size is None else f"has {size} bytes"
        raise IntegrityError(
            f"{engine.path} {found}, the engine has {engine.size_bytes}; pull it again, or build it anew"
        )


def find_incompatibility(backend: Backend, request: BuildRequest) -> str | None:
    """Why an engine of this request cannot be opened by `backend` here, with the remedy; None when it can."""
    if request.backend != backend.name:
        return f"built by {request.backend}, and this is {backend.name}; open it with {request.backend}"
    versions = backend.versions()
    if not versions:
        return f"built by {backend.name}, which is not installed here: {backend.install}"
    requires = backend.requires(request)
    gpu = find_compatible_gpu(requires, request.target, cuda.gpus())
    machine = gpu_here(gpu) if gpu else cpu_here()
    processor = hardware_of(requires)
    for found in evaluate(requires, machine.with_facts(runtimes=versions).with_installed(requires)):
        if found.requirement != processor and _keeps_shut(found):
            return f"{found.words}; {_remedy(found.requirement)}"
    if reason := backend.runs(machine.target if gpu else request.target) or _processor_lacks(processor, machine):
        return f"built for {request.target.name}, and cannot run here: {reason}; run it on a node that has one"
    return None


def find_compatible_gpu(
    requires: Sequence[Requirement], target: Target, gpus: Sequence[cuda.GpuDevice]
) -> cuda.GpuDevice | None:
    """The GPU to open an engine on: one of its target's own compute capability, else one that it is compatible with;
    None for an engine of CPUs, and where no GPU will do."""
    processor = hardware_of(requires)
    if not isinstance(processor, Gpu):
        return None
    compatible = [gpu for gpu in gpus if judge(processor, Machine(gpu.compute_capability)).state == "met"]
    return min(compatible, key=lambda gpu: gpu.compute_capability != target.compute_capability, default=None)


def _keeps_shut(found: RequirementFinding) -> bool:
    """Whether this project's own sessions refuse an engine for it: other than a server, which is told, they ask every
    runtime to be one that is known to open it."""
    return found.rules_out or (found.state == "unmet" and isinstance(found.requirement, Runtime))


def _processor_lacks(processor: Requirement | None, machine: Machine) -> str | None:
    """Why an engine's processor is not in this machine, where the backend does not say."""
    return judge(processor, machine).words or None if processor else None


def _remedy(requirement: Requirement) -> str:
    if isinstance(requirement, Runtime):
        return "install that version, or build it again here"
    return "run it on a node that has it, or build it again for this one"
