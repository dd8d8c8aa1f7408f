"""Repeated calls: equal inputs must have equal outputs, and no array may change after the call.

A session is called with a few sets of inputs in random order: a few sizes of the golden set, each with two sets of
values. Each output is compared with the first output for the same inputs. The returned arrays are kept and compared
again some calls later, which detects a reused output buffer; the inputs are compared after each call. Then one set of
arrays is refilled before each call, as a server does; one call has read-only arrays in Fortran's order; and threads
call at the same time, if the backend declares its sessions thread-safe.
"""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import Check, describe
from enginesmith.core.types import Dim, Precision, Session, Tensors, TensorSpec
from validation.comparison.sessions import limited_checks
from validation.data.samples import sizes_of
from validation.fuzz.cases import FuzzCase, list_masks, make
from validation.golden.golden_set import edge_sizes
from validation.limits.budget import StagedLimits

# Sizes of edge cases beside the golden cases' size, smallest first, because these leave time for many calls.
MOST_EDGES = 3
# The most draws of values, from which two different ones are used.
MOST_DRAWS = 4
SEED = 0
# The most outputs that are kept at a time beside the first outputs, and their bytes.
MOST_KEPT, MOST_KEPT_BYTES = 32, 64 << 20
# The number of calls of each thread.
AT_ONCE = 4
# The number of turns drawn at a time.
_DRAWN = 128
# For a fault in one of so many calls, the note has the probability that none of n calls had it: (1 - 1 / share)^n.
SHARES = (100, 1000)


class Bits(NamedTuple):
    """A copy of an array, to compare bit for bit."""

    dtype: np.dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Array) -> "Bits":
        """A copy of an array as it is now."""
        return cls(array.dtype, array.shape, array.tobytes())

    def array(self) -> Array:
        """A new array with the same content."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).copy()


@dataclass
class RepeatedInputs:
    """One set of inputs: arrays for the session, copies of them, and the first outputs, None before the first call."""

    name: str
    arrays: dict[str, Array]
    copies: dict[str, Bits] = field(default_factory=dict)
    first_outputs: dict[str, Bits] | None = None

    def __post_init__(self) -> None:
        self.copies = {name: Bits.of(array) for name, array in self.arrays.items()}


def pool_of(
    session: Session, specs: Sequence[TensorSpec], dims: Sequence[Dim], groups: Sequence[Tensors], precision: Precision
) -> list[RepeatedInputs]:
    """Sets of inputs of at most 1 + MOST_EDGES sizes in the session's dtypes. groups: real inputs to draw from.

    Each size has two different sets, because equal content hides a shared buffer. If all MOST_DRAWS draws are equal,
    the second set has halved floats (except masks and inputs without a dim); if these are equal too, there is one set.
    """
    sorted_sizes = sorted(edge_sizes(specs, dims), key=lambda sizes: sum(math.prod(spec.at(sizes)) for spec in specs))
    golden_sizes = sizes_of(groups[0], specs)
    size_choices = [golden_sizes, *islice((sizes for sizes in sorted_sizes if sizes != golden_sizes), MOST_EDGES)]
    half_names = {spec.name for spec in session.inputs if spec.dtype == "float16"}
    pool: list[RepeatedInputs] = []
    for sizes in size_choices:
        cases = [FuzzCase(tuple(sizes.items()), draw=draw_index) for draw_index in range(MOST_DRAWS)]
        distinct_inputs: list[RepeatedInputs] = []
        for case, scale in (*((case, 1.0) for case in cases), (cases[0], 0.5)):
            inputs = make(case, specs, groups, SEED, precision)
            if scale != 1:  # not masks, and not inputs that may be sizes
                numbers = {spec.name for spec in specs if spec.dtype.startswith("float") and {*spec.shape} & {*sizes}}
                names = numbers.difference(list_masks(inputs))
                inputs = {key: array * scale if key in names else array for key, array in inputs.items()}
            dtypes = {key: np.dtype(np.float16) if key in half_names else array.dtype for key, array in inputs.items()}
            arrays = {key: np.array(array, dtypes[key], order="C") for key, array in inputs.items()}
            candidate = RepeatedInputs(f"{case}{' halved' if scale < 1 else ''}", arrays)
            if not distinct_inputs or candidate.copies != distinct_inputs[0].copies:
                distinct_inputs.append(candidate)
        pool += distinct_inputs[:2]
    return pool


def _scatter(array: Array) -> Array:
    """A read-only copy in Fortran's order, with a gap after each element, at an odd address."""
    step = array.itemsize
    strides = [2 * step * math.prod(array.shape[:axis]) for axis in range(array.ndim)]
    view = np.ndarray(array.shape, array.dtype, bytearray(1 + 2 * array.nbytes), 1, strides)
    view[...] = array
    view.setflags(write=False)
    return view


class _Kept(NamedTuple):
    """The outputs of a call: the arrays themselves, and copies made when they were returned."""

    label: str
    arrays: Mapping[str, Array]
    bits: Mapping[str, Bits]
    size: int  # bytes of all copies


@dataclass
class _Fault:
    """The number of faults of one kind, and the place and description of the first."""

    count: int = 0
    where: str = ""
    what: str = ""

    def add(self, place: str, fault: str) -> None:
        if not self.count:
            self.where, self.what = place, fault
        self.count += 1


@dataclass
class RepeatedCalls:
    """Calls of one session. bits: returns whether equal inputs must have equal bits; called only if bits differ.

    limits: of the differences between outputs of equal inputs, if bits may differ.  shared: whether several threads may
    run the session at once.
    faults: by the name of the check.
    """

    session: Session
    limits: StagedLimits
    bits: Callable[[], bool]
    shared: bool = False
    calls: int = 0
    faults: defaultdict[str, _Fault] = field(default_factory=lambda: defaultdict(_Fault))
    _pair: Sequence[RepeatedInputs] = ()
    _firsts: list[_Kept] = field(default_factory=list)
    _kept: deque[_Kept] = field(default_factory=deque)
    _kept_bytes: int = 0
    _other_bits: bool = False
    _threads: int = 0

    def start(self, pool: Sequence[RepeatedInputs]) -> None:
        """Call once with each set of inputs: later answers are compared with the answers to these calls."""
        for case in pool:
            self._call(case)

    def run(self, pool: Sequence[RepeatedInputs], seed: int, more: Callable[[int], bool]) -> None:
        """Call with inputs of the pool while `more(calls so far)`, then with refilled arrays and from threads."""
        for case in _turns(pool, seed):
            if not more(self.calls):
                break
            self._call(case)
        for call in (*self._kept, *self._firsts):
            self._look_again(call)
        if not self.faults:  # else these would fail with them
            for first, second in pairwise(pool):  # of one size and with an answer each
                if first.first_outputs and second.first_outputs and _form(first.copies) == _form(second.copies):
                    self._pair = self._pair or (first, second)
            self._refill()
            if self.shared:
                self._share(pool)

    def _refill(self) -> None:
        """Call with the first inputs, the second, none, and the first again, in the same arrays; then with the first,
        last input first, in read-only arrays in Fortran's order, with gaps, at odd addresses, as in a message."""
        buffers = {name: copy.array() for name, copy in self._pair[0].copies.items()} if self._pair else {}
        for number, case in enumerate((*self._pair, *self._pair[:1])):
            if number == len(self._pair):
                self._answer({})  # most likely an error; later answers must be right again
            for name, copy in case.copies.items():
                buffers[name][...] = copy.array()
            self._compare(case, self._answer(buffers), "refilled", f"{case.name} in arrays that were refilled")
        for case in self._pair[:1]:
            arrays = {name: _scatter(copy.array()) for name, copy in reversed(case.copies.items())}
            label = f"{case.name} in read-only arrays in Fortran's order with gaps, the last input first"
            self._compare(case, self._answer(arrays), "refilled", label, sums_alike=False)

    def _share(self, pool: Sequence[RepeatedInputs]) -> None:
        """Call from threads at once, `AT_ONCE` times, each with its own inputs: two of one size, a third of another."""
        others = (case for pair in self._pair[:1] for case in pool if _form(case.copies) != _form(pair.copies))
        cases = [*self._pair, *islice((case for case in others if case.first_outputs), 1)]
        self._threads, barrier = len(cases), threading.Barrier(max(len(cases), 1), timeout=60)
        answers = list[tuple[RepeatedInputs, dict[str, Array] | str]]()

        def call(case: RepeatedInputs) -> None:
            arrays = {name: copy.array() for name, copy in case.copies.items()}
            for _ in range(AT_ONCE):
                barrier.wait()
                answers.append((case, self._answer(arrays)))

        workers = [threading.Thread(target=call, args=(case,)) for case in cases]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for case, outputs in answers:
            self._compare(case, outputs, "threads", f"{case.name} beside another thread's call")

    def _compare(
        self, case: RepeatedInputs, outputs: dict[str, Array] | str, check: str, place: str, sums_alike: bool = True
    ) -> None:
        if isinstance(outputs, str):
            self.faults[check].add(place, outputs)
        elif difference := self._differs(case, {name: Bits.of(array) for name, array in outputs.items()}, sums_alike):
            self.faults[check].add(place, difference)

    def _call(self, case: RepeatedInputs) -> None:
        self.calls += 1
        label = f"call {self.calls}, {case.name}"
        outputs = self._answer(case.arrays)
        for name, copy in case.copies.items():
            if Bits.of(case.arrays[name]) != copy:
                self.faults["inputs"].add(label, f"{name} was overwritten")
                case.arrays[name] = copy.array()
        if isinstance(outputs, str):
            self.faults["repeated"].add(label, outputs)
            return
        output_bits = {name: Bits.of(array) for name, array in outputs.items()}
        if case.first_outputs is None:
            case.first_outputs = output_bits
            self._firsts.append(_Kept(label, outputs, output_bits, 0))
            return
        if output_bits == case.first_outputs:
            output_bits = case.first_outputs  # one copy of the bytes
        elif difference := self._differs(case, output_bits):
            self.faults["repeated"].add(label, difference)
        size = sum([len(bits.data) for bits in output_bits.values()])
        self._kept.append(_Kept(label, outputs, output_bits, size))
        self._kept_bytes += size
        while len(self._kept) > MOST_KEPT or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
            self._look_again(self._kept.popleft())

    def _answer(self, arrays: dict[str, Array]) -> dict[str, Array] | str:
        """The session's outputs; or a text with its error, or with what it returned instead of arrays by name."""
        try:
            answer: Any = self.session.run(arrays)
        except Exception as error:  # a runtime behind a session raises whatever it has
            return f"{type(error).__name__}: {error}"
        if not (isinstance(answer, dict | Mapping) and all(isinstance(x, np.ndarray) for x in answer.values())):
            return f"answers with a {type(answer).__name__} that does not hold an array per output"
        return dict(answer)

    def _differs(self, case: RepeatedInputs, now: Mapping[str, Bits], sums_alike: bool = True) -> str:
        """A text on outputs that differ from the first outputs by more than allowed; else ''. sums_alike: whether the
        kernels add in the same order as for the first outputs; if not, bits may differ."""
        first_bits = case.first_outputs or {}
        if now == first_bits:
            return ""
        if _form(first_bits) != _form(now):
            return f"outputs are {_form(now)}; in the first run they were {_form(first_bits)}"
        self._other_bits |= sums_alike
        is_bitwise = sums_alike and self.bits()
        for name in (name for name, bits in now.items() if bits != first_bits[name]):
            pair = first_bits[name].array(), now[name].array()
            if is_bitwise:
                first_view, later_view = (values.reshape(-1).view(f"V{values.dtype.itemsize}") for values in pair)
                count = int(np.count_nonzero(first_view != later_view))
                return f"{count} of {pair[0].size} elements of {name} differ in their bits from the first run"
            for check in self.limits.judge(partial(limited_checks, "engine", (case.name, "edge"), name, pair)):
                if not check.passed:
                    return f"against the first answer, {describe(check)}"
        return ""

    def _look_again(self, call: _Kept) -> None:
        self._kept_bytes -= call.size
        if changed_name := next((name for name, array in call.arrays.items() if Bits.of(array) != call.bits[name]), ""):
            self.faults["outputs"].add(call.label, f"{changed_name} changed after it was answered")

    def checks(self, pool: Sequence[RepeatedInputs], seconds: float) -> Iterator[Check]:
        """The checks of repeated outputs, of kept outputs, and of inputs; also of refilled arrays if two sets of inputs
        have one size, and of threads if threads called."""
        summary = f"{self.calls} calls with {len(pool)} inputs in {seconds:.2g} s"
        bits = ("within the limits, other bits" if self._other_bits else "the same bits") + "; later faults are missed"
        notes = {
            "repeated": (summary, f"{summary}; {bits}; {describe_odds(self.calls, SHARES, 'calls')}"),
            "outputs": (summary, "kept over later calls, and compared again"),
            "inputs": (summary, "compared after each call"),
        }
        if self._pair:
            notes["refilled"] = "4 calls", "arrays that are filled anew before each call, or are in Fortran's order"
        if self._threads:
            notes["threads"] = f"{AT_ONCE * self._threads} calls", f"{self._threads} threads that call at the same time"
        for name, (calls_text, note) in notes.items():
            fault = self.faults.get(name, _Fault())
            note = f"{fault.what}; {fault.count} of {calls_text}" if fault.count else note
            label, count = fault.where or "repeated calls", float(fault.count)
            yield Check("engine", f"calls {name}", "", label, count, 0.0, not fault.count, note)


def describe_odds(count: int, shares: Sequence[int], noun: str) -> str:
    """A text: the probability that `count` calls or inputs miss a fault in 1 of each number in `shares`."""
    return " and ".join(
        f"a fault in 1 of {share:,} {noun} would be missed with a probability of {(1 - 1 / share) ** count:.2g}"
        for share in shares
    )


def _turns(pool: Sequence[RepeatedInputs], seed: int) -> Iterator[RepeatedInputs]:
    """An endless random order of the sets of inputs; small ones are more frequent, for more calls.

    Every second block of `_DRAWN` turns is sorted: an engine may change its kernels after many calls of one size.
    """
    generator = np.random.default_rng(seed)
    weights = np.array([max(sum(array.size for array in case.arrays.values()), 1) ** -0.75 for case in pool])
    while True:
        drawn_indices = generator.choice(len(pool), (2, _DRAWN), p=weights / weights.sum())
        for index in (*drawn_indices[0].tolist(), *sorted(drawn_indices[1].tolist())):
            yield pool[index]


def _form(output_bits: Mapping[str, Bits]) -> str:
    return ", ".join(f"{name} {bits.dtype.name} {bits.shape}" for name, bits in output_bits.items()) or "none"
