"""Proofs and canaries on a Ray worker that has the GPU, asked for by a process that has none.

Ray's workers hold the GPUs of their generation, busy or idle, so whatever needs one is a task of Ray, as a build is:
Ray places it on a worker that is there, or has its autoscaler start one, and the task holds one GPU until it has ended.
Values are small: a job is told digests and names, and its reports go through the registry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from builders.execution.jobs import Job, Needs, ProcessLimits, Request, Result, WorkerContext
from builders.execution.local import LocalExecutor
from enginery.core.errors import InputError, StepError
from enginery.core.hardware.machine import AUTO, target_named
from enginery.core.types import Target
from enginery.registry.store.base import open_store
from enginery.registry.versions import lookup
from pipeline.canary.automatic import CanaryOutcome, CanaryRequest, canary, sides_of
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import gpu_labels
from pipeline.operations.revalidate import Pending, PendingProof, prove

# Engines that are proven have the limits of their spec, each by itself; memory is the worker's to limit. A task that
# hangs gives its GPU back after a day.
LIMITS = ProcessLimits(
    86_400.0, 1 << 40, "replay less traffic, or start it again: what is proven by now is not proven again"
)
# What ends one version's task, and says nothing about the next one's.
_OF_ONE = ("error", "crash", "timeout", "memory", "node-memory", "node-lost")


def gpu_named(name: str) -> Target:
    """The GPU, a generation or a product of it, that workers have. Raises InputError for none, and for 'auto'."""
    target = None if name == AUTO else target_named(name)
    if target is None or target.is_cpu:
        raise InputError(f"{name!r} names no GPU of Ray's workers; name a generation or a product, such as sm_89 or l4")
    return target


def prove_on_worker(item: Pending, on: Target, context: RunContext) -> list[PendingProof]:
    """As `operations.pending.prove`, on a worker with this GPU; a task that fails is the version's row.

    Raises StepError 'no-node' where no worker with it comes, and when cancelled; UnavailableError without a cluster.
    """
    name = f"prove {item.reference} on {on.name}"
    engines = tuple(entry.digest for entry in item.engines if entry.digest)
    try:
        rows = _run(name, ProvePending(item.manifest.model, item.manifest.version, engines), on, context)
    except StepError as error:
        if error.kind not in _OF_ONE:
            raise
        return [PendingProof(item.reference, None, "error", str(error))]
    return [*rows]


def canary_on_worker(wanted: CanaryRequest, context: RunContext, say: Callable[[str], None]) -> CanaryOutcome:
    """As `automatic.canary`, on a worker with the GPU that `wanted.target` names; both engines take turns on it.

    No worker is asked for where there is nothing to compare. Raises as `automatic.canary` and `prove_on_worker` do.
    """
    on = gpu_named(wanted.target)
    sides = sides_of(context.store, wanted)
    if isinstance(sides, str):
        return CanaryOutcome(sides)
    name = f"canary {wanted.model}@{wanted.version} on {on.name}"
    found = _run(name, RunCanary(wanted), on, context)
    for line in found.said:
        say(line)
    return found.outcome


@dataclass(frozen=True)
class ProvePending:
    """Prove engines of a version on the machine that runs this. engines: digests."""

    model: str
    version: str
    engines: tuple[str, ...]

    def run(self, context: WorkerContext) -> tuple[PendingProof, ...]:
        """A row for each engine."""
        place, executor = open_store(context.store), LocalExecutor()
        manifest = lookup.load(place, self.model, self.version)
        item = Pending(manifest, tuple(entry for entry in manifest.engines if entry.digest in self.engines))
        return tuple(prove(item, RunContext(place, executor, executor)))


@dataclass(frozen=True)
class CanaryOnWorker:
    """What a canary on a worker found. said: lines for people, meanwhile."""

    outcome: CanaryOutcome
    said: tuple[str, ...]


@dataclass(frozen=True)
class RunCanary:
    """Run a canary on the machine that runs this."""

    wanted: CanaryRequest

    def run(self, context: WorkerContext) -> CanaryOnWorker:
        """The verdict; its report is in the registry."""
        said: list[str] = []
        found = canary(open_store(context.store), self.wanted, said.append)
        return CanaryOnWorker(found, tuple(said))


def _run(name: str, request: Request[Result], on: Target, context: RunContext) -> Result:
    needs = Needs(gpu_labels(on), required=True, gpus=1)
    return context.run_job(context.executor, name, Job(name, request, context.store.uri, LIMITS, needs))
