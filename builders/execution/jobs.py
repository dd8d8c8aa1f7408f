"""A job: a request that is run in a process of its own; what it may use and needs, who runs it, and its events.

A request travels as JSON: the name under which its class is imported, and its fields as `enginesmith.core.codec` writes
them. Events go to a watch in their order, from the thread that runs the job; their `name` is the job's.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar, get_type_hints

from enginesmith.core.codec import decode, encode

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Usage:
    """What a job's processes used, however they ended: wall-clock seconds, and their peak of memory in MiB, without
    mapped files.

    cpu_s: seconds of CPU time, user and system, of the process and those that it waited for; None where not known.
    """

    seconds: float
    peak_mib: float
    cpu_s: float | None = None


@dataclass(frozen=True)
class Waiting:
    """The job is in the queue. why: what it waits for: a slot, memory, a node that has yet to come."""

    name: str
    why: str


@dataclass(frozen=True)
class Started:
    """The job has left the queue. where: 'here', or the name of a node; told again after a retry."""

    name: str
    where: str = "here"


@dataclass(frozen=True)
class PhaseEntered:
    """The job has entered a phase, by its own words (`process.enter_phase`)."""

    name: str
    phase: str


@dataclass(frozen=True)
class Printed:
    """What the job's process has printed since the last such event; a piece may end within a line."""

    name: str
    text: str


@dataclass(frozen=True)
class MemoryHeld:
    """The job's peak of memory is now this high, in MiB; told when it has grown markedly."""

    name: str
    mib: float


@dataclass(frozen=True)
class Retrying:
    """The job is going to be started once more."""

    name: str
    why: str


@dataclass(frozen=True)
class ProcessEnded:
    """The job's processes are gone, with or without a result."""

    name: str
    usage: Usage


JobEvent = Waiting | Started | PhaseEntered | Printed | MemoryHeld | Retrying | ProcessEnded
# Gets each event of a job; what it raises stops the job.
Watch = Callable[[JobEvent], object]


def ignore_event(event: JobEvent) -> None:
    """The `Watch` that does nothing."""


@dataclass(frozen=True)
class ProcessLimits:
    """What one step's process may use: seconds, and MiB of memory. It is killed when it passes either.

    raise_timeout, raise_memory: the remedies that the error then names, e.g. 'raise build.timeout_s in the spec'.
    memory_mib: of the process and those that it starts.
    """

    timeout_s: float = 1800.0
    memory_mib: int = 8192
    raise_timeout: str = "raise the limit"
    raise_memory: str = "raise the limit"


@dataclass(frozen=True)
class Needs:
    """What a job asks of the node that it runs on. `LocalExecutor` uses only `gpus` and `alone`.

    labels: node labels, e.g. {"enginesmith/sm": "sm_89"}.
    required: whether the node must have all of them; else a node that has them is preferred.
    gpus: how many no other job may use while it runs.
    memory_mib: what a scheduler sets aside for it; it may use more, up to its limit.
    alone: whether no other job of a local executor may run at the same time, so that none slows down what it times.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    required: bool = False
    gpus: int = 0
    memory_mib: int = 0
    alone: bool = False


@dataclass(frozen=True)
class WorkerContext:
    """Where a request is run. workdir: an empty folder of its own, which is removed afterwards.

    store: URI of the artifact store that digests name blobs of; '' for requests that read none.
    """

    workdir: Path
    store: str = ""


class Request(Protocol[Result_co]):
    """Work as a value: a frozen dataclass that `enginesmith.core.codec` can write, with the method that does it.

    Its class, and that of its result, are found by import, in the worker as in the driver.
    """

    def run(self, context: WorkerContext) -> Result_co:
        """Do it, in the process that calls this. Raises EnginesmithError."""


@dataclass(frozen=True)
class ReducedRequest(Generic[Result_co]):
    """A request that needs less memory than another and has the same kind of result. change: how it differs, as in
    'with workspace_mib 512'."""

    request: Request[Result_co]
    change: str


@dataclass(frozen=True)
class Job(Generic[Result_co]):
    """A request to be run in a process of its own. store: as in `WorkerContext`.

    reduced: what is run instead at a second try, when memory ran out; None when nothing can be saved.
    limits: of its process.  needs: what the node must have.
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
        """The result of the job's request, tried again where that may help (`builders.execution.local`).

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
