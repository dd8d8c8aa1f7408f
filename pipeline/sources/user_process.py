"""The process that runs a user's code."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np

from builders.execution.process import PYTHON, ended_error, module_path, oom_kills
from enginesmith.arrays import Array
from enginesmith.compile_caches.recipe import CacheRecipe
from enginesmith.core.errors import ModelError, StepError
from enginesmith.core.types import Session, Tensors, TensorSpec
from enginesmith.user_code.channel import Arrays, MessageChannel
from enginesmith.user_code.compiling import CompileModel, RanCompiled, RunCompiled
from enginesmith.user_code.task import Task

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


# A model that a process of its own compiles with torch.compile, as a session (`enginesmith.user_code.compiling`).


class CompiledSession(Session):
    """A model that a process of its own compiles, from `with` on. answers: what the process told of each call."""

    def __init__(self, model: CompileModel, outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.outputs = (), outputs
        self.answers: list[RanCompiled] = []
        self._starting = start_user_process(Task(model))
        self._model = model

    def __enter__(self) -> "CompiledSession":
        self._process: UserProcess = self._starting.__enter__()
        self.recipe, _ = self._process.ask(Task(self._model), CacheRecipe)
        return self

    def __exit__(self, *given: object) -> None:
        self._starting.__exit__(None, None, None)

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """The outputs, by the names that the golden set has. Raises ModelError where the model fails."""
        answer, arrays = self._process.ask(RunCompiled(), RanCompiled, inputs)
        self.answers.append(answer)
        if len(arrays) != len(self.outputs):
            raise ModelError(f"the model gives {len(arrays)} outputs, and {len(self.outputs)} as it was exported")
        return dict(zip((spec.name for spec in self.outputs), arrays.values(), strict=True))
