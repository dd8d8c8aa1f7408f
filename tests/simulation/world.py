"""The world of a simulated run: actors that take turns in one thread, a clock, faults, and a trace.

Each actor is a greenlet that runs the product's own code. It gives up its turn only at requests to the store and where
it sleeps, so that a run is one interleaving of requests, and a seed decides which.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from greenlet import greenlet

from enginesmith.core.errors import EnginesmithError
from tests.simulation.choices import Choices

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
# Requests of one run; more is a loop without end.
MOST_STEPS = 40_000
# Time that a request takes.
_REQUEST = timedelta(milliseconds=20)
# How far the clocks of a store's servers are from the true time; more is what `leases.MARGIN` does not bear.
APART = timedelta(seconds=25)


class Crash(BaseException):
    """The process of an actor is gone: it makes no request any more, not even to clean up."""


class Violation(AssertionError):
    """A rule of the registry was broken."""


@dataclass(frozen=True)
class Temper:
    """How rough a run is. Probabilities for each request, and the most that an actor's clock is off.

    switch: another actor has the next turn.  refuse: the store answers 503, nothing is done.  lose: the request is done
    and its answer lost.  ask_again: the same of a document's write, whose writer looks what became of it.  crash: the
    process ends before or after the request.  stall: a slow process stands still for `stall_s`.  stale: a list says
    what was there up to `stale_s` ago, and what was removed since.  apart: the store's clock is `APART` before or after
    the true time.
    """

    switch: float = 0.3
    refuse: float = 0.0
    lose: float = 0.0
    ask_again: float = 0.0
    crash: float = 0.0
    stall: float = 0.0
    stall_s: float = 7200.0
    stale: float = 0.0
    stale_s: float = 5.0
    skew_s: float = 0.0
    apart: float = 0.0


@dataclass
class Call:
    """One call of an operation. result: None while it runs and where its answer is unknown.  began, ended: numbers of
    steps; ended is None for one whose answer never came.  at: when it began, by the true clock."""

    actor: str
    what: str
    began: int
    at: datetime
    ended: int | None = None
    result: object = None
    error: BaseException | None = None

    @property
    def acknowledged(self) -> bool:
        """Whether the caller knows that it was done."""
        return self.ended is not None and self.error is None


@dataclass(eq=False)
class Actor:
    """A process, or a thread of one. skew: what its clock is ahead.  wakes: when it goes on, by the true clock.
    parent: the process of a thread, which ends with it.  slow: whether it stands still now and then.  frozen: until
    when all of its threads do.  counts_until: the end of the lease or claim that it counts on until its next write.
    on_step: what is checked at each step.  process: that it is, or is a thread of."""

    name: str
    work: Callable[[], object]
    skew: timedelta = timedelta()
    wakes: datetime = BEGIN
    dead: bool = False
    done: bool = False
    parent: "Actor | None" = None
    slow: bool = False
    frozen: datetime = BEGIN
    counts_until: datetime | None = None
    on_step: Callable[[], None] | None = None
    error: BaseException | None = None
    process: "Actor" = field(init=False)
    thread: greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.process = self.parent or self

    @property
    def goes_on(self) -> datetime:
        """When it has a turn again."""
        frozen_until = self.process.frozen
        return frozen_until if frozen_until > self.wakes else self.wakes


class World:
    """What all actors of a run share."""

    def __init__(self, choices: Choices, temper: Temper, begin: datetime = BEGIN, name: str = "run") -> None:
        self.name = name
        self.choices, self.temper = choices, temper
        self.time = begin
        self.steps = 0
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.calls: list[Call] = []
        self._notes: list[tuple[int, datetime, str, str]] = []
        self.calm = True
        self._tokens = 0
        self._chosen: Actor | None = None
        self._hub = greenlet.getcurrent()

    def now(self) -> datetime:
        """The time by the clock of whoever has the turn."""
        return self.time + (self.current.skew if self.current else timedelta())

    def token(self, size: int = 16) -> str:
        """A unique name, the same in every repetition."""
        self._tokens += 1
        return f"{self._tokens:0{2 * size}x}"[-2 * size :]

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._notes.append((self.steps, self.time, self.current.name if self.current else "-", text))

    @property
    def trace(self) -> tuple[str, ...]:
        """Events by line: number of requests, true time, actor, text. Equal in every repetition."""
        lines = (f"{step:5} {note_time:%d. %H:%M:%S} {who:12} {text}" for step, note_time, who, text in self._notes)
        return tuple(re.sub(r"(watched|enginesmith-mirror)-\w{8}", r"\1", line) for line in lines)

    def run(self, actors: list[Actor], *, calm: bool = False) -> None:
        """Run the actors until each has ended. calm: without faults and clocks that are off."""
        self.actors, self.calm = list(actors), calm
        for actor in actors:
            actor.wakes = self.time
            actor.thread = greenlet(self._body(actor), self._hub)
            if not calm and self.temper.skew_s:
                sign = self.choices.pick(0.8, 8)
                actor.skew = timedelta(seconds=(sign - 4) * self.temper.skew_s / 4 if sign else 0)
        try:
            for actor in actors:
                while not actor.done:
                    self._resume(self._chosen or self._next())
        finally:
            for actor in self.actors:  # what is left after a violation must not go on in another run
                actor.dead = True
                if actor.thread:
                    actor.thread.throw()
            self.current, self.calm = None, True

    def call(self, what: str, work: Callable[[], object]) -> Call:
        """Call an operation of the product as a user does, and record how it ended. Raises Violation for a bug."""
        assert self.current is not None
        entry = Call(self.current.name, what, self.steps, self.time)
        self.calls.append(entry)
        self.note(f"call {what}")
        try:
            entry.result = work()
        except EnginesmithError as error:
            entry.error = error
        except (Crash, Violation):
            raise
        except Exception as error:
            raise Violation(f"{what} ended in {type(error).__name__}: {error}") from error
        entry.ended = self.steps
        self.note(f"  -> {f'{type(entry.error).__name__}: {str(entry.error)[:140]}' if entry.error else entry.result}")
        return entry

    def sleep(self, seconds: float) -> None:
        """Let the others go on meanwhile."""
        actor = self._running()
        actor.wakes = self.time + timedelta(seconds=seconds) if seconds > 0 else self.time
        self._give_up_turn(actor)

    @contextmanager
    def repeat(self, work: Callable[[], object], every_s: float) -> Iterator[None]:
        """Call `work` every so many seconds in a thread of the actor that has the turn, while the block runs."""
        parent, is_over = self._running(), False

        def body() -> None:
            while True:
                self.sleep(every_s)
                if is_over or parent.done:
                    return
                with suppress(EnginesmithError):
                    work()

        thread = Actor(f"{parent.name}'", body, parent.skew, self.time, parent=parent)
        thread.thread = greenlet(self._body(thread), self._hub)
        self.actors.append(thread)
        try:
            yield
        finally:
            is_over = True

    def before_request(self) -> None:
        """Have the turn go to another actor, or this one stand still or end, if the run's decisions say so."""
        actor = self._running()
        self.steps += 1
        self.time += _REQUEST
        if actor.on_step:
            actor.on_step()
        if self.steps > MOST_STEPS:
            raise Violation(f"no end after {MOST_STEPS} requests")
        if self.calm:
            return
        temper = self.temper
        is_stood = temper.stall and actor.process.slow and self.maybe_stall()
        if not is_stood and len(self.actors) > 1 and self.choices.pick(temper.switch, 1):
            actor.wakes = self.time
            self._give_up_turn(actor)
        if temper.crash:
            self.maybe_crash()

    @contextmanager
    def each_step(self, check: Callable[[], None]) -> Iterator[None]:
        """Call `check` at each step of whoever has the turn while the block runs; changes of files are steps, too."""
        actor = self._running()
        actor.on_step = check
        yield
        actor.on_step = None  # unless it was killed: then it changes nothing any more

    def rely(self, check: Callable[[], None], end: Callable[[], datetime], times: int) -> None:
        """Have whoever has the turn check its lease or claim, perhaps after it stood still, and rely on it until its
        end, by the store's clock. times: how much likelier it stands still than at a request."""
        self.rely_no_more()
        self.maybe_stall(times)
        check()
        self._running().counts_until = end() - APART

    def rely_no_more(self) -> None:
        """Note that whoever has the turn wrote what it checked its lease for, or does something that may last."""
        if self.current:
            self.current.counts_until = None

    def maybe_stall(self, times: int = 1) -> bool:
        """Have a slow process stand still, or one of its threads, if the run's decisions say so; whether it did. times:
        how much likelier than at another request.

        Not between a look at the clock and the write that it is for, for longer than the lease or claim lasts: this
        the protocol does not bear (docs/concepts/registry-protocol.md, "A collection").
        """
        actor = self._running()
        kind = self.choices.pick(self.temper.stall * times, 2) if actor.process.slow and not self.calm else 0
        if not kind:
            return False
        end_time = self.time + timedelta(seconds=self.temper.stall_s)
        still_actors = [actor] if kind == 2 else [other for other in self.actors if other.process is actor.process]
        if any(other.counts_until and end_time > other.counts_until for other in still_actors):
            return False
        if kind == 1:
            actor.process.frozen = end_time
        self.note(f"{'stands' if kind == 1 else 'a thread stands'} still for {self.temper.stall_s:g} s")
        self.sleep(self.temper.stall_s)
        return True

    def maybe_crash(self) -> None:
        """End the actor that has the turn, if the run's decisions say so."""
        if not self.calm and self.choices.pick(self.temper.crash, 1):
            actor = self._running()
            actor.dead = True
            self.note("crashes")
            raise Crash

    def _running(self) -> Actor:
        actor = self.current
        assert actor is not None
        if actor.dead or actor.parent is not None:
            self._alive(actor)
        return actor

    def _alive(self, actor: Actor) -> None:
        if actor.dead or (actor.parent is not None and actor.parent.dead):
            raise Crash

    def _body(self, actor: Actor) -> Callable[[], None]:
        def body() -> None:
            try:
                with suppress(Crash):
                    actor.work()
            except BaseException as error:
                actor.error = error
            actor.done = True

        return body

    def _next(self) -> Actor:
        """The next one: by a decision among those that are awake; else the one that wakes first."""
        current_time = self.time
        actors = [actor for actor in self.actors if not actor.done]
        awake = [actor for actor in actors if actor.wakes <= current_time and actor.process.frozen <= current_time]
        if not awake:
            first_actor = min(actors, key=lambda actor: actor.goes_on)
            self.time = first_actor.goes_on
            return first_actor
        if len(awake) == 1:
            return awake[0]
        if self.current in awake:
            awake.remove(self.current)
            awake.insert(0, self.current)
        return awake[self.choices.pick(1.0, len(awake) - 1) if not self.calm else 0]

    def _give_up_turn(self, actor: Actor) -> None:
        """Go on when this one has its turn again, at once if it has the next one."""
        chosen = self._next()
        if chosen is not actor:
            self._chosen = chosen
            self._hub.switch()
        self._alive(actor)

    def _resume(self, actor: Actor) -> None:
        self.current, self._chosen = actor, None
        actor.thread.switch()
        if actor.error is not None:
            raise actor.error
