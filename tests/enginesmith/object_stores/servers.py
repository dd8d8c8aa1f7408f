"""The servers of a test run, started when they are asked for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import HTTPServer
from threading import Thread
from types import TracebackType

import pytest

from tests.enginesmith.faulty_proxy import FaultyProxy, proxying
from tests.enginesmith.object_stores import azure_server
from tests.enginesmith.object_stores.kinds import KINDS


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Let a server answer in a thread until the block ends, without a log; its URL."""
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
    with server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Servers:
    """One server, and one proxy, of each kind that is asked for; they end with the context."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._urls: dict[str, str] = {}
        self._proxies: dict[str, FaultyProxy] = {}

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def url(self, kind: str) -> str:
        """The URL of the server of this kind. Skips the test where it, or its library, is not installed."""
        if kind == "gs":
            pytest.importorskip("google.cloud.storage", reason="pip install './enginesmith[gcs]'")
        if kind == "az":
            if azure_server.program() is None:
                pytest.skip("Azurite is not installed here: `make azurite` puts it into build/azurite (needs node)")
            pytest.importorskip("azure.storage.blob", reason="pip install './enginesmith[azure]'")
        if kind not in self._urls:
            self._urls[kind] = self._stack.enter_context(KINDS[kind].serving())
        return self._urls[kind]

    def proxy(self, kind: str) -> FaultyProxy:
        url = self.url(kind)
        if kind not in self._proxies:
            self._proxies[kind] = self._stack.enter_context(proxying(url))
        return self._proxies[kind]
