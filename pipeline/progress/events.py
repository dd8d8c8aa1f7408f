"""What happens in a run, as values; and the protocol of displays, run state, metrics and traces, which are told it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from builders.execution.jobs import Unwatched, Usage

if TYPE_CHECKING:
    from enginery.registry.runs.history import Expectation
    from enginery.registry.runs.state import RunState
    from pipeline.outcome import Outcome
    from pipeline.values import BuildPlan

State = Literal["done", "cached", "built", "refitted", "failed"]


@dataclass(frozen=True)
class RunBegan:
    """A run of this model has begun. run: its name in the registry."""

    model: str
    run: str


@dataclass(frozen=True)
class Planned:
    """These units are going to be built, or were before, or are refused."""

    plan: "BuildPlan"


@dataclass(frozen=True)
class Predicted:
    """How long a unit will probably take, and how much memory; before it starts."""

    name: str
    expectation: "Expectation"


@dataclass(frozen=True)
class Waiting:
    """A step or unit is in the queue. why: for what."""

    name: str
    why: str


@dataclass(frozen=True)
class Started:
    """A step or unit runs. where: 'here', or the name of a node; told again after a retry."""

    name: str
    where: str = "here"


@dataclass(frozen=True)
class PhaseEntered:
    """What a step or unit does now."""

    name: str
    phase: str


@dataclass(frozen=True)
class Printed:
    """What the process of a step or unit printed, in pieces that end anywhere."""

    name: str
    text: str


@dataclass(frozen=True)
class Retrying:
    """A step or unit is going to be started once more."""

    name: str
    why: str


@dataclass(frozen=True)
class ProcessEnded:
    """The process of a step or unit is gone; what came of it is told by `Finished`, if anything came of it."""

    name: str
    usage: Usage


@dataclass(frozen=True)
class Finished:
    """How a step or unit ended. reason: of a failure, or what a person should know.

    words: for people, where state and reason do not say it: 'built in 2.1 s'.
    """

    name: str
    state: State = "done"
    reason: str = ""
    words: str = ""

    @property
    def outcome(self) -> str:
        """In words: 'cached', 'failed: out of memory'."""
        return self.words or (f"{self.state}: {self.reason}" if self.reason else self.state)


@dataclass(frozen=True)
class VerdictReached:
    """What was found of a unit's engine: 'proven', 'unproven' or 'failed', and why."""

    name: str
    verdict: str
    reason: str

    @property
    def outcome(self) -> str:
        """In words: 'proven: 12 checks passed'."""
        return f"{self.verdict}: {self.reason}"


@dataclass(frozen=True)
class VersionSettled:
    """A version is in the registry. name: 'digits@3', or the model where nothing new was published.

    words: 'published', 'already published', or 'same as digits@2'.
    """

    name: str
    words: str


@dataclass(frozen=True)
class RunConcluded:
    """The run is over, and this is what came of it."""

    outcome: "Outcome"


# Events about one step or unit, by its name.
StepEvent = Predicted | Waiting | Started | PhaseEntered | Printed | Retrying | ProcessEnded | Finished | VerdictReached
Event = RunBegan | Planned | StepEvent | VersionSettled | RunConcluded


class Progress(Protocol):
    """Told of everything that happens in a run; called from several threads.

    The events of one job come in order, from the thread that runs it. What this raises stops the run.
    by: what started the run, such as a Prefect flow run; '' for a person's command.
    """

    by: str

    def of_run(self, model: str, run: str) -> "Progress":
        """Whom to tell of this run; several may go on at once. `run` is its name in the registry."""
        ...

    def emit(self, event: Event) -> None:
        """Tell of an event."""
        ...

    def recorded(self, run: "RunState") -> None:
        """The run's state, as often as it is written; in the writer's thread. What this raises stops nothing."""
        ...

    def watching(self, name: str) -> AbstractContextManager[None]:
        """Surround long work with this, so that the display knows that it is alive."""
        ...


class Silent:
    """Is told everything and does nothing: for tests and library use, and a base for listeners."""

    by = ""

    def of_run(self, model: str, run: str) -> Progress:  # noqa: ARG002 - the protocol's signature
        """Runs are not told apart."""
        return self

    def emit(self, event: Event) -> None:
        """Ignore it."""

    def recorded(self, run: "RunState") -> None:
        """Ignore it."""

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:  # noqa: ARG002 - the protocol's signature
        """Do nothing around the work."""
        yield


class JobEvents(Unwatched):
    """The `Watch` of one job, as events of its step or unit. The memory it holds comes with its end."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._emit, self._name = progress.emit, name

    def waiting(self, why: str) -> None:
        """See `Watch.waiting`."""
        self._emit(Waiting(self._name, why))

    def started(self, where: str) -> None:
        """See `Watch.started`."""
        self._emit(Started(self._name, where))

    def phase(self, name: str) -> None:
        """See `Watch.phase`."""
        self._emit(PhaseEntered(self._name, name))

    def said(self, text: str) -> None:
        """See `Watch.said`."""
        self._emit(Printed(self._name, text))

    def retrying(self, why: str) -> None:
        """See `Watch.retrying`."""
        self._emit(Retrying(self._name, why))

    def ended(self, usage: Usage) -> None:
        """See `Watch.ended`."""
        self._emit(ProcessEnded(self._name, usage))
