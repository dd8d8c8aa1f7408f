"""A real Prefect server and worker on loopback, each in a process group of its own, and what tests ask of them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

Value = TypeVar("Value")

# Many times what it takes on a machine with nothing else to do.
PATIENCE_S = 240.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def until(what: str, look: Callable[[], Value | None], patience_s: float = PATIENCE_S) -> Value:
    """What `look` gives as soon as it gives something."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if swap := look():
            return swap
        time.sleep(0.2)  # each look at a server costs it 10 ms of CPU time
    raise AssertionError(f"{what}: not within {patience_s:g} s")


class Prefect:
    """A server with its database in `folder`, and a worker of the pool `enginesmith`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # It stays bound here, as nobody else may have it while the server is away; the server binds it too.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[4]),  # a flow's process has a current folder of its own
            "PREFECT_HOME": str(folder),
            "PREFECT_API_URL": self.url,
            "PREFECT_WORKER_QUERY_SECONDS": "0.5",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_DATABASE_TIMEOUT": "120",
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "120",
            "DO_NOT_TRACK": "1",
        }
        self._client = httpx.Client(base_url=self.url, timeout=60)
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None

    def start_server(self) -> None:
        self.server = self._start("server", "start", "--host", "127.0.0.1", "--port", str(self.port), "--no-ui")
        until("the server answers", self._healthy)

    def start_worker(self) -> None:
        self.worker = self._start("worker", "start", "--pool", "enginesmith", "--name", f"worker-{time.monotonic_ns()}")

    def end_worker(self) -> None:
        """End the worker, and the runs that it has started, whose processes may be in groups of their own."""
        end(self.worker)
        serving_pids = {self.server.pid} if self.server and self.server.poll() is None else set()
        for process in self._left():
            with suppress(psutil.Error):
                if not serving_pids & {process.pid, *(parent.pid for parent in process.parents())}:
                    process.kill()

    def stop(self) -> None:
        end(self.worker)
        end(self.server)
        for process in self._left():
            process.kill()
        self._client.close()
        self._held.close()

    def _left(self) -> Iterator[psutil.Process]:
        """Whatever of this server's still runs: only its own processes have this folder in their environment."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("PREFECT_HOME") == str(self.folder):
                    yield process

    def enginesmith(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "enginesmith", *map(str, words)]
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result

    @contextmanager
    def in_reach(self) -> Iterator[None]:
        """While inside, commands in this process use this server: two CPU seconds of imports less for each."""
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with pytest.MonkeyPatch.context() as patched_context, temporary_settings({PREFECT_API_URL: self.url}):
            patched_context.setenv("PREFECT_API_URL", self.url)
            yield

    def runs(self, flow: str) -> list[dict[str, Any]]:
        """The flow's runs, oldest first, without those of its schedule, which depend on the time of day."""
        body = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
        result = self.post("/flow_runs/filter", body)
        return [run for run in result if not run["auto_scheduled"]]

    def ended(self, flow: str, count: int) -> list[dict[str, Any]]:
        """The flow's runs once there are `count` and all have ended."""

        def look() -> list[dict[str, Any]] | None:
            result = self.runs(flow)
            return result if len(result) >= count and all(run["state_type"] in ENDED for run in result) else None

        try:
            return until(f"{count} ended runs of {flow}", look)
        except AssertionError as error:
            states = [run["state_type"] for run in self.runs(flow)]
            message = "\n".join([f"{error}; there are {states}", *self.failed_actions(), self._tell_errors()])
            raise AssertionError(message) from None

    def failed_actions(self) -> list[str]:
        """What automations could not do, with the reason: Prefect does not try it again, and no run comes of it."""
        requests = {"filter": {"event": {"name": ["prefect.automation.action.failed"]}}}
        result = self.post("/events/filter", requests)["events"]
        return [f"{event['payload']['action_type']}: {event['payload']['reason']}" for event in result]

    def _tell_errors(self) -> str:
        """The last lines of the server's and the worker's logs that tell of errors."""
        logs = (self.folder / f"{name}.log" for name in ("server", "worker"))
        lines = [line for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()]
        return "\n".join([line for line in lines if re.search("error|exception|locked", line, re.IGNORECASE)][-30:])

    def run(self, deployment: str, **parameters: Any) -> str:
        document = self._ask("GET", f"/deployments/name/{deployment}")
        return str(self.post(f"/deployments/{document['id']}/create_flow_run", {"parameters": parameters})["id"])

    def state(self, run: str) -> str:
        return str(self._ask("GET", f"/flow_runs/{run}")["state_type"])

    def cancel(self, run: str) -> None:
        self.post(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})

    def post(self, path: str, body: Any) -> Any:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        def answered() -> httpx.Response | None:
            try:
                request = self._client.request(method, path, json=body)
            except httpx.TimeoutException:
                if method == "GET" or path.endswith("/filter"):
                    return None  # it only asks, and a busy machine answers late
                raise
            return None if request.status_code == 503 else request  # SQLite is busy: Prefect's own client asks again

        answer = until(f"an answer to {path}", answered)
        answer.raise_for_status()
        return answer.json()

    def _healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            command = [sys.executable, "-m", "prefect", *words]
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)


def end(process: subprocess.Popen[bytes] | None) -> None:
    """End a process and all that it started; those that do not end when asked are killed."""
    if process is None or process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(family, timeout=20)[1]:
        child.kill()


@contextmanager
def prefect_server(folder: Path) -> Iterator[Prefect]:
    """A server that has this home; no worker yet."""
    prefect = Prefect(folder)
    try:
        prefect.start_server()
        yield prefect
    finally:
        prefect.stop()
