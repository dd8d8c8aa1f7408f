"""Faults in how an engine answers from call to call: sessions around a right one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from enginesmith.core.types import Session, Tensors
from pipeline.compile.steps import proofs
from validation.calls.checks import Allowance

if TYPE_CHECKING:
    import pytest

Outputs = dict[str, Any]


class Faulty:
    """A session whose answers a fault changes. fault: number of the call (from 1), inputs, right outputs -> outputs."""

    def __init__(self, right: Session, fault: Callable[[int, Tensors, Outputs], Any]) -> None:
        self._right, self._fault, self._calls = right, fault, 0
        self.inputs, self.outputs = right.inputs, right.outputs

    def run(self, inputs: Tensors) -> Any:
        self._calls += 1
        return self._fault(self._calls, inputs, dict(self._right.run(inputs)))


def use_steady_clock(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Each look at the clock is 2 ms later: how many sizes and calls are tried rests on no machine's speed."""

    clock = count(0, 0.002).__next__
    steady_function = lambda seconds, *_: Allowance(seconds, 0.0, clock, clock)  # noqa: E731
    monkeypatch.setattr("validation.calls.checks.Allowance", steady_function)


@contextmanager
def faulty_sessions(make: Callable[[], Callable[[int, Tensors, Outputs], Any]]) -> Iterator[None]:
    """Engines that are opened meanwhile have the fault."""
    opened_session = proofs.open_session

    @contextmanager
    def wrapped(*arguments: Any) -> Iterator[Session]:
        with opened_session(*arguments) as session:
            yield Faulty(session, make())

    with patch.object(proofs, "open_session", wrapped):
        yield


def changed(outputs: Outputs) -> Outputs:
    return {name: (value * 1.5 + 1).astype(value.dtype) for name, value in outputs.items()}


def _from_call(first: int) -> Callable[[int, Tensors, Outputs], Outputs]:
    return lambda call, inputs, outputs: changed(outputs) if call >= first else outputs


def _one_in(many: int) -> Callable[[int, Tensors, Outputs], Outputs]:
    """The golden set's 18 runs are right."""
    rng = np.random.default_rng(0)
    return lambda call, inputs, outputs: changed(outputs) if call > 18 and rng.integers(many) == 0 else outputs


def _one_buffer() -> Callable[[int, Tensors, Outputs], Outputs]:
    """Outputs are views of one buffer for all calls."""
    buffers: dict[str, np.ndarray] = {}

    def fault(call: int, inputs: Tensors, outputs: Outputs) -> Outputs:
        entries = {}
        for name, value in outputs.items():
            if name not in buffers or buffers[name].size < value.size:
                buffers[name] = np.empty(max(value.size, 1 << 16), value.dtype)
            view = buffers[name][: value.size].reshape(value.shape)
            view[...] = value
            entries[name] = view
        return entries

    return fault


def _overwrites(call: int, inputs: Tensors, outputs: Outputs) -> Outputs:
    for value in inputs.values():
        if value.dtype.kind == "f" and value.flags.writeable:
            value[...] = 0
    return outputs


def _at(**sizes: int) -> Callable[[int, Tensors, Outputs], Outputs]:
    """Wrong where the first input has these sizes; axis1=13 is its second axis."""

    def fault(call: int, inputs: Tensors, outputs: Outputs) -> Outputs:
        shape = next(iter(inputs.values())).shape
        is_wrong = all(shape[int(name.removeprefix("axis"))] == size for name, size in sizes.items())
        return changed(outputs) if is_wrong else outputs

    return fault


def _typed(dtype: type) -> Callable[[int, Tensors, Outputs], Outputs]:
    return lambda call, inputs, outputs: {name: value.astype(dtype) for name, value in outputs.items()}


def _raises(call: int, inputs: Tensors, outputs: Outputs) -> Outputs:
    raise ValueError("the kernel failed")


SESSIONS: Mapping[str, Callable[[], Callable[[int, Tensors, Outputs], Any]]] = {
    "wrong from call 101 on": lambda: _from_call(101),
    "1 call in 50 wrong": lambda: _one_in(50),
    "an output buffer that is reused": _one_buffer,
    "inputs that are overwritten": lambda: _overwrites,
    "wrong at batch 7": lambda: _at(axis0=7),
    "wrong at 7 x 13": lambda: _at(axis0=7, axis1=13),
    "complex numbers for real ones": lambda: _typed(np.complex64),
    "an output more than declared": lambda: lambda call, inputs, outputs: {**outputs, "more": np.zeros(3, np.float32)},
    "empty outputs": lambda: lambda call, inputs, outputs: {name: value[:0] for name, value in outputs.items()},
    "None for an answer": lambda: lambda call, inputs, outputs: None,
    "a ValueError in every call": lambda: _raises,
}
# 7 x 13 exists where a second axis is dynamic.
ONLY = {"wrong at 7 x 13": "recurrent"}
