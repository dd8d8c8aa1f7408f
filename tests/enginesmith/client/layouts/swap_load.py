"""Clients that ask a server without a pause while its engine is swapped, and count what was not right.

The engines add a number each (`engines.adds`), so that an answer tells which engine gave it. A request that began after
a swap was over must be answered by that engine or a later one.
"""

import http.client
import json
import time
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from tests.waiting import PATIENCE_S

# Halves are exact; each is another one, so that a server which misreads some is seen.
IMAGE = [index / 2 for index in range(64)]


@dataclass
class SwapLoad:
    """Clients of a server on loopback. port: its own.  model: in the path.  clients: connections that ask at once."""

    port: int
    model: str = "digits"
    clients: int = 4
    asked: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    # What every engine adds that may answer a request from now on, at least.
    least: int = 0
    _stop: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)
    _threads: list[Thread] = field(default_factory=list)

    def __enter__(self) -> "SwapLoad":
        self._threads = [Thread(target=self._ask, daemon=True) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            self._ask_over(connection)

    def _ask_over(self, connection: http.client.HTTPConnection) -> None:
        while not self._stop.is_set():
            least, start_s = self.least, time.perf_counter()
            try:
                added_number = ask(connection, self.model)
                wrong_text = "" if added_number >= least else f"engine {added_number} answered after {least} was served"
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                added_number, wrong_text = -1, f"{type(error).__name__}: {error}"
                connection.close()
            with self._lock:
                self.asked += 1
                self.seconds.append(time.perf_counter() - start_s)
                self.given.add(added_number)
                self.failed += [wrong_text] if wrong_text else []


def ask(connection: http.client.HTTPConnection, model: str) -> int:
    """Ask once; what the engine that answered adds. Raises ValueError for an answer that is none of such an engine."""
    inputs = [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": IMAGE}]
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}))
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise ValueError(f"{response.status} {body[:300]!r}")
    values = json.loads(body)["outputs"][0]["data"]
    added_value = values[0] - sum(IMAGE)
    if len(set(values)) != 1 or added_value != round(added_value):
        raise ValueError(f"the answer {values} is that of no engine")
    return round(added_value)


def wait_for(port: int, model: str, number: int, limit_s: float = PATIENCE_S) -> None:
    """Ask until the engine that adds `number` answers. Raises TimeoutError."""
    deadline_s = time.monotonic() + limit_s
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        while ask(connection, model) != number:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the engine that adds {number} does not answer within {limit_s:g} s")
            time.sleep(0.02)
