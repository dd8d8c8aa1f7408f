"""Triton itself on loopback, from the wheel of nvidia-pytriton, unpacked: `ENGINESMITH_TRITON` names its folder.

    pip download --no-deps nvidia-pytriton==0.7.0 && python -m zipfile -e nvidia_pytriton-*.whl FOLDER

The wheel holds the server (2.51.0, which runs without a GPU) and its Python backend. Where it is installed it wants
numpy below 2, so it is no dependency of the tests, and only its files are used. The backend `onnxruntime`, which it has
not, is `triton_backend/model.py`: ONNX Runtime in Python.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIABLE = "ENGINESMITH_TRITON"
BACKEND = Path(__file__).parent / "triton_backend" / "model.py"


def find_triton() -> Path | None:
    """The folder of the unpacked wheel; None where none is named."""
    result = os.environ.get(VARIABLE)
    return Path(result).absolute() if result else None


@dataclass(frozen=True)
class TritonServer:
    """A server that runs. log: what it prints."""

    port: int
    log: Path

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def triton(wheel: Path, repository: Path, folder: Path, *options: str) -> Iterator[TritonServer]:
    """Run Triton on a repository. folder: for backends, log. Raises TimeoutError with the log's end after a minute."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    server, libraries = wheel / "pytriton" / "tritonserver", wheel / "nvidia_pytriton.libs"
    backends = _lay_out_backends(server, folder / "backends")
    program = shutil.copy(server / "bin" / "tritonserver", folder / "tritonserver")
    Path(program).chmod(0o755)
    command = [
        program, "--model-repository", str(repository), "--backend-directory", str(backends),
        "--http-address", "127.0.0.1", "--http-port", str(port), "--allow-grpc", "false", "--allow-metrics", "false",
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(Path(np.__file__).parents[1])}
    log = folder / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        actual = TritonServer(port, log)
        deadline_s = time.monotonic() + 60
        while not actual.is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise TimeoutError(f"Triton is not ready; its log ends:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield actual
    finally:
        process.terminate()
        process.wait(60)


def _lay_out_backends(server: Path, backends: Path) -> Path:
    """The folder of backends: Python's, with the stub of this Python, and the one named onnxruntime."""
    shutil.copytree(server / "backends" / "python", backends / "python")
    version = "{}.{}".format(*sys.version_info[:2])
    stub = shutil.copy(server / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    Path(stub).chmod(0o755)
    (backends / "onnxruntime").mkdir()
    shutil.copy(BACKEND, backends / "onnxruntime" / "model.py")
    return backends
