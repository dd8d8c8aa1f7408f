"""Sessions with a place for what an engine may do wrongly between calls, and a clock that only calls move."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from enginesmith.core.errors import ModelError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Dim, TensorSpec
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, Fault, Linear
from validation.calls.checks import Allowance, call_checks
from validation.fuzz.run import FuzzSides
from validation.golden.golden_set import GoldenSet, freeze
from validation.limits.budget import Budgets, StagedLimits, default_budget

BUDGET = default_budget("engine", "fp32")
SEEN = freeze(GOLDEN, SPECS, DIMS, Linear().run)


class Nth(Linear):
    """`Linear` with a fault in some calls. at: number of the call, from 1 -> whether it has the fault."""

    def __init__(self, fault: Fault, at: Callable[[int], bool]) -> None:
        super().__init__()
        self.planted, self.at, self.calls = fault, at, 0

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.calls += 1
        self.fault = self.planted if self.at(self.calls) else lambda x, y: y
        return super().run(inputs)


class Buffers(Linear):
    """`Linear` that answers in buffers of its own. count: how many for each shape.  shared: one size fits all.

    start: the first call that does.
    """

    def __init__(self, count: int = 1, shared: bool = False, start: int = 1) -> None:
        super().__init__()
        self.count, self.shared, self.start, self.calls = count, shared, start, 0
        self.buffers: dict[tuple[int, ...], np.ndarray] = {}

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        y = super().run(inputs)["y"]
        shape = (16, 3) if self.shared else y.shape
        ring = self.buffers.setdefault(shape, np.zeros((self.count, *shape), np.float32))
        self.calls += 1
        if self.calls < self.start:
            return {"y": y}
        buffer = ring[self.calls % self.count][: len(y)]
        buffer[...] = y
        return {"y": buffer}


class Overwriting(Linear):
    """`Linear` that computes in its caller's array. at: as of `Nth`."""

    def __init__(self, at: Callable[[int], bool] = lambda n: True) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.calls += 1
        result = super().run(inputs)
        if self.at(self.calls) and inputs["x"].flags.writeable:
            inputs["x"] *= 2
        return result


class Raising(Nth):
    """`Linear` that raises, or answers with something else, in some calls."""

    def __init__(self, what: object, at: Callable[[int], bool] = lambda n: n == 50) -> None:
        super().__init__(lambda x, y: y, at)
        self.what = what

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = super().run(inputs)
        if not self.at(self.calls):
            return result
        if isinstance(self.what, Exception):
            raise self.what
        return self.what  # type: ignore[return-value]


GRID_SPECS = (TensorSpec("x", "float32", ("batch", "h", "w")),)
GRID_DIMS = (Dim("batch", 1, 2, 2), Dim("h", 4, 8, 16), Dim("w", 4, 8, 16))
GRID_GOLDEN = [{"x": np.random.default_rng(seed).normal(size=(2, 8, 8)).astype(np.float32)} for seed in range(2)]


class Grid:
    """y [batch, h] = the sums of the rows of x [batch, h, w]. wrong: sizes h, w where a sample gets another's answer.

    refuses: heights that the graph cannot do.
    """

    inputs = GRID_SPECS
    outputs = (TensorSpec("y", "float32", ("batch", "h")),)

    def __init__(self, wrong: tuple[int, int] | None = None, refuses: Callable[[int], bool] = lambda h: False) -> None:
        self.wrong, self.refuses = wrong, refuses

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        if self.refuses(x.shape[1]):
            raise ModelError(f"height {x.shape[1]} cannot be halved")
        y = x.sum(-1)
        return {"y": np.roll(y, 1, 1) if x.shape[1:] == self.wrong else y}


@dataclass
class Clock:
    """Stands still but for the calls of the sessions that it times."""

    now: float = 0.0
    calls: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def timed(self, session: object, name: str, seconds: float) -> object:
        """The session, each of whose calls takes so many seconds."""
        run = session.run  # type: ignore[attr-defined]

        def timed(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            self.now += seconds
            self.calls.append(name)
            return run(inputs)

        session.run = timed  # type: ignore[attr-defined]
        return session


def ticking(step: float = 1e-3) -> Callable[[], float]:
    """A clock that goes on by a step each time it is looked at."""
    times = iter(range(1 << 30))
    return lambda: step * next(times)


def tried(
    candidate: object,
    reference: object | None = None,
    *,
    seconds: float = 1.0,
    seed: int = 0,
    bits: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] | None = None,
    golden: GoldenSet = SEEN,
    shapes: tuple[tuple[TensorSpec, ...], tuple[Dim, ...]] = (SPECS, DIMS),
    budgets: Budgets | None = None,
    shared: bool = False,
) -> dict[str, Check]:
    """The checks of calls by name. seconds: looks at the clock cost a millisecond each, unless it is another one."""
    limits = budgets or Budgets(BUDGET)
    pair = FuzzSides(reference or Linear(), candidate, "fp32", StagedLimits.of(limits), limits.default)  # type: ignore[arg-type]
    clock = clock or ticking()
    allowance = Allowance(seconds, 0.0, clock, clock)
    return {check.name: check for check in call_checks(pair, shapes, golden, seed, allowance, bits, shared=shared)}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}
