"""The process that runs a user's code."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from builders.execution.process import PYTHON, ended_error, module_path, oom_kills
from enginesmith.arrays import Array
from enginesmith.core.errors import StepError
from enginesmith.user_code.channel import Arrays, MessageChannel
from enginesmith.user_code.task import Task

T = TypeVar("T")
# Seconds that a user's code may take to end after the last question.
GRACE_S = 5.0


class UserProcess:
    """A running process of a user's code. file: name of the code's file, for messages."""

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
                message = f"{self._file}: killed by the kernel, which ran out of memory"
                raise StepError(message, "node-memory") from error
            raise ended_error(self._file, status) from error


@contextmanager
def start_user_process(task: Task) -> Iterator[UserProcess]:
    """A process for the user's code that `task` names, until the context ends; `task` must be its first question."""
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
        process = subprocess.Popen(
            [*PYTHON, "-m", "enginesmith.user_code", str(child_socket.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": module_path()},
            pass_fds=(child_socket.fileno(),),
        )
    try:
        with MessageChannel(parent_socket.detach()) as channel:
            yield UserProcess(channel, process, task.what.file)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        process.kill()
        process.wait()
