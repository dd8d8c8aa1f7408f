"""Events to a Prefect API that is a server on loopback: what is told, and what is said when it is not taken."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.base import Store
from pipeline.fleet.coverage import work_for
from pipeline.orchestration.fleet import Message, messages, send
from pipeline.orchestration.gpu_workers import PAYLOADS
from tests.pipeline.fleet.fleets import built, nothing_known, published
from tests.pipeline.fleet.test_coverage import demand, group, stand

SAID = {"spec": "registered:digits", "registry": "file:///r", "by": "enginesmith fleet"}


class Events(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[dict] = []
        self.answer = 204

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api"


class Handler(BaseHTTPRequestHandler):
    server: Events

    def do_GET(self) -> None:
        self.reply(404, b"")  # a server without CSRF tokens

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.answer < 300:
            self.server.taken += body
        assert self.path == "/api/events"
        self.reply(self.server.answer, b"")

    def reply(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Events]:
    found = Events()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    with temporary_settings({PREFECT_API_URL: found.url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_one_event_for_each_model_to_build_and_each_generation_to_prove(store: Store) -> None:
    engines = [built(store, "l4", status="proven"), built(store, "sm_80"), built(store, "a100", "int8")]
    published(store, "digits", engines, targets=["l4", "sm_80", "sm_90", "sm_120"])
    groups = (group("l4"), group("a100", 2), group("a10"), group("h100"), group("rtxpro6000"))
    found = work_for(stand(store, demand(), *groups), nothing_known)
    assert [(item.unit.kind, item.unit.target.name, item.ready) for item in found] == [
        ("prove", "a100", True), ("build", "sm_120", True), ("build", "sm_86", False), ("build", "sm_90", False),
    ]  # fmt: skip
    told = messages(found, "file:///r")
    for item in told:
        PAYLOADS[item.event].check(item.event, {"model", *item.payload})
    assert [item.to_json() for item in told] == [
        {
            "event": "enginesmith.model.registered",
            "model": "digits",
            "payload": {
                "spec": "registered:digits",
                "registry": "file:///r",
                "units": ["digits@1 sm_120 fp16 tensorrt-rtx"],
                "by": "enginesmith fleet",
            },
        },
        {
            "event": "enginesmith.engine.unproven",
            "model": "digits",
            "payload": {
                "version": "1",
                "target": "sm_80",
                "engines": [engines[2].digest],
                "registry": "file:///r",
                "by": "enginesmith fleet",
            },
        },
    ]


def test_a_model_whose_spec_nobody_registered_is_a_persons_business(store: Store) -> None:
    published(store, "digits", [built(store, "l4", status="proven")], targets=["l4", "sm_120"], registered=False)
    (item,) = work_for(stand(store, demand(), group("rtxpro6000")), nothing_known)
    assert not item.ready and item.first == "register its spec: `enginesmith prefect register SPEC`"
    assert messages([item], "file:///r") == ()


def test_an_event_counts_when_the_server_has_taken_it(server: Events) -> None:
    message = Message("enginesmith.model.registered", "digits", SAID)
    told = send(message)
    (event,) = server.taken
    assert event["id"] == told and event["event"] == "enginesmith.model.registered"
    assert event["resource"]["prefect.resource.id"] == "enginesmith.model.digits"
    assert event["payload"] == {"model": "digits", **SAID}
    server.answer = 500
    with pytest.raises(UnavailableError, match="did not reach the Prefect server at http") as error:
        send(message)
    assert error.value.exit_code == 3


def test_without_a_server_it_is_said() -> None:
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(UnavailableError, match="set PREFECT_API_URL"):
        send(Message("enginesmith.model.registered", "digits", SAID))
