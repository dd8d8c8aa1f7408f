"""Takes reports over HTTP from nodes that may read the registry and not write it, and stores them.

A report is taken only of a node that the rollout that runs has reached, at most once a minute from each; all else is
answered with the reason. Who a node is, nobody proves: put an authenticating proxy before it, or a network policy.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from enginery.core import parsing
from enginery.core.errors import EngineryError, InputError, UnavailableError
from enginery.registry.rollouts.reports import LEAST_S, MAX_BYTES, SentReport, parse_report, report_key, write_report
from enginery.registry.rollouts.state import format_time
from enginery.registry.rollouts.waves import ServingNode
from enginery.registry.store.base import Store
from enginery.registry.versions.rolling import read_rollout

# Rollouts are read again after so many seconds.
_FRESH_S = 5.0
_MOST_NODES = 200_000


@dataclass
class ReportReceiver:
    """Checks and stores reports. clock: seconds, for tests."""

    store: Store
    clock: Callable[[], float] = time.time
    _taken: dict[str, float] = field(default_factory=dict)
    _running: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def take(self, data: bytes) -> tuple[int, str]:
        """Store a report; the HTTP status and the reason. Raises UnavailableError without the registry."""
        try:
            sent = parsing.parse_as(data, MAX_BYTES, SentReport)
            report = parse_report(sent.report.to_bytes())
            ServingNode(report.node, report.region)
            key = report_key(sent.model, sent.channel, sent.rollout, report.node)
            if self._find_running(sent.model, sent.channel) != sent.rollout:
                return 409, "no such rollout is running"
        except UnavailableError:
            raise
        except EngineryError as error:
            return 400, str(error)
        if not self._admit(key):
            return 429, f"a node reports at most every {LEAST_S:g} s"
        now = format_time(datetime.fromtimestamp(self.clock(), UTC))
        write_report(self.store, key, replace(report, at=now), self.store.read(key))
        return 204, ""

    def _find_running(self, model: str, channel: str) -> str:
        """The id of the channel's rollout; '' where none runs."""
        found = self._running.get((model, channel))
        if found is None or self.clock() - found[0] > _FRESH_S:
            rollout = read_rollout(self.store, model, channel)
            found = self.clock(), rollout.id if rollout and not rollout.is_finished else ""
            self._running[model, channel] = found
        return found[1]

    def _admit(self, key: str) -> bool:
        now = self.clock()
        with self._lock:
            if now - self._taken.get(key, -LEAST_S) < LEAST_S - 1:
                return False
            if len(self._taken) >= _MOST_NODES:
                self._taken = {name: at for name, at in self._taken.items() if now - at < LEAST_S}
            if len(self._taken) >= _MOST_NODES:
                return False
            self._taken[key] = now
        return True


def _handler(receiver: ReportReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_POST(self) -> None:
            """Take one report."""
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_BYTES:
                self._answer(413, f"a report has at most {MAX_BYTES} bytes")
                return
            try:
                self._answer(*receiver.take(self.rfile.read(int(length))))
            except EngineryError as error:
                self._answer(503, str(error))

        def _answer(self, status: int, why: str) -> None:
            body = why.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: fifty thousand nodes report."""

    return Handler


def make_server(receiver: ReportReceiver, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound and not started. Raises InputError where the address cannot be listened on."""
    try:
        return ThreadingHTTPServer((host, port), _handler(receiver))
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; give another --host or --port") from error


def serve_reports(store: Store, host: str, port: int, say: Callable[[str], object]) -> None:
    """Serve until the process ends. Raises InputError as `make_server`."""
    with make_server(ReportReceiver(store), host, port) as server:
        say(f"taking reports on http://{host}:{server.server_port}/")
        server.serve_forever()
