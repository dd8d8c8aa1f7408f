"""An engine that says how many of its requests ran at once, by which session and thread. Opened by name elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import TensorSpec
from tests.pipeline.canary.dying import end
from tests.waiting import PATIENCE_S

_opened, _barrier = 0, threading.Barrier(1)
_lock = threading.Lock()


class Busy:
    """Answers how many ran at once, its session and whether its own thread ran, or bytes. Runs wait for `together`."""

    inputs = (TensorSpec("x", "float32", ("batch", 4)),)
    outputs = (TensorSpec("y", "float32", ("batch", 4)),)

    def __init__(self, barrier: Any, number: int, how: str, at: int, answer: int) -> None:
        self._barrier, self._number, self._how, self._at, self._runs = barrier, number, how, at, 0
        self._answer = answer
        self._thread = threading.get_ident()

    def run(self, inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
        with _lock:
            self._runs += 1
            is_last = self._runs == self._at
        if is_last:
            end(self._how)
        if self._answer:
            return {"y": np.ones((1, self._answer // 4), np.float32)}
        joint_parties = 1
        if self._barrier.parties > 1:
            self._barrier.wait(PATIENCE_S)
            joint_parties = self._barrier.parties
        return {"y": np.array([[joint_parties, self._number, threading.get_ident() == self._thread, 0]], np.float32)}


@contextmanager
def opened(together: int, most: int = 99, how: str = "", at: int = -1, answer: int = 0) -> Iterator[Busy]:
    """most: how often it can be opened.  answer: bytes of one."""
    global _opened, _barrier
    with _lock:
        _opened += 1
        number = _opened
        if number == 1:
            _barrier = threading.Barrier(together)
    if number > most:
        raise EnginesmithError("out of memory")
    yield Busy(_barrier, number, how, at, answer)
