"""The process of a user's code as a thread of this one, which need not import torch again for each test."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from enginesmith.user_code.channel import MessageChannel
from enginesmith.user_code.task import Task
from pipeline.sources.user_process import UserProcess


@contextmanager
def serve_here(task: Task) -> Iterator[UserProcess]:
    """What `start_user_process` gives, without a process: everything goes over the same socket."""
    our_socket, their_socket = socket.socketpair()

    def serve() -> None:
        with MessageChannel(their_socket.detach()) as channel:
            channel.receive(Task)[0].serve(channel)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with MessageChannel(our_socket.detach()) as channel:
            yield UserProcess(channel, cast("subprocess.Popen[bytes]", None), task.what.file)
    finally:
        thread.join()
