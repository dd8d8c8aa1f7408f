"""Caches in processes of their own, as `enginesmith cache` starts them, over registries that count what they send."""

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class RunningCache:
    """A cache. url: where it listens.  said: the lines of its stderr so far."""

    url: str
    folder: Path
    process: "subprocess.Popen[str]"
    said: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; a body that breaks off raises IncompleteRead."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = self.ask("/metrics")[2].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].split(" ")[0] == name)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def run_cache(registry: str, folder: Path, *options: str, port: int = 0) -> Iterator[RunningCache]:
    """A cache of the registry in a folder of its own, until the block ends."""
    command = [sys.executable, "-m", "enginesmith", "cache", "--listen", f"127.0.0.1:{port}", "--dir", str(folder)]
    with subprocess.Popen(
        [*command, "--registry", registry, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda stream: said.extend(stream), args=(process.stderr,), daemon=True)
        reader.start()
        try:
            line = process.stdout.readline()
            assert line, "".join(said)
            yield RunningCache(line.split()[0], folder, process, said)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            reader.join(10)
    assert "Traceback" not in "".join(said), "".join(said)
