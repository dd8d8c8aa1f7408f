"""The server's process of a load test, seen from the process that sends the requests."""

import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from enginesmith.arrays import Array
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, UnavailableError
from validation.load.server import ANSWER, END, FIRST, ServedEngine

# Seconds that a server may take to its first answer.
START_S = 300.0
_SAMPLE_S = 0.25


@dataclass
class RunningServer:
    """A server that gave its first answer. done: times of answers by `time.perf_counter`, NaN before, float64
    [requests].  failed: bool [requests].  cold_start_s, first_s: of the first request, which is none of these."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    done: Array
    failed: Array
    cold_start_s: float
    first_s: float
    batch: float = 1.0
    ended: bool = False
    memory: list[tuple[float, int]] = field(default_factory=list)

    def send(self, message: bytes) -> None:
        """Send a request; none is sent any more where the process ended, so that its answer is missing."""
        with suppress(OSError):
            self.connection.sendall(message)

    def receive(self) -> None:
        """Take answers until the last one."""
        rest = b""
        with suppress(OSError):
            while data := self.connection.recv(1 << 16):
                rest += data
                whole = len(rest) // ANSWER.size * ANSWER.size
                for number, failed, value in ANSWER.iter_unpack(rest[:whole]):
                    if number == END:
                        self.batch, self.ended = value, True
                        return
                    self.done[number], self.failed[number] = value, failed
                rest = rest[whole:]

    def watch(self, stop: threading.Event) -> None:
        """Sample its resident memory until `stop`."""
        begun, process = time.perf_counter(), psutil.Process(self.process.pid)
        with suppress(psutil.Error):
            while True:
                self.memory.append((time.perf_counter() - begun, process.memory_info().rss))
                if stop.wait(_SAMPLE_S):
                    return

    def stop_sending(self) -> None:
        """Tell it that no request follows."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


@contextmanager
def start_server(plan: ServedEngine, folder: Path, requests: int) -> Iterator[RunningServer]:
    """A server in a process of its own, which is ended with the context. requests: how many it will get, at most.

    Raises EnginesmithError with what it printed where it gives no first answer, UnavailableError after START_S.
    """
    path, log = folder / "plan.json", folder / "server.log"
    path.write_text(json.dumps(encode(plan)))
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-m", "validation.load.server", str(theirs.fileno()), str(path)]
    begun = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    theirs.close()
    try:
        ours.settimeout(START_S)
        first_s = _first_answer(ours, process, log)
        ours.settimeout(None)
        done, failed = np.full(requests, math.nan), np.zeros(requests, bool)
        yield RunningServer(process, ours, done, failed, time.perf_counter() - begun, first_s)
    finally:
        ours.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first_answer(connection: socket.socket, process: "subprocess.Popen[bytes]", log: Path) -> float:
    data = b""
    try:
        while len(data) < ANSWER.size:
            if not (more := connection.recv(ANSWER.size - len(data))):
                code = process.wait()
                words = log.read_text(errors="replace").strip().splitlines()[-8:]
                raise EnginesmithError(
                    f"the server ended with exit status {code} before its first answer: " + "\n".join(words)
                )
            data += more
    except TimeoutError:
        raise UnavailableError(f"the server gave no answer within {START_S:g} s; is the machine overloaded?") from None
    number, _, seconds = ANSWER.unpack(data)
    if number != FIRST:
        raise EnginesmithError(
            f"the server's first message is {number}; another Enginesmith is installed beside this one"
        )
    return float(seconds)
