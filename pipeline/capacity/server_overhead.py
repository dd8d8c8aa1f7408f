"""What a server adds to the runs of its engine: timed with a session that answers at once, behind full queues."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from enginesmith.core.errors import UnavailableError
from enginesmith.core.reports.load import ServerOverhead
from pipeline.capacity.server_process import RunningServer, start_server
from validation.load.server import REQUEST, ServedEngine

# Requests of a round, of which the fastest counts: other work on the machine only ever adds to it.
REQUESTS, ROUNDS = 2_000, 3
_ROUND_S = 60.0


def time_server(plan: ServedEngine, folder: Path) -> ServerOverhead:
    """What the server of a plan adds to each batch and for each request of it.

    From the seconds a request of two servers whose queue is full, one that answers single requests and one that joins
    `plan.most`. Raises UnavailableError for a server that does not answer, and as `start_server`.
    """
    alone = _seconds_per_request(replace(plan, most=1, instant=True), folder)
    if plan.dim is None or plan.most == 1:
        return ServerOverhead(0.0, alone)
    joined = _seconds_per_request(replace(plan, instant=True), folder)
    batch_s = max((alone - joined) / (1 - 1 / plan.most), 0.0)
    return ServerOverhead(batch_s, max(alone - batch_s, 0.0))


def _seconds_per_request(plan: ServedEngine, folder: Path) -> float:
    with start_server(plan, folder, REQUESTS * ROUNDS) as server:
        receiving = threading.Thread(target=server.receive, daemon=True)
        receiving.start()
        found = min(_time_round(server, slice(at, at + REQUESTS)) for at in range(0, REQUESTS * ROUNDS, REQUESTS))
        server.stop_sending()
        receiving.join(_ROUND_S)
    return found / REQUESTS


def _time_round(server: RunningServer, numbers: slice) -> float:
    """Seconds until all requests of a round were answered, which are sent one after another without a pause."""
    messages = [REQUEST.pack(number, 0) for number in range(numbers.start, numbers.stop)]
    begun = time.perf_counter()
    for message in messages:
        server.send(message)
    _wait(lambda: bool(np.isfinite(server.done[numbers]).all()))
    return float(server.done[numbers].max()) - begun


def _wait(ended: Callable[[], bool]) -> None:
    until = time.perf_counter() + _ROUND_S
    while not ended():
        if time.perf_counter() > until:
            raise UnavailableError(f"the server answered too few requests within {_ROUND_S:g} s; is it overloaded?")
        time.sleep(0.002)
