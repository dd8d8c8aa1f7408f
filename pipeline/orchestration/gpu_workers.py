"""Payloads of flow runs, and the Ray workers that a build needs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from builders.execution.jobs import Job, Needs, ProcessLimits, Request, Result, WorkerContext
from builders.execution.local import LocalExecutor
from enginesmith.core.errors import InputError, StepError, digest_of
from enginesmith.core.hardware.machine import AUTO, target_named
from enginesmith.core.types import Target
from enginesmith.registry.builds.runs import recall, remember
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions import lookup
from pipeline.canary.automatic import CanaryOutcome, CanaryRequest, canary, sides_of
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import gpu_labels
from pipeline.operations.validate import Pending, Validated, validate_pending

# Proofs and canaries as Ray tasks on a worker with the GPU, started by a process without one.
#
# Ray places a task on a worker that is there, or has its autoscaler start one, and the task holds one GPU until it
# ends. A job is given digests and names; its reports go through the registry.

# The jobs that the task starts have the limits of their spec, and the worker limits memory. A task that hangs gives its
# GPU back after a day.
LIMITS = ProcessLimits(
    86_400.0, 1 << 40, "replay less traffic, or start it again: engines that are proven by now are skipped"
)
# Kinds of failure that concern one version's task, and not the next one's.
_OF_ONE = ("error", "crash", "timeout", "memory", "node-memory", "node-lost")


def gpu_named(name: str) -> Target:
    """The GPU of this name, a generation or a product. Raises InputError for a CPU, for 'auto' and for no target."""
    target = None if name == AUTO else target_named(name)
    if target is None or target.is_cpu:
        raise InputError(f"{name!r} names no GPU of Ray's workers; name a generation or a product, such as sm_89 or l4")
    return target


def validate_on_worker(pending_version: Pending, on: Target, context: RunContext) -> list[Validated]:
    """As `validate_pending`, on a worker with this GPU. The failure of the task is the version's row.

    Raises StepError 'no-node' where no worker with it comes, and when cancelled; UnavailableError without a cluster.
    """
    engines = tuple(entry.digest for entry in pending_version.engines if entry.digest)
    request = ValidatePending(pending_version.manifest.model, pending_version.manifest.version, engines)
    try:
        return [*_run(f"prove {pending_version.manifest.reference} on {on.name}", request, on, context)]
    except StepError as error:
        if error.kind not in _OF_ONE:
            raise
        return [Validated(pending_version.manifest.reference, None, "error", str(error))]


def canary_on_worker(request: CanaryRequest, context: RunContext, say: Callable[[str], None]) -> CanaryOutcome:
    """As `automatic.canary`, on a worker with the GPU that `request.target` names.

    No worker is asked for where there is nothing to compare. Raises as `automatic.canary` and `validate_on_worker` do.
    """
    gpu = gpu_named(request.target)
    references = sides_of(context.store, request)
    if isinstance(references, str):
        return CanaryOutcome(references)
    worker_outcome = _run(f"canary {request.model}@{request.version} on {gpu.name}", RunCanary(request), gpu, context)
    for line in worker_outcome.said:
        say(line)
    return worker_outcome.outcome


@dataclass(frozen=True)
class ValidatePending:
    """Prove engines of a version on the machine that runs this. engines: digests."""

    model: str
    version: str
    engines: tuple[str, ...]

    def run(self, context: WorkerContext) -> tuple[Validated, ...]:
        """A row for each engine."""
        store, executor = open_store(context.store), LocalExecutor()
        manifest = lookup.load(store, self.model, self.version)
        pending_version = Pending(manifest, tuple(entry for entry in manifest.engines if entry.digest in self.engines))
        return tuple(validate_pending(pending_version, RunContext(store, executor, executor)))


@dataclass(frozen=True)
class CanaryOnWorker:
    """The outcome of a canary on a worker. said: the lines that it passed to `say`."""

    outcome: CanaryOutcome
    said: tuple[str, ...]


@dataclass(frozen=True)
class RunCanary:
    """Run a canary on the machine that runs this."""

    wanted: CanaryRequest

    def run(self, context: WorkerContext) -> CanaryOnWorker:
        """The verdict; its report is in the registry."""
        messages: list[str] = []
        canary_outcome = canary(open_store(context.store), self.wanted, messages.append)
        return CanaryOnWorker(canary_outcome, tuple(messages))


def _run(name: str, request: Request[Result], on: Target, context: RunContext) -> Result:
    needs = Needs(gpu_labels(on), required=True, gpus=1)
    return context.run_to_end(context.executor, name, Job(name, request, context.store.uri, LIMITS, needs))


# The events that Enginesmith sends to a Prefect server: the fields of each, and the registry's record of those sent.
#
# `watch`, and servers as in examples/drifting_server.py, send nothing else; triggers read nothing else; and
# docs/guides/deployments.md has a table of them. Tests compare all of them. Prefect is not imported here, so that a run
# with nothing to do need not load it.

_RECORD = "notified"
REGISTERED = "enginesmith.model.registered"
PUBLISHED = "enginesmith.engine.published"
UNPROVEN = "enginesmith.engine.unproven"
JUDGED = "enginesmith.canary.finished"
DRIFTED = "enginesmith.traffic.drifted"
ADVANCED = "enginesmith.rollout.advanced"
HALTED = "enginesmith.rollout.halted"
DONE = "enginesmith.rollout.done"
_ROLLOUT = ("version", "channel", "rollout", "wave", "why")
# Required fields of an event, besides the model and the registry, and optional ones.
FIELDS: Mapping[str, tuple[str, ...]] = {
    REGISTERED: ("spec", "by"),
    PUBLISHED: ("version", "manifest"),
    UNPROVEN: ("version", "target", "engines", "by"),
    JUDGED: ("version", "channel", "target", "verdict", "report"),
    DRIFTED: ("version", "rate", "reference", "since", "by"),
    ADVANCED: _ROLLOUT,
    HALTED: _ROLLOUT,
    DONE: _ROLLOUT,
}
OPTIONAL_FIELDS: Mapping[str, tuple[str, ...]] = {REGISTERED: ("digest", "units")}


def check_payload(event: str, field_names: Iterable[str]) -> None:
    """Raise ValueError for a payload that lacks a field or has an unknown one, which is a bug of the sender."""
    names, required_names = set(field_names), {"model", "registry", *FIELDS[event]}
    missing_fields, extra_fields = required_names - names, names - required_names - {*OPTIONAL_FIELDS.get(event, ())}
    if missing_fields or extra_fields:
        raise ValueError(f"{event}: lacks {sorted(missing_fields)}, has unknown {sorted(extra_fields)}; see {__name__}")


def was_sent(store: Store, event: str, about: str) -> bool:
    """Whether an event about a digest was sent before, by this process or another."""
    return recall(store, _RECORD, _key(event, about)) is not None


def remember_sent(store: Store, event: str, about: str, event_id: str) -> None:
    """Record that an event about a digest was sent. event_id: its id on the server."""
    remember(store, _RECORD, _key(event, about), {"id": event_id})


def _key(event: str, about: str) -> str:
    return digest_of({"event": event, "about": about})
