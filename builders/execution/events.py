"""What becomes of a job, as values: told in order, from the thread that runs it. name: of the job."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """What a job's processes took, however they ended: wall-clock seconds, and the most resident memory at once."""

    seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Waiting:
    """It is in the queue. why: for what: a slot, memory, a node that has yet to come."""

    name: str
    why: str


@dataclass(frozen=True)
class Started:
    """It has left the queue. where: 'here', or the name of a node; told again after a retry."""

    name: str
    where: str = "here"


@dataclass(frozen=True)
class PhaseEntered:
    """What the job says that it does now (`process.enter_phase`)."""

    name: str
    phase: str


@dataclass(frozen=True)
class Printed:
    """What its process has printed since, in pieces that end anywhere."""

    name: str
    text: str


@dataclass(frozen=True)
class MemoryHeld:
    """It has come to hold this much memory, more than ever before; told when that has grown markedly."""

    name: str
    mib: float


@dataclass(frozen=True)
class Retrying:
    """It is going to be started once more."""

    name: str
    why: str


@dataclass(frozen=True)
class ProcessEnded:
    """Its processes are gone, with or without a result."""

    name: str
    usage: Usage


JobEvent = Waiting | Started | PhaseEntered | Printed | MemoryHeld | Retrying | ProcessEnded
# Is told of them; what it raises stops the job.
Watch = Callable[[JobEvent], object]


def ignore_event(event: JobEvent) -> None:
    """Nobody wants to know."""
