"""A job (a request that runs in its own process): its limits, needs, executors and events.

A request is sent as JSON: the name under which its class is imported, and its fields as `enginesmith.core.codec`
encodes them. The thread that runs a job passes events to its watch in order; their `name` is the job's.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar, get_type_hints

from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import EnginesmithError, IntegrityError, StepError, UnavailableError

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Usage:
    """Resources that a job's processes used, even if they failed: wall-clock seconds, and peak memory in MiB without
    mapped files.

    cpu_s: user and system CPU seconds of the process and the child processes that it waited for; None if unknown.
    """

    seconds: float
    peak_mib: float
    cpu_s: float | None = None


@dataclass(frozen=True)
class Waiting:
    """The job is in the queue. why: what it waits for: a slot, memory, a new node."""

    name: str
    why: str


@dataclass(frozen=True)
class Started:
    """The job has left the queue. where: 'here', or the name of a node. Sent again after a retry."""

    name: str
    where: str = "here"


@dataclass(frozen=True)
class PhaseEntered:
    """The job has reported that it entered a phase (`process.enter_phase`)."""

    name: str
    phase: str


@dataclass(frozen=True)
class Printed:
    """Output of the job's process since the last event of this type; it may end within a line."""

    name: str
    text: str


@dataclass(frozen=True)
class MemoryHeld:
    """The job's peak memory so far, in MiB; sent when it has grown markedly."""

    name: str
    mib: float


@dataclass(frozen=True)
class Retrying:
    """The job will be started again."""

    name: str
    why: str


@dataclass(frozen=True)
class ProcessEnded:
    """The job's processes are gone, with or without a result."""

    name: str
    usage: Usage


JobEvent = Waiting | Started | PhaseEntered | Printed | MemoryHeld | Retrying | ProcessEnded
# Gets each event of a job. An exception that it raises stops the job.
Watch = Callable[[JobEvent], object]


def ignore_event(event: JobEvent) -> None:
    """The `Watch` that does nothing."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a step's process: seconds, and MiB of memory. A process beyond either is killed.

    raise_timeout, raise_memory: the remedies that the error then names, e.g. 'raise build.timeout_s in the spec'.
    memory_mib: of the process and its descendants.
    """

    timeout_s: float = 1800.0
    memory_mib: int = 8192
    raise_timeout: str = "raise the limit"
    raise_memory: str = "raise the limit"


@dataclass(frozen=True)
class Needs:
    """Requirements of a job on its node. `LocalExecutor` uses only `gpus` and `alone`.

    labels: node labels, e.g. {"enginesmith/sm": "sm_89"}.
    required: whether the node must have all of them; else a node that has them is preferred.
    gpus: number of GPUs that no other job may use while it runs.
    memory_mib: MiB that a scheduler reserves for it; it may use more, up to its limit.
    alone: whether no other job of a local executor may run at the same time, so that none affects its timings.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    required: bool = False
    gpus: int = 0
    memory_mib: int = 0
    alone: bool = False


@dataclass(frozen=True)
class WorkerContext:
    """Where a request is run. workdir: an empty folder for this request, removed afterwards.

    store: URI of the artifact store with the blobs whose digests the request has; '' if it reads no blobs.
    """

    workdir: Path
    store: str = ""


class Request(Protocol[Result_co]):
    """A unit of work: a frozen dataclass that `enginesmith.core.codec` can encode, with a method that does the work.

    Worker and driver import its class and the class of its result.
    """

    def run(self, context: WorkerContext) -> Result_co:
        """Do the work in the calling process, and return its result. Raises EnginesmithError."""


@dataclass(frozen=True)
class ReducedRequest(Generic[Result_co]):
    """A request that needs less memory than another and has the same kind of result. change: how it differs, as in
    'with workspace_mib 512'."""

    request: Request[Result_co]
    change: str


@dataclass(frozen=True)
class Job(Generic[Result_co]):
    """A request to run in a separate process. store: as in `WorkerContext`.

    reduced: the request for a second try after memory ran out; None if no request needs less memory.
    limits: limits of the process.  needs: requirements on the node.
    """

    name: str
    request: Request[Result_co]
    store: str = ""
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    needs: Needs = field(default_factory=Needs)
    reduced: ReducedRequest[Result_co] | None = None


class Executor(Protocol):
    """Runs jobs, each in a fresh process; blocking and thread-safe."""

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> Result:
        """The result of the job's request, which is retried if that may help (`run_with_retries`).

        Raises StepError (`errors.StepError` lists its kinds), or the EnginesmithError that the request raised.
        """

    def cancel(self) -> None:
        """Kill the jobs that run and refuse new ones; safe from a signal handler."""


@dataclass(frozen=True)
class ChildTask:
    """The content of job.json. request: as `encode_request` writes it."""

    request: object
    store: str


def encode_request(request: Request[object]) -> dict[str, object]:
    """A request with the name of its class, as JSON: {"type": "package.module:Class", "fields": {...}}."""
    kind = type(request)
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": encode(request)}


def decode_request(data: object) -> Request[object]:
    """The request that `encode_request` wrote; imports the module of its class. Raises IntegrityError."""
    envelope = decode(data, _Named)
    module, _, name = envelope.type.partition(":")
    kind: type[Request[object]] = getattr(importlib.import_module(module), name)
    return decode(envelope.fields, kind)


@dataclass(frozen=True)
class _Named:
    type: str
    fields: object


def result_type(request: Request[Result]) -> type[Result]:
    """The type that the request's `run` is declared to return."""
    kind: type[Result] = get_type_hints(type(request).run)["return"]
    return kind


# Which failures are retried:
#
# | kind | retried | change |
# |---|---|---|
# | error, timeout, cancelled, no-node | no | the same would happen |
# | crash | once, on a cluster | another node, if one is suitable; on a single host the crash would happen again |
# | memory (the job's limit) | once, if the request can be reduced | the reduced request; the user's limit stays |
# | node-memory | once | the reduced request if there is one, and more memory reserved by the scheduler |
# | node-lost | `MOST_LOST` times | another node |

MOST_LOST = 3
# Factor of the memory to reserve over the measured peak, which may be exceeded between samples (`process.TICK_S`).
_ROOM = 1.25
_ONCE = ("crash", "memory", "node-memory")


@dataclass(frozen=True)
class NextTry(Generic[Result]):
    """A job to start again. other_node: on another node than before, if possible."""

    job: Job[Result]
    why: str
    other_node: bool = False


def run_with_retries(
    job: Job[Result], watch: Watch, attempt: Callable[[Job[Result], bool], Result], clustered: bool
) -> Result:
    """Result of `attempt(job, other_node)`, retried by the rules above. clustered: whether there are more hosts.

    watch: gets each event of the job.
    Raises what `attempt` raises; after several tries, a StepError with all their reasons.
    """
    failures: list[StepError] = []
    on_other_node = False
    while True:
        try:
            return attempt(job, on_other_node)
        except StepError as error:
            failures.append(error)
            next_attempt = next_try(job, failures, clustered)
            if next_attempt is None:
                raise _summarize(failures) from error
        except (UnavailableError, IntegrityError):
            raise  # not a failure of the job
        except EnginesmithError as error:
            if not failures:
                raise
            raise _summarize([*failures, StepError(str(error))]) from error
        watch(Retrying(job.name, next_attempt.why))
        job, on_other_node = next_attempt.job, next_attempt.other_node


def next_try(job: Job[Result], failures: Sequence[StepError], clustered: bool) -> NextTry[Result] | None:
    """The try after these failures; None when another would not help."""
    kind = failures[-1].kind
    kind_count = sum(failure.kind == kind for failure in failures)
    if kind == "node-lost" and kind_count <= MOST_LOST:
        return NextTry(job, f"its node was lost; try {len(failures) + 1}: on another node", other_node=True)
    if kind_count > 1 or kind not in _ONCE:
        return None
    if kind == "crash":
        return NextTry(job, "it crashed; retry: on another node if one suits", other_node=True) if clustered else None
    reduction = job.reduced
    if kind == "memory":
        return NextTry(reduce(job), f"it held too much memory; retry: {reduction.change}") if reduction else None
    larger_job = more_memory(reduce(job), failures[-1].peak_mib)
    change_text = f"{reduction.change}, " if reduction and reduction.change else ""
    changes_text = f"{change_text}with {larger_job.needs.memory_mib} MiB set aside for it"
    return NextTry(larger_job, f"its node ran out of memory; retry: {changes_text}")


def reduce(job: Job[Result]) -> Job[Result]:
    """The job with its reduced request, if it has one; there is no further reduction."""
    return replace(job, request=job.reduced.request, reduced=None) if job.reduced else job


def more_memory(job: Job[Result], peak_mib: float) -> Job[Result]:
    """The job with twice the memory in its needs, or 1.25 times its measured peak if that is more, up to its limit."""
    request_mib = max(2 * job.needs.memory_mib, int(_ROOM * peak_mib))
    return replace(job, needs=replace(job.needs, memory_mib=min(request_mib, job.limits.memory_mib)))


def _summarize(failures: Sequence[StepError]) -> StepError:
    """The last failure, with the first lines of the earlier ones in its message."""
    cause = failures[-1]
    if len(failures) == 1:
        return cause
    history = "; ".join(dict.fromkeys(str(failure).splitlines()[0] for failure in failures[:-1]))
    return StepError(
        f"{cause} (after {len(failures)} tries; before that: {history})", cause.kind, cause.log, cause.peak_mib
    )
