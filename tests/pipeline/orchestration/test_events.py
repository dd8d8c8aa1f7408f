import json
import re
from collections.abc import Iterator
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.base import open_store
from pipeline.intake.registration import register
from pipeline.orchestration import watch
from pipeline.orchestration.flows.api import api_in_reach
from pipeline.orchestration.gpu_workers import (
    DRIFTED,
    FIELDS,
    JUDGED,
    OPTIONAL_FIELDS,
    PUBLISHED,
    check_payload,
    was_sent,
)
from pipeline.spec.model import load_spec
from tests.enginesmith.object_stores.servers import serving
from tests.pipeline.projects import Project
from tests.waiting import run_threads

JUDGED_CANARY: Any = (
    SimpleNamespace(model="tiny", version="3", channel="stable"),
    SimpleNamespace(target="sm_89", verdict="PASS"),
)


class Api(ThreadingHTTPServer):
    """Takes events, or answers with another code."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code = 204
        self.taken: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/events" and self.server.code == 204:
            self.server.taken += body
        self.send_response(self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """There is no CSRF token to be had, as on servers that are not told to ask for one."""
        self.send_error(404)


@pytest.fixture
def api() -> Iterator[Api]:
    with (
        serving(server := Api()) as url,
        temporary_settings({PREFECT_API_URL: f"{url}/api", PREFECT_API_KEY: "hunter2"}),
    ):
        yield server


def test_an_event_names_its_model_and_has_the_next_steps_parameters(api: Api, tmp_path: Path) -> None:
    store = open_store(tmp_path / "r", create=True)
    message = watch.send_published_once(store, "tiny", "3", "0" * 64)
    watch.send_judged(store, *JUDGED_CANARY, "1" * 64)
    assert message is not None
    first_call, second_call = api.taken
    assert (message.event, message.id) == (PUBLISHED, first_call["id"]) and second_call["event"] == JUDGED
    assert first_call["resource"] == {"prefect.resource.id": "enginesmith.model.tiny", "prefect.resource.name": "tiny"}
    assert first_call["payload"] == {"model": "tiny", "version": "3", "manifest": "0" * 64, "registry": store.uri}
    assert second_call["payload"].keys() >= {"model", "channel", "report", "registry"}
    assert "hunter2" not in json.dumps(api.taken)


def test_a_missing_server_is_reported() -> None:
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(UnavailableError, match="set PREFECT_API_URL"):
        watch.send_event(PUBLISHED, "tiny", {"version": "3", "manifest": "0" * 64, "registry": "r"})


def test_a_refusing_server_is_an_error_with_the_remedy(api: Api, tmp_path: Path) -> None:
    api.code = 500
    with pytest.raises(UnavailableError, match=r"did not reach the Prefect server.*PREFECT_API_URL"):
        watch.send_published_once(open_store(tmp_path / "r", create=True), "tiny", "3", "0" * 64)
    with pytest.raises(UnavailableError, match="not answer"), api_in_reach(), get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[])


@pytest.mark.parametrize(
    ("code", "message"), [(401, "refuses the credentials .401.; set PREFECT_API_AUTH_STRING"), (404, "ends in /api")]
)
def test_a_missing_password_and_a_url_without_api_are_named(api: Api, code: int, message: str) -> None:
    api.code = code
    with pytest.raises(UnavailableError, match=f"was not sent: Prefect: http.*{message}"):
        watch.send_event(PUBLISHED, "tiny", {"version": "3", "manifest": "0" * 64, "registry": "r"})
    with pytest.raises(UnavailableError, match=message), api_in_reach(), get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[])
    with pytest.raises(UnavailableError, match="ends in /api"), api_in_reach():
        json.loads("<!doctype html>")  # what Prefect's UI answers


def test_sent_events_are_recorded_by_subject(api: Api, tmp_path: Path) -> None:
    store = open_store(tmp_path / "r", create=True)
    assert not was_sent(store, PUBLISHED, "0" * 64)
    assert watch.send_published_once(store, "tiny", "3", "0" * 64) and not watch.send_published_once(
        store, "tiny", "3", "0" * 64
    )
    assert len(api.taken) == 1 and was_sent(store, PUBLISHED, "0" * 64)
    assert not was_sent(store, PUBLISHED, "1" * 64) and not was_sent(store, JUDGED, "0" * 64)


def test_concurrent_runs_send_one_event_per_version(api: Api, tmp_path: Path) -> None:
    store = open_store(tmp_path / "r", create=True)
    args = (watch.send_published_once, store, "tiny", "3", "0" * 64)
    run_threads(partial(copy_context().run, *args) for _ in range(4))
    assert len(api.taken) == 1


def test_an_unchanged_run_sends_an_event_that_failed_earlier(api: Api, built: Project) -> None:
    api.code = 500
    first_build = built.build("--runner", "prefect")
    assert first_build.code == 3 and "did not reach the Prefect server" in first_build.err
    api.code = 204
    second_build, third_build = (built.build("--runner", "prefect") for _ in range(2))
    assert second_build.code == third_build.code == 0 and "nothing was started" in third_build.err
    [event] = api.taken
    assert event["event"] == PUBLISHED and event["payload"]["version"] == "1"
    built.build()
    assert len(api.taken) == 1, "in this process, nobody asked for Prefect"


def test_all_senders_use_the_declared_events(api: Api, tmp_path: Path, project: Project) -> None:
    store = open_store(tmp_path / "r", create=True)
    item, _ = register(store, load_spec(project.spec))
    watch.send_registered(store, item)
    watch.send_published_once(store, "tiny", "3", "0" * 64)
    watch.send_judged(store, *JUDGED_CANARY, "1" * 64)
    for event in api.taken:
        check_payload(event["event"], event["payload"])
    with pytest.raises(ValueError, match=r"lacks \['manifest'\], has unknown \['digest'\]"):
        watch.send_event(PUBLISHED, "tiny", {"version": "3", "registry": store.uri, "digest": "0" * 64})


def test_the_page_has_the_table_of_events() -> None:
    page = (Path(__file__).parents[3] / "docs/guides/deployments.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `enginesmith.") and "`model`" in line]
    assert [event.strip("| `") for event, *_ in rows] == list(FIELDS)
    for event, (_, payload, _) in zip(FIELDS, rows, strict=True):
        always, _, sometimes = payload.partition("; optional: ")
        names = [{part.partition("`")[0] for part in re.split("(?:^|, )`", text)[1:]} for text in (always, sometimes)]
        assert names == [{"model", "registry", *FIELDS[event]}, {*OPTIONAL_FIELDS.get(event, ())}]


def test_the_example_sends_the_drift_event_in_prefects_form() -> None:
    from prefect.events import Event

    from examples.drifting_server import event

    start_time = datetime(2026, 11, 25, 10, tzinfo=UTC)
    sent_model = Event.model_validate(event(0.034, start_time, "3", "s3://models/r"))
    assert sent_model.event == DRIFTED and sent_model.payload["rate"] == "0.034"
    check_payload(DRIFTED, sent_model.payload)
