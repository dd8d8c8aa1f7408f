"""The server's side of a load test, a process of its own: `python -m validation.load.server FD PLAN`.

FD: a connected socket.  PLAN: a JSON file, a `ServedEngine`. It opens the engine behind a router and a batcher, answers
the first request, says so, and then answers requests by their numbers until the other end stops sending. Only numbers
go over the socket: the arrays of the requests are read before.
"""

import json
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock

import numpy as np

from builders.backends import discovery
from builders.backends.compatibility import open_engine
from enginesmith.arrays import stored_arrays
from enginesmith.core.codec import decode
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Engine, Session, Tensors
from enginesmith.serving.batcher import BatchedRequest, Batcher
from enginesmith.serving.buckets import RoutedEngine
from enginesmith.serving.padding import Padding
from enginesmith.serving.router import Router

# A request: its number, and which inputs it has.  An answer: the number, whether it failed, and when it was there, by
# `time.perf_counter`, which all processes of a machine share (CPython docs: CLOCK_MONOTONIC).
REQUEST, ANSWER = struct.Struct("<II"), struct.Struct("<IBxxxd")
# Numbers of answers that are none: the first request was answered (in so many seconds); the end (mean batch).
FIRST, END = 0xFFFFFFFE, 0xFFFFFFFF
_READ = 1 << 16
# Of the two threads, one that runs Python keeps the other waiting so long at most (CPython: 5 ms).
_SWITCH_S = 0.0002
# What submits a request.
Submit = Callable[[Tensors], "Future[dict[str, np.ndarray]]"]


@dataclass(frozen=True)
class ServedEngine:
    """An engine to be served. path, weights: files.  requests: .npz with the arrays 'NUMBER:INPUT'.  dim: of the batch,
    None where requests cannot be joined.  most, wait_s: of the batcher.  instant: every request is answered
    by the first answer, at once, so that what takes time is the server."""

    request: BuildRequest
    path: Path
    digest: str
    suffix: str
    weights: Path | None
    padding: Padding
    requests: Path
    dim: str | None
    most: int
    wait_s: float
    instant: bool = False

    def engine(self) -> Engine:
        """As a backend opens it."""
        requires = discovery.configure(self.request.backend, dict(self.request.options)).requires(self.request)
        size = self.path.stat().st_size
        return Engine(self.request, self.path, self.digest, size, self.suffix, requires, weights=self.weights)


def read_requests(path: Path) -> list[Tensors]:
    """The inputs of each request, in order."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for key, stored in stored_arrays(path).items():
        number, _, name = key.partition(":")
        found.setdefault(int(number), {})[name] = stored.read()
    return [found[number] for number in sorted(found)]


def write_requests(path: Path, requests: Sequence[Tensors]) -> None:
    """What `read_requests` reads."""
    arrays = {f"{number}:{name}": array for number, one in enumerate(requests) for name, array in one.items()}
    np.savez(path, allow_pickle=False, **arrays)


class BatchCounter:
    """Counts the batches of answered requests."""

    def __init__(self) -> None:
        self.samples, self.batches = 0, 0.0

    def add(self, served: BatchedRequest) -> None:
        """Count an answered request as its share of a batch."""
        self.samples += served.samples
        self.batches += served.samples / served.batch

    @property
    def mean(self) -> float:
        """Samples of a batch; 1 before the first."""
        return self.samples / self.batches if self.batches else 1.0


class _Answers:
    """Answers on their way to the other end, which go there together: each call of the socket lets the other thread
    run, which then keeps the one that answers waiting."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._waiting, self._sending = connection, deque[bytes](), Lock()

    def add(self, number: int, failed: bool, value: float) -> None:
        """Add an answer."""
        self._waiting.append(ANSWER.pack(number, failed, value))

    def add_result(self, number: int, future: "Future[dict[str, np.ndarray]]") -> None:
        """Add the answer to a request that was run."""
        self.add(number, future.exception() is not None, time.perf_counter())

    def flush(self) -> None:
        """Send them."""
        with self._sending:
            count = len(self._waiting)
            self._connection.sendall(b"".join(self._waiting.popleft() for _ in range(count)))


@contextmanager
def _submits(router: Router, plan: ServedEngine, answers: _Answers, counter: BatchCounter) -> Iterator[Submit]:
    """A function that submits a request; what waits is answered at the end."""
    if plan.dim is None:
        with ThreadPoolExecutor(1) as alone:

            def submit(inputs: Tensors) -> "Future[dict[str, np.ndarray]]":
                future = alone.submit(router.run, inputs)
                alone.submit(answers.flush)
                return future

            yield submit
    else:

        def record(served: BatchedRequest) -> None:
            counter.add(served)
            answers.flush()

        with Batcher(router, most=plan.most, wait_s=plan.wait_s, dim=plan.dim, record=record) as batcher:
            yield batcher.submit


def _yielding(answer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, after other threads of Python could run."""
    time.sleep(0)
    return answer


def _answer_at_once(session: Session, first: Tensors, dim: str | None) -> Callable[[Tensors], dict[str, np.ndarray]]:
    """A function that gives `first`, its first sample as often as there are samples along `dim`.

    As a runtime does, it lets other threads of Python run, which is a part of what a server costs.
    """
    if dim is None:
        return lambda _: _yielding(dict(first))
    axes = {spec.name: spec.shape.index(dim) for spec in (*session.inputs, *session.outputs)}
    name = session.inputs[0].name

    @cache
    def repeated(count: int) -> dict[str, np.ndarray]:
        return {key: np.repeat(array.take([0], axes[key]), count, axes[key]) for key, array in first.items()}

    return lambda inputs: _yielding(repeated(inputs[name].shape[axes[name]]))


def serve(connection: socket.socket, plan: ServedEngine) -> None:
    """Answer requests until the other end stops sending. Raises what opening the engine and its first run raise."""
    requests, answers = read_requests(plan.requests), _Answers(connection)
    with open_engine(plan.engine()) as session:
        begun = time.perf_counter()
        first = session.run(requests[0])
        answers.add(FIRST, False, time.perf_counter() - begun)
        answers.flush()
        run = _answer_at_once(session, first, plan.dim) if plan.instant else session.run
        routed = RoutedEngine(plan.request.unit, run, session.inputs, session.outputs, plan.request.profiles)
        router, counter = Router([routed], plan.padding), BatchCounter()
        with _submits(router, plan, answers, counter) as submit:
            rest = b""
            while data := connection.recv(_READ):
                rest += data
                whole = len(rest) // REQUEST.size * REQUEST.size
                for number, which in REQUEST.iter_unpack(rest[:whole]):
                    try:
                        submit(requests[which]).add_done_callback(partial(answers.add_result, number))
                    except EnginesmithError:
                        answers.add(number, True, time.perf_counter())
                        answers.flush()
                rest = rest[whole:]
        answers.add(END, False, counter.mean)
        answers.flush()


def main() -> None:
    """Serve; what goes wrong is one line on stderr and exit code 1."""
    # Ctrl-C goes to every process of the terminal; the generator answers it and then stops sending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    plan = decode(json.loads(Path(sys.argv[2]).read_text()), ServedEngine)
    try:
        with socket.socket(fileno=int(sys.argv[1])) as connection:
            serve(connection, plan)
    except BrokenPipeError:
        sys.exit(0)
    except EnginesmithError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
