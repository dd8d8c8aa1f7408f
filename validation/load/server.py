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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from builders.backends import discovery
from builders.backends.compatibility import open_engine
from enginery.arrays import stored_arrays
from enginery.core.codec import decode
from enginery.core.errors import EngineryError
from enginery.core.types import BuildRequest, Engine, Tensors
from enginery.serving.batcher import BatchedRequest, Batcher
from enginery.serving.buckets import RoutedEngine
from enginery.serving.padding import Padding
from enginery.serving.router import Router

# A request: its number, and which inputs it has.  An answer: the number, whether it failed, seconds or a count.
REQUEST, ANSWER = struct.Struct("<II"), struct.Struct("<IBxxxf")
# Numbers of answers that are none: the first request was answered (in so many seconds); the end (mean batch).
FIRST, END = 0xFFFFFFFE, 0xFFFFFFFF
_READ = 1 << 16
# What submits a request.
Submit = Callable[[Tensors], "Future[dict[str, np.ndarray]]"]


@dataclass(frozen=True)
class ServedEngine:
    """An engine to be served. path, weights: files.  requests: .npz with the arrays 'NUMBER:INPUT'.  dim: of the batch,
    None where requests cannot be joined.  most, wait_s: of the batcher."""

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


@contextmanager
def _submits(router: Router, plan: ServedEngine, counter: BatchCounter) -> Iterator[Submit]:
    """A function that submits a request; what waits is answered at the end."""
    if plan.dim is None:
        with ThreadPoolExecutor(1) as alone:
            yield lambda inputs: alone.submit(router.run, inputs)
    else:
        with Batcher(router, most=plan.most, wait_s=plan.wait_s, dim=plan.dim, record=counter.add) as batcher:
            yield batcher.submit


def serve(connection: socket.socket, plan: ServedEngine) -> None:
    """Answer requests until the other end stops sending. Raises what opening the engine and its first run raise."""
    requests, writing = read_requests(plan.requests), threading.Lock()

    def send(number: int, failed: bool, value: float = 0.0) -> None:
        with writing:
            connection.sendall(ANSWER.pack(number, failed, value))

    def answer(number: int, future: "Future[dict[str, np.ndarray]]") -> None:
        send(number, future.exception() is not None)

    with open_engine(plan.engine()) as session:
        routed = RoutedEngine(plan.request.unit, session.run, session.inputs, session.outputs, plan.request.profiles)
        router, counter = Router([routed], plan.padding), BatchCounter()
        begun = time.perf_counter()
        router.run(requests[0])
        send(FIRST, False, time.perf_counter() - begun)
        with _submits(router, plan, counter) as submit:
            rest = b""
            while data := connection.recv(_READ):
                rest += data
                whole = len(rest) // REQUEST.size * REQUEST.size
                for number, which in REQUEST.iter_unpack(rest[:whole]):
                    try:
                        submit(requests[which]).add_done_callback(partial(answer, number))
                    except EngineryError:
                        send(number, True)
                rest = rest[whole:]
        send(END, False, counter.mean)


def main() -> None:
    """Serve; what goes wrong is one line on stderr and exit code 1."""
    # Ctrl-C goes to every process of the terminal; the generator answers it and then stops sending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = decode(json.loads(Path(sys.argv[2]).read_text()), ServedEngine)
    try:
        with socket.socket(fileno=int(sys.argv[1])) as connection:
            serve(connection, plan)
    except BrokenPipeError:
        sys.exit(0)
    except EngineryError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
