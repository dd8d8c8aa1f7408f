"""The same calls again and again, between others: equal inputs have equal answers, and nothing handed over changes.

A session is called with a few sets of inputs in a drawn order. Each answer is compared with the first one of the same
inputs; the very arrays that were answered are kept, and compared again some calls later, which shows an output buffer
that is reused; the inputs are compared after each call.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.reports.proof import Check, describe
from enginery.core.types import Session
from validation.calls.pool import Bits, Repeated
from validation.comparison.sessions import limited_checks
from validation.limits.on_demand import StagedLimits

# Answers that are kept at a time beside the first ones, and their bytes.
MOST_KEPT, MOST_KEPT_BYTES = 32, 64 << 20
_AT_ONCE = 1024
# Of no failures in n trials, the 95 % bound on their share (Hanley and Lippman-Hand, "If Nothing Goes Wrong, Is
# Everything All Right?", 1983).
RULE_OF_THREE = 3


@dataclass(frozen=True)
class _Kept:
    """An answer: the arrays themselves, and what they held when they were given."""

    call: int
    name: str
    arrays: Mapping[str, Array]
    held: Mapping[str, Bits]

    def find_changed(self) -> str:
        """The first output that does not hold what it held; empty when all do."""
        return next((name for name, array in self.arrays.items() if Bits.of(array) != self.held[name]), "")


@dataclass
class _Fault:
    """How often something was wrong, and the first time: where, and what."""

    count: int = 0
    where: str = ""
    what: str = ""

    def add(self, where: str, what: str) -> None:
        if not self.count:
            self.where, self.what = where, what
        self.count += 1


@dataclass
class RepeatedCalls:
    """Calls of one session. bits: whether equal inputs must have equal bits; asked when bits differ for the first time.

    limits: what answers of equal inputs are held to where bits may differ.
    """

    session: Session
    limits: StagedLimits
    bits: Callable[[], bool]
    calls: int = 0
    answers: _Fault = field(default_factory=_Fault)
    outputs: _Fault = field(default_factory=_Fault)
    inputs: _Fault = field(default_factory=_Fault)
    _firsts: list[_Kept] = field(default_factory=list)
    _kept: deque[_Kept] = field(default_factory=deque)
    _kept_bytes: int = 0
    _other_bits: bool = False

    def run(self, pool: Sequence[Repeated], seed: int, more: Callable[[int], bool]) -> None:
        """Call while there is `more` to do after so many calls."""
        for item in _turns(pool, seed):
            if not more(self.calls):
                break
            self._call(item)
        while self._kept:
            self._look_again(self._kept.popleft())
        for kept in self._firsts:
            self._look_again(kept)

    def _call(self, item: Repeated) -> None:
        self.calls += 1
        where = f"call {self.calls}, {item.name}"
        outputs = self._answer(item)
        for name, copy in item.copies.items():
            if Bits.of(item.arrays[name]) != copy:
                self.inputs.add(where, f"{name} was overwritten")
                item.arrays[name] = copy.array()
        if isinstance(outputs, str):
            self.answers.add(where, outputs)
            return
        held = {name: Bits.of(array) for name, array in outputs.items()}
        if item.first is None:
            item.first = held
            self._firsts.append(_Kept(self.calls, item.name, outputs, held))
            return
        if held == item.first:
            held = item.first  # one copy of the bytes
        elif summary := self._differs(item, held):
            self.answers.add(where, summary)
        self._keep(_Kept(self.calls, item.name, outputs, held))

    def _answer(self, item: Repeated) -> dict[str, Array] | str:
        """What the session answers; in words what it raises, or answers with instead of arrays."""
        try:
            found: Any = self.session.run(item.arrays)
        except Exception as error:  # a runtime behind a session raises whatever it has
            return f"{type(error).__name__}: {error}"
        if not isinstance(found, Mapping) or not all(isinstance(value, np.ndarray) for value in found.values()):
            return f"answers with a {type(found).__name__} that does not hold an array per output"
        return dict(found)

    def _differs(self, item: Repeated, now: Mapping[str, Bits]) -> str:
        """How an answer differs from the first one by more than it may; empty when it does not."""
        first = item.first or {}
        if _form(first) != _form(now):
            return f"outputs are {_form(now)}, and were {_form(first)}"
        self._other_bits = True
        exact = self.bits()
        for name in (name for name, held in now.items() if held != first[name]):
            pair = first[name].array(), now[name].array()
            if exact:
                return f"{_unequal(*pair)} of {pair[0].size} elements of {name} have other bits than at first"
            for check in self.limits.judge(partial(limited_checks, "engine", (item.name, "edge"), name, pair)):
                if not check.passed:
                    return f"against the first answer, {describe(check)}"
        return ""

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._kept_bytes += _size(kept)
        while len(self._kept) > MOST_KEPT or (len(self._kept) > 1 and self._kept_bytes > MOST_KEPT_BYTES):
            self._look_again(self._kept.popleft())

    def _look_again(self, kept: _Kept) -> None:
        self._kept_bytes -= _size(kept)
        if changed := kept.find_changed():
            self.outputs.add(f"call {kept.call}, {kept.name}", f"{changed} changed after it was answered")

    def checks(self, pool: Sequence[Repeated], seconds: float) -> Iterator[Check]:
        """The checks: answers, outputs kept, and inputs."""
        summary = f"{self.calls} calls with {len(pool)} inputs in {seconds:.2g} s"
        same = "within the limits, other bits" if self._other_bits else "the same bits"
        odds = f"wrong calls of 1 in {self.calls // RULE_OF_THREE} or more show with 95 %"
        yield _check("calls repeated", self.answers, summary, f"{summary}; {same}; {odds}")
        yield _check("calls outputs", self.outputs, summary, "kept over later calls, and compared again")
        yield _check("calls inputs", self.inputs, summary, "compared after each call")


def _check(name: str, found: _Fault, summary: str, passed: str) -> Check:
    note = f"{found.what}; {found.count} of {summary}" if found.count else passed
    where = found.where or "repeated calls"
    return Check("engine", name, "", where, float(found.count), 0.0, not found.count, note)


def _turns(pool: Sequence[Repeated], seed: int) -> Iterator[Repeated]:
    """Each once, then in a drawn order: small ones oftener, which leaves time for more."""
    yield from pool
    generator = np.random.default_rng(seed)
    weights = np.array([max(item.elements, 1) ** -0.75 for item in pool])
    while True:
        for index in generator.choice(len(pool), _AT_ONCE, p=weights / weights.sum()).tolist():
            yield pool[index]


def _size(kept: _Kept) -> int:
    return sum(len(held.data) for held in kept.held.values())


def _form(held: Mapping[str, Bits]) -> str:
    return ", ".join(f"{name} {np.dtype(item.dtype).name} {item.shape}" for name, item in held.items()) or "none"


def _unequal(first: Array, now: Array) -> int:
    kinds = f"V{first.dtype.itemsize}"
    return int(np.count_nonzero(first.reshape(-1).view(kinds) != now.reshape(-1).view(kinds)))
