"""The machine that makes a compile cache: what it is, and whether it can make one for a target."""

from builders.backends.optional_methods import versions_of
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.evaluation import list_facts
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.requirements import Installation, for_target, same_versions
from enginesmith.core.types import CPU_KIND, Target
from pipeline.compile.caches.judged import Maker

# A label of the nodes of a cluster that have this kind of CPU.
CPU_LABEL = "enginesmith/cpu"
_RUNTIMES = ("torch", "triton")


def wanted_runtimes() -> dict[str, str]:
    """Versions that the worker must have: torch's, without the mark of its build (2.13.0+cpu), which differs by kind of
    machine."""
    return {name: version.partition("+")[0] for name, version in versions_of("torch").items()}


def describe_maker(target: Target) -> Maker:
    """This machine, as the one that makes a cache for a target."""
    toolchain = versions_of(*_RUNTIMES)
    kind = this_kind().name if target.is_cpu else ""
    facts = tuple(list_facts(cuda=not target.is_cpu).items())
    requires = for_target(target, only=kind), *same_versions(toolchain, *_RUNTIMES), Installation(facts)
    return Maker({**toolchain, **({CPU_KIND: kind} if kind else {})}, requires, describe_host())


def explain_refusal(target: Target) -> str | None:
    """Why no cache for this target can be made here; None where it can. torch compiles for the device that it has."""
    if target.is_cpu:
        named = this_kind().name
        return (
            None if target.name in ("cpu", named) else f"torch compiles for this CPU, which is {named}; build it there"
        )
    if "+cpu" in versions_of("torch").get("torch", "+cpu"):
        return f"torch has no CUDA here; build it on a node with {target.name}"
    return cuda.explain_missing_gpu(target)
