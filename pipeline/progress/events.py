"""What is told of a run: the protocol that displays, the run's state, metrics and traces answer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from builders.jobs import Usage

if TYPE_CHECKING:
    from pipeline.history import Expectation
    from pipeline.outcome import Outcome
    from pipeline.runs.state import RunState
    from pipeline.values import BuildPlan

# What the steps call the proof of a unit: this and the unit's name.
VERDICT = "verdict on "


class Progress(Protocol):
    """Told about every step and unit, by its name; called from several threads.

    What is told of one job comes in order, from the thread that runs it. What this raises stops the run.
    by: what started the run, such as a Prefect flow run; '' for a person's command.
    """

    by: str

    def of_run(self, model: str, run: str) -> "Progress":
        """Whom to tell of this run; several may go on at once. `run` is its name in the registry."""
        ...

    def began(self, model: str, run: str) -> None:
        """A run of this model has begun."""

    def planned(self, plan: "BuildPlan") -> None:
        """These units are going to be built, or were before, or are refused."""

    def expects(self, name: str, expectation: "Expectation") -> None:
        """How long a unit will probably take, and how much memory; told before it starts."""

    def waiting(self, name: str, why: str) -> None:
        """It is in the queue, and for what."""

    def started(self, name: str, where: str = "here") -> None:
        """It runs, on this node; told again after a retry."""

    def phase(self, name: str, phase: str) -> None:
        """What it does now."""

    def said(self, name: str, text: str) -> None:
        """What its process printed, in pieces that end anywhere."""

    def retrying(self, name: str, why: str) -> None:
        """It is going to be started once more."""

    def ended(self, name: str, usage: Usage) -> None:
        """Its process is gone; what came of it is told by `finished`, if anything came of it."""

    def finished(self, name: str, outcome: str) -> None:
        """How it ended. The first word is its state: 'done', 'cached', 'built in 2.1 s', 'failed: why'."""

    def concluded(self, outcome: "Outcome") -> None:
        """The run is over, and this is what came of it."""

    def recorded(self, run: "RunState") -> None:
        """The run's state, as often as it is written; in the writer's thread. What this raises stops nothing."""

    def watching(self, name: str) -> AbstractContextManager[None]:
        """Surround long work with this, so that the display knows that it is alive."""
        ...


class Silent:
    """Hears nothing: for tests and library use, and a base for who wants to hear a part."""

    by = ""

    def of_run(self, model: str, run: str) -> Progress:  # noqa: ARG002 - the protocol's signature
        """Runs are not told apart."""
        return self

    def began(self, model: str, run: str) -> None:
        """Ignore it."""

    def planned(self, plan: "BuildPlan") -> None:
        """Ignore it."""

    def expects(self, name: str, expectation: "Expectation") -> None:
        """Ignore it."""

    def waiting(self, name: str, why: str) -> None:
        """Ignore it."""

    def started(self, name: str, where: str = "here") -> None:
        """Ignore it."""

    def phase(self, name: str, phase: str) -> None:
        """Ignore it."""

    def said(self, name: str, text: str) -> None:
        """Ignore it."""

    def retrying(self, name: str, why: str) -> None:
        """Ignore it."""

    def ended(self, name: str, usage: Usage) -> None:
        """Ignore it."""

    def finished(self, name: str, outcome: str) -> None:
        """Ignore it."""

    def concluded(self, outcome: "Outcome") -> None:
        """Ignore it."""

    def recorded(self, run: "RunState") -> None:
        """Ignore it."""

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:  # noqa: ARG002 - the protocol's signature
        """Do nothing around the work."""
        yield


@dataclass(frozen=True)
class Told:
    """The `Watch` of one job that passes on what it hears, with the name of its step or unit."""

    progress: Progress
    name: str

    def waiting(self, why: str) -> None:
        """See `Watch.waiting`."""
        self.progress.waiting(self.name, why)

    def started(self, where: str) -> None:
        """See `Watch.started`."""
        self.progress.started(self.name, where)

    def phase(self, name: str) -> None:
        """See `Watch.phase`."""
        self.progress.phase(self.name, name)

    def said(self, text: str) -> None:
        """See `Watch.said`."""
        self.progress.said(self.name, text)

    def holds(self, mib: float) -> None:
        """Nothing shows it while it changes; the most of it comes with `ended`."""

    def retrying(self, why: str) -> None:
        """See `Watch.retrying`."""
        self.progress.retrying(self.name, why)

    def ended(self, usage: Usage) -> None:
        """See `Watch.ended`."""
        self.progress.ended(self.name, usage)


def state_of(outcome: str) -> tuple[str, str]:
    """The first word of what `finished` was told, and the reason after a colon: ('failed', 'out of memory')."""
    word, _, reason = outcome.partition(":")
    return word.split(" ", 1)[0], reason.strip()
