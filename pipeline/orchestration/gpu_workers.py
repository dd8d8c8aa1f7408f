"""Proofs and canaries as Ray tasks on a worker with the GPU, started by a process without one.

Ray places a task on a worker that is there, or has its autoscaler start one, and the task holds one GPU until it ends.
A job is given digests and names; its reports go through the registry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from builders.execution.jobs import Job, Needs, ProcessLimits, Request, Result, WorkerContext
from builders.execution.local import LocalExecutor
from enginesmith.core.errors import InputError, StepError
from enginesmith.core.hardware.machine import AUTO, target_named
from enginesmith.core.types import Target
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions import lookup
from pipeline.canary.automatic import CanaryOutcome, CanaryRequest, canary, sides_of
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import gpu_labels
from pipeline.operations.pending import Pending, PendingProof, prove

# The jobs that the task starts have the limits of their spec, and the worker limits memory. A task that hangs gives its
# GPU back after a day.
LIMITS = ProcessLimits(
    86_400.0, 1 << 40, "replay less traffic, or start it again: what is proven by now is not proven again"
)
# Kinds of failure that concern one version's task, and not the next one's.
_OF_ONE = ("error", "crash", "timeout", "memory", "node-memory", "node-lost")


def gpu_named(name: str) -> Target:
    """The GPU of this name, a generation or a product. Raises InputError for a CPU, for 'auto' and for no target."""
    target = None if name == AUTO else target_named(name)
    if target is None or target.is_cpu:
        raise InputError(f"{name!r} names no GPU of Ray's workers; name a generation or a product, such as sm_89 or l4")
    return target


def prove_on_worker(item: Pending, on: Target, context: RunContext) -> list[PendingProof]:
    """As `pending.prove`, on a worker with this GPU. The failure of the task is the version's row.

    Raises StepError 'no-node' where no worker with it comes, and when cancelled; UnavailableError without a cluster.
    """
    engines = tuple(entry.digest for entry in item.engines if entry.digest)
    request = ProvePending(item.manifest.model, item.manifest.version, engines)
    try:
        return [*_run(f"prove {item.reference} on {on.name}", request, on, context)]
    except StepError as error:
        if error.kind not in _OF_ONE:
            raise
        return [PendingProof(item.reference, None, "error", str(error))]


def canary_on_worker(wanted: CanaryRequest, context: RunContext, say: Callable[[str], None]) -> CanaryOutcome:
    """As `automatic.canary`, on a worker with the GPU that `wanted.target` names.

    No worker is asked for where there is nothing to compare. Raises as `automatic.canary` and `prove_on_worker` do.
    """
    on = gpu_named(wanted.target)
    sides = sides_of(context.store, wanted)
    if isinstance(sides, str):
        return CanaryOutcome(sides)
    found = _run(f"canary {wanted.model}@{wanted.version} on {on.name}", RunCanary(wanted), on, context)
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
    """The outcome of a canary on a worker. said: the lines that it gave `say`."""

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
