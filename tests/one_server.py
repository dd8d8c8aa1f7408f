"""One fork server for all builds of a test process, as there is one for all jobs of a build.

A server forks only for the environment that it was started with. So pytest's variable of the current test, another for
each, is taken away while a test or a fixture runs, and a build in another environment replaces the server.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock

from builders.execution.fork_client import fork_server
from builders.execution.process import Start, environment

CURRENT_TEST = "PYTEST_CURRENT_TEST"
# What jobs import for themselves: an export 0.4 s of CPU time, each session's 0.1 s. The product's server leaves it to
# them for its memory, and for the thread that telemetry starts where a user has turned it on.
ALSO_PRELOADED = (
    "onnxruntime", "onnx_ir.passes.common", "pipeline.sources.canonical", "pipeline.sources.constant_ifs",
    "pipeline.sources.export",
)  # fmt: skip


@contextmanager
def without_current_test() -> Iterator[None]:
    """While inside, the environment is the same for every test."""
    name = os.environ.pop(CURRENT_TEST, None)
    try:
        yield
    finally:
        if name is not None:
            os.environ[CURRENT_TEST] = name


class OneServer:
    """Stands for `fork_server`. A server that is in use is left as it is, and spawns for another environment."""

    def __init__(self) -> None:
        self._server, self._process, self._lock, self._users = ExitStack(), os.getpid(), Lock(), 0
        self._made_for: tuple[dict[str, str], Sequence[str]] | None = None
        self._start: Start

    @contextmanager
    def __call__(self, modules: Sequence[str]) -> Iterator[Start]:
        with self._lock:
            if self._process != os.getpid():  # a fork: its parent's server is not its own to end, and is not forgotten
                self._parents, self._server = self._server, ExitStack()
                self._process, self._users, self._made_for = os.getpid(), 0, None
            if not self._users and self._made_for != (environment(), modules):
                self.stop()
                self._start = self._server.enter_context(fork_server([*modules, *ALSO_PRELOADED]))
                self._made_for = environment(), modules
            self._users += 1
        try:
            yield self._start
        finally:
            with self._lock:
                self._users -= 1

    def stop(self) -> None:
        self._server.close()
