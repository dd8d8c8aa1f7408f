"""Engines that end their own process, for a canary to survive. Opened by name in the process that is to end."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from enginesmith.core.errors import DataError
from enginesmith.core.types import TensorSpec


class Panic(BaseException):
    """As pyo3's PanicException."""


class Dying:
    """Doubles x, and at its request `at` (-1: never) does what `how` says. Counts from 1."""

    inputs = (TensorSpec("x", "float32", ("batch", 4)),)
    outputs = (TensorSpec("y", "float32", ("batch", 4)),)

    def __init__(self, how: str, at: int) -> None:
        self._how, self._at, self._run = how, at, 0
        print("an engine may print")

    def run(self, inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
        self._run += 1
        if self._run == self._at:
            end(self._how)
        time.sleep(1e-4)
        return {"y": inputs["x"] * 2}


def end(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(3)
    if how == "leave":
        os._exit(0)
    if how == "sys.exit":
        sys.exit(4)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(600)
    if how == "panic":
        raise Panic("at the third layer")
    raise ValueError("a request that fails")


@contextmanager
def opened(how: str = "", at: int = -1) -> Iterator[Dying]:
    """at: 0 ends the process while the engine is opened."""
    if how == "refused":
        raise DataError("this engine is none")
    if how == "broken":
        raise RuntimeError("no such plugin")
    if at == 0:
        end(how)
    yield Dying(how, at)
