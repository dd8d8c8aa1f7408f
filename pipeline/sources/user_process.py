"""The request of an export, and the process that runs a user's code."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from builders.execution.process import PYTHON, ended_error, module_path, oom_kills
from enginesmith.arrays import Array
from enginesmith.core.errors import StepError
from enginesmith.core.state import State
from enginesmith.core.types import Dim, Scalar, TensorSpec
from enginesmith.user_code.channel import Arrays, MessageChannel
from enginesmith.user_code.task import Task

# The request of an export.


# Of a model with its external data, which is taken into one file; graphs that are made of it (fp32 for fp16) must fit
# there too.
MOST_EMBEDDED_BYTES = 1 << 30


@dataclass(frozen=True)
class ExportRequest:
    """A source and the form that its ONNX model gets. root: the spec's folder.  file, weights: relative to it.

    function: the entry point of a torch source.  module: its dotted name; empty where `file` is named.
    arguments: of that function; of an ONNX source, values of inputs that become constants.
    outputs: names in order; None keeps the model's own.
    opset: of the ONNX model of a torch or pt2 source.
    most_embedded_bytes: of external data that is taken into one file; the large weights of a model with more stay in
    files of their own.
    """

    kind: Literal["torch", "pt2", "onnx"]
    root: Path
    file: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...] = ()
    outputs: tuple[str, ...] | None = None
    function: str = ""
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    weights: str | None = None
    opset: int = 20
    module: str = ""
    most_embedded_bytes: int = MOST_EMBEDDED_BYTES
    states: tuple[State, ...] = ()


# Starts, asks and ends a process that runs a user's code (`enginesmith.user_code`).


T = TypeVar("T")
# Seconds that a user's code may take to end, once there are no more questions.
GRACE_S = 5.0


class UserProcess:
    """A running process of a user's code. file: the code's, as messages name it."""

    def __init__(self, channel: MessageChannel, process: "subprocess.Popen[bytes]", file: str) -> None:
        self._channel, self._process, self._file = channel, process, file
        self._killed_before = oom_kills()

    def ask(self, question: object, kind: type[T], arrays: Mapping[str, Array] | None = None) -> tuple[T, Arrays]:
        """The answer of type `kind` to a question, and the arrays that come with it.

        Raises an EnginesmithError of the user's code, UserCodeError for a bug in it, StepError when the process ended.
        """
        try:
            self._channel.send(question, arrays)
            return self._channel.receive(kind)
        except (EOFError, OSError) as error:
            status = self._process.wait()
            if status == -signal.SIGKILL and oom_kills() > self._killed_before:
                words = f"{self._file}: killed by the kernel, which ran out of memory"
                raise StepError(words, "node-memory") from error
            raise ended_error(self._file, status) from error


@contextmanager
def start_user_process(task: Task) -> Iterator[UserProcess]:
    """A process for the user's code that `task` names; `task` must be its first question. It ends with the context."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*PYTHON, "-m", "enginesmith.user_code", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": module_path()},
            pass_fds=(theirs.fileno(),),
        )
    try:
        with MessageChannel(ours.detach()) as channel:
            yield UserProcess(channel, process, task.what.file)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        process.kill()
        process.wait()
