"""What happens in a run, as values; and `Progress`, which displays, run state, metrics and traces extend."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from builders.execution.jobs import JobEvent
from builders.execution.jobs import PhaseEntered as PhaseEntered
from builders.execution.jobs import Printed as Printed
from builders.execution.jobs import ProcessEnded as ProcessEnded
from builders.execution.jobs import Retrying as Retrying
from builders.execution.jobs import Started as Started
from builders.execution.jobs import Waiting as Waiting

if TYPE_CHECKING:
    from enginesmith.registry.builds.build_history import Expectation
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
    """A plan was made: its units are going to be built, or were built before, or are refused."""

    plan: "BuildPlan"


@dataclass(frozen=True)
class Predicted:
    """How long a unit will probably take, and how much memory; before it starts."""

    name: str
    expectation: "Expectation"


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
        """How it ended, in words: 'cached', 'failed: out of memory'."""
        return self.words or (f"{self.state}: {self.reason}" if self.reason else self.state)


@dataclass(frozen=True)
class VerdictReached:
    """The verdict on a unit's engine: 'proven', 'unproven' or 'failed', and why."""

    name: str
    verdict: str
    reason: str

    @property
    def outcome(self) -> str:
        """The verdict in words: 'proven: 12 checks passed'."""
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
    """The run is over, with this outcome."""

    outcome: "Outcome"


# Events about one step or unit, by its name. Events of its job have the same name.
StepEvent = Predicted | JobEvent | Finished | VerdictReached
Event = RunBegan | Planned | StepEvent | VersionSettled | RunConcluded


class Progress:
    """Receives every event of a run, from several threads; this one ignores them.

    The events of one job come in order, from the thread that runs it. An error raised here stops the run.
    by: what started the run, such as a Prefect flow run; '' for a person's command.
    """

    by = ""

    def of_run(self, model: str, run: str) -> "Progress":  # noqa: ARG002 - for those who tell runs apart
        """The listener for one run; several may go on at once. run: its name in the registry."""
        return self

    def emit(self, event: Event) -> None:
        """Take note of an event."""

    def watch(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002 - for those who show what takes long
        """A context around long work, during which the display shows that it goes on."""
        return nullcontext()
