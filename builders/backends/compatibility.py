"""Whether an engine may be opened by a backend on this machine: asked before any runtime sees its bytes.

Runtimes refuse an engine of another version or for other hardware with cryptic words, with a crash or not at all. Here
the requirements of its request (`Backend.requires`) decide, so that no runtime is loaded. Standard library only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from builders.as_built import WithFloatStates
from builders.backends import discovery
from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.evaluation import evaluate, judge
from enginesmith.core.hardware.machine import Machine, cpu_here, gpu_here
from enginesmith.core.requirements import Gpu, Requirement, Runtime, hardware_of
from enginesmith.core.state import with_int8_states
from enginesmith.core.types import Backend, BuildRequest, Engine, Session, Target


@contextmanager
def open_engine(engine: Engine) -> Iterator[Session]:
    """The engine, opened by the backend of its request, as a session of the model: states of int8 are float32, as the
    model has them. Raises as `check_compatible` and `Backend.open` do."""
    backend = discovery.configure(engine.request.backend, dict(engine.request.options))
    check_compatible(backend, engine)
    with backend.open(replace(engine, request=with_int8_states(engine.request))) as session:
        states = engine.request.quantized_states
        yield WithFloatStates(session, states) if states else session


def check_compatible(backend: Backend, engine: Engine) -> None:
    """Raise EnginesmithError unless `backend` can open `engine` here, IntegrityError where its file is not whole.

    What is checked, in this order: its backend, the installed versions, the hardware, the size of its file.
    """
    if reason := find_incompatibility(backend, engine.request):
        raise EnginesmithError(f"{engine.path.name}: {reason}")
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
        # A server is only told of a runtime that is not known to open the engine; the sessions here refuse it.
        of_runtime = isinstance(found.requirement, Runtime)
        if found.requirement != processor and (found.rules_out or (found.state == "unmet" and of_runtime)):
            on_a_node = "run it on a node that has it, or build it again for this one"
            return f"{found.words}; {'install that version, or build it again here' if of_runtime else on_a_node}"
    lacks = judge(processor, machine).words if processor else ""  # where the backend does not say
    if reason := backend.runs(machine.target if gpu else request.target) or lacks:
        return f"built for {request.target.name}, and cannot run here: {reason}; run it on a node that has one"
    return None


def find_compatible_gpu(
    requires: Sequence[Requirement], target: Target, gpus: Sequence[cuda.GpuDevice]
) -> cuda.GpuDevice | None:
    """The GPU to open an engine on: one of its target's own compute capability, else one that it is compatible with.

    requires: of the engine. None for an engine of CPUs, and where no GPU will do.
    """
    processor = hardware_of(requires)
    if not isinstance(processor, Gpu):
        return None
    compatible = [gpu for gpu in gpus if judge(processor, Machine(gpu.compute_capability)).state == "met"]
    return min(compatible, key=lambda gpu: gpu.compute_capability != target.compute_capability, default=None)
