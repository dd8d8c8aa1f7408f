"""An HTTP server that changes its engine while it answers: ONNX Runtime with the link `current` of a watch.

    enginesmith pull digits:stable --follow --target cpu --dest engines --hook http://127.0.0.1:8000/reload
    python examples/swapping_server.py engines 8000

POST /reload opens the engine behind `current`, and answers once this engine serves, else with an error, after which the
watch calls again. POST /v2/models/MODEL/infer takes and returns tensors as JSON, by the Open Inference Protocol. No
request fails at a swap: the new engine is opened and run once beside the old one, then a variable is rebound. Each
request keeps its engine; the old one is freed after its last request. The server needs memory for two engines.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

import enginesmith

TYPES = {"FP32": "float32", "FP16": "float16", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}
LARGEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Served:
    """An open engine. folder: of its files.  run: inputs to outputs, by name."""

    folder: Path
    version: str
    run: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


class EngineServer(ThreadingHTTPServer):
    """Answers with the engine behind `current` at the last reload. folder: of the watch.  port: 0 for any free."""

    daemon_threads = True
    # Connections that wait to be accepted: the default, 5, is less than a burst of clients.
    request_queue_size = 128

    def __init__(self, folder: Path, port: int) -> None:
        self._current = folder / "current"
        self._one_reload = Lock()
        self.served = open_served(self._current)
        super().__init__(("127.0.0.1", port), Requests)

    def reload(self) -> None:
        """Open the engine behind `current`, if it is another one, and answer with it from now on."""
        with self._one_reload:
            if self._current.resolve() != self.served.folder:
                self.served = open_served(self._current)


class Requests(BaseHTTPRequestHandler):
    """A connection, in its own thread."""

    protocol_version = "HTTP/1.1"
    # The head and the body of an answer are two packets; Nagle's algorithm delays the second by 40 ms.
    disable_nagle_algorithm = True
    server: EngineServer

    def do_POST(self) -> None:
        """Reload, or answer a request; errors are answered with status 400."""
        body = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), LARGEST_BYTES))
        try:
            if self.path == "/reload":
                self.server.reload()
                return self._answer(200, {})
            served_requests = self.server.served  # once: a swap during this request does not change it
            return self._answer(200, answer(served_requests, json.loads(body)))
        except Exception as error:  # of a request or of opening an engine: the server continues
            return self._answer(400, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, found: Mapping[str, Any]) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log no requests."""


def open_served(current: Path) -> Served:
    """Open the engine behind the link, and run it once, so that no request waits for its first run."""
    folder = current.resolve()  # once: later changes of the link do not matter
    path = next(folder.glob("*.json"))
    described_document = json.loads(path.read_bytes())
    run = enginesmith.open_onnx(path)
    tuned_ranges = {name: opt_shape for name, _, opt_shape, _ in described_document["profiles"][0]["inputs"]}
    run({item["name"]: np.zeros(tuned_ranges[item["name"]], item["dtype"]) for item in described_document["inputs"]})
    return Served(folder, described_document["version"], run)


def answer(served: Served, request: Mapping[str, Any]) -> dict[str, Any]:
    """The response of the Open Inference Protocol to a request whose tensors are JSON."""
    inputs = {
        item["name"]: np.asarray(item["data"], TYPES[item["datatype"]]).reshape(item["shape"])
        for item in request["inputs"]
    }
    names = {dtype: name for name, dtype in TYPES.items()}
    outputs = [
        {"name": name, "datatype": names[str(array.dtype)], "shape": array.shape, "data": array.ravel().tolist()}
        for name, array in served.run(inputs).items()
    ]
    return {"model_version": served.version, "outputs": outputs}


if __name__ == "__main__":
    with EngineServer(Path(sys.argv[1]), int(sys.argv[2])) as server:
        print(f"serving {server.served.folder.name} at http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
