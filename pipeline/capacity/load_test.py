"""Runs a load test: starts the server's process, sends planned arrivals to it, watches its memory, and reports."""

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

from enginery.arrays import Array
from enginery.core.codec import encode
from enginery.core.errors import EngineryError, UnavailableError
from enginery.core.reports.load import LoadReport, LoadTerms
from enginery.core.text import now
from validation.latency.machine import SystemLoadMonitor, machine
from validation.load.arrivals import PlannedArrivals
from validation.load.open_loop import send_open_loop
from validation.load.server import ANSWER, END, FIRST, REQUEST, ServedEngine
from validation.load.summary import delay_of, memory_of, phases_of

# Seconds that a server may take to its first answer, and to answer what waits when the last request was sent.
START_S, DRAIN_S, DRAIN_INTERRUPTED_S = 300.0, 30.0, 2.0
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
                at = time.perf_counter()
                rest += data
                whole = len(rest) // ANSWER.size * ANSWER.size
                for number, failed, value in ANSWER.iter_unpack(rest[:whole]):
                    if number == END:
                        self.batch, self.ended = value, True
                        return
                    self.done[number], self.failed[number] = at, failed
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

    Raises EngineryError with what it printed where it gives no first answer, UnavailableError after START_S.
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
                raise EngineryError(
                    f"the server ended with exit status {code} before its first answer: " + "\n".join(words)
                )
            data += more
    except TimeoutError:
        raise UnavailableError(f"the server gave no answer within {START_S:g} s; is the machine overloaded?") from None
    number, _, seconds = ANSWER.unpack(data)
    if number != FIRST:
        raise EngineryError(f"the server's first message is {number}; another Enginery is installed beside this one")
    return float(seconds)


def run_load(plan: ServedEngine, arrivals: PlannedArrivals, which: Array, terms: LoadTerms, folder: Path) -> LoadReport:
    """Send the arrivals to a server of the engine, and report. which: inputs of each request, int64 [requests].

    Ctrl-C ends it early, with a report of what there is. Raises as `start_server`.
    """
    monitor, messages = SystemLoadMonitor(), [REQUEST.pack(number, one) for number, one in enumerate(which.tolist())]
    with start_server(plan, folder, len(arrivals)) as server:
        stop = threading.Event()
        receiving = threading.Thread(target=server.receive, daemon=True)
        watching = threading.Thread(target=server.watch, args=(stop,), daemon=True)
        receiving.start()
        watching.start()
        sent = send_open_loop(lambda number: server.send(messages[number]), arrivals.at)
        interrupted = sent.interrupted
        server.stop_sending()
        try:
            receiving.join(DRAIN_INTERRUPTED_S if interrupted else DRAIN_S)
        except KeyboardInterrupt:
            interrupted = True
        stop.set()
        watching.join()
        ended = time.perf_counter()
    count = len(sent.sent)
    done, failed = server.done[:count] - sent.begun, server.failed[:count]
    lasted = max(float(np.nanmax(done)) if np.isfinite(done).any() else 0.0, 1e-9)
    return LoadReport(
        unit=plan.request.unit,
        engine=plan.digest,
        machine=machine(),
        created_at=now(),
        terms=terms,
        seconds=ended - sent.begun,
        answered=int(np.count_nonzero(np.isfinite(done) & ~failed)) / lasted,
        phases=phases_of(arrivals, done, failed),
        sending=delay_of(arrivals.at, sent.sent, done),
        memory=memory_of(server.memory),
        cold_start_s=server.cold_start_s,
        first_s=server.first_s,
        batch=server.batch,
        load=monitor.stop(),
        interrupted=interrupted,
    )
