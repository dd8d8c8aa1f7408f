"""The alarm of a router as an event: what is posted, tries, credentials."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from enginesmith.core.errors import InputError
from enginesmith.serving import drift
from enginesmith.serving.drift import DriftEvent, RateDrift
from pipeline.orchestration.gpu_workers import DRIFTED, PAYLOADS
from tests.waiting import PATIENCE_S

DRIFT = RateDrift(0.01, 0.034, 812, "2026-11-25T10:00:00+00:00", 1500, 40, "2026-11-25T10:05:00+00:00")


class Api(ThreadingHTTPServer):
    """Takes events; answers with the codes of `codes` first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.codes: list[int] = []
        self.taken: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.authorizations.append(self.headers["Authorization"])
        code = self.server.codes.pop(0) if self.server.codes else 204
        if self.path == "/api/events" and code == 204:
            self.server.taken += body
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    for name in ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    with Api() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_an_alarm_is_an_event_with_the_fields_that_triggers_read(api: Api) -> None:
    DriftEvent("tiny", "3", "s3://models/r", api.url)(DRIFT).join(PATIENCE_S)
    [event] = api.taken
    assert event["event"] == DRIFTED
    assert event["resource"]["prefect.resource.id"] == "enginesmith.model.tiny"
    PAYLOADS[DRIFTED].check(DRIFTED, event["payload"])
    assert (event["payload"]["rate"], event["payload"]["reference"]) == ("0.034", "0.01")


def test_prefect_reads_it_as_an_event() -> None:
    from prefect.events import Event

    [body] = DriftEvent("tiny", "3", "s3://models/r", "http://127.0.0.1/api").body(DRIFT)
    assert Event.model_validate(body).payload["model"] == "tiny"


def test_it_is_sent_again_until_the_server_takes_it(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "RETRIES_S", (0.0, 0.0))
    api.codes = [503, 503]
    DriftEvent("tiny", "3", "s3://models/r", api.url)(DRIFT).join(PATIENCE_S)
    assert len(api.taken) == 1 and len(api.authorizations) == 3


def test_a_server_that_never_takes_it_is_warned_of_without_its_password(api, monkeypatch):
    monkeypatch.setattr(drift, "RETRIES_S", ())
    api.codes = [500]
    event = DriftEvent("tiny", "3", "s3://models/r", api.url.replace("127.", "me:secret@127."))
    with pytest.warns(UserWarning, match="of tiny did not reach http://127.0.0.1") as found:
        event._send(event.body(DRIFT))
    assert "secret" not in str(found[0].message)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [("PREFECT_API_KEY", "k1", "Bearer k1"), ("PREFECT_API_AUTH_STRING", "me:pw", "Basic bWU6cHc=")],
)
def test_credentials_are_those_of_prefects_client(api, monkeypatch, name, value, wanted):
    monkeypatch.setenv(name, value)
    DriftEvent("tiny", "3", "s3://models/r", api.url)(DRIFT).join(PATIENCE_S)
    assert api.authorizations == [wanted] and "pw" not in json.dumps(api.taken)


def test_the_server_is_that_of_the_environment_or_an_error(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="set PREFECT_API_URL"):
        DriftEvent("tiny", "3", "s3://models/r")
    monkeypatch.setenv("PREFECT_API_URL", api.url)
    DriftEvent("tiny", "3", "s3://models/r")(DRIFT).join(PATIENCE_S)
    assert len(api.taken) == 1
