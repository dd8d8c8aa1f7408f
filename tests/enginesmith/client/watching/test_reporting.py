import http.server
import json
import resource
import socket
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from enginesmith.client.client import Client
from enginesmith.client.watching.server import (
    Command,
    HealthAnswer,
    HealthCommand,
    HealthUrl,
    Post,
    Reporter,
    ReportUrl,
)
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError, digest_of_bytes, read_token
from enginesmith.registry.rollouts.reports import (
    OUTSIDE,
    SILENT_S,
    TOKEN,
    NodeReport,
    SentReport,
    clear_reports,
    parse_report,
    read_reports,
    report_key,
)
from enginesmith.registry.rollouts.rollout_state import Gates, RolloutPlan, ServingNode, parse_wave
from enginesmith.registry.store.layout import SERVING, blob_key
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import change_channel
from pipeline.rollout import operations
from tests.enginesmith.client.watching.test_watch import following
from tests.enginesmith.object_stores.servers import serving
from tests.enginesmith.registries import engine, publish_engines

NODE = ServingNode("n1", "eu", ("canary",))
NOW = datetime(2026, 11, 1, tzinfo=UTC)
SENT = SentReport("digits", "stable", "r", NodeReport("n", "", "1", "t", "t"))


class Clock:
    def __init__(self) -> None:
        self.seconds = NOW.timestamp()

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rollout(store: Any) -> Any:
    """digits:stable serves 1, and 2 comes to nodes with the label canary."""
    publish_engines(store, [engine(store, data=b"one")], "one", channel="stable")
    second_manifest = publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest
    plan = RolloutPlan((parse_wave("label=canary"), parse_wave("100%")), (600, 600), Gates())
    return operations.start(store, second_manifest, "stable", plan, operations.Operator("ada", NOW))


def watcher(store: Any, dest: Any, clock: Clock, node: ServingNode = NODE, hook: Any = None, **options: Any) -> Any:
    output: list[str] = []
    reporter = Reporter(clock=clock, say=output.append, **options)
    client = Client(store.uri, node=node)
    return following(client, dest, hook, output.append, "digits:stable", reporter=reporter), output


def reports(store: Any, rollout: Any) -> Any:
    return read_reports(store, rollout).reports


def sent(store: Any, rollout: Any) -> Any:
    """The report of the node, with its own time."""
    return parse_report(store.read(report_key("digits", "stable", rollout.id, NODE.name)))


def test_a_node_in_the_wave_gets_the_candidate_and_reports_it(store, rollout, tmp_path, clock):
    own_watcher, _ = watcher(store, tmp_path / "a", clock)
    other_watcher, _ = watcher(store, tmp_path / "b", clock, ServingNode("n2", "eu"))
    assert own_watcher.once().version == "2" and other_watcher.once().version == "1"
    (result,) = reports(store, rollout)
    assert (result.node, result.region, result.version, result.failure) == ("n1", "eu", "2", "")
    assert sent(store, rollout).at == "2026-11-01T00:00:00.000+00:00"
    operations.abort(store, "digits", "stable", operations.Operator("ada", NOW))
    following_rollout = replace(rollout, id="next")
    assert own_watcher.once().version == "1" and clear_reports(store, rollout, lambda: rollout) == 0
    assert clear_reports(store, following_rollout, lambda: rollout) == 0  # it stood still, and another one runs by now
    assert clear_reports(store, following_rollout, lambda: following_rollout) == 1 and reports(store, rollout) == ()


def test_a_step_for_other_nodes_costs_a_node_one_request(rollout, store, tmp_path, clock):
    own_watcher, _ = watcher(store, tmp_path / "a", clock, ServingNode("n2", "us"), hook=None)
    assert own_watcher.once().version == "1"
    operations.pause(store, "digits", "stable", operations.Operator("ada", NOW))
    seen_digests: list[str] = []
    loaded_blob = type(store).read_blob
    try:
        type(store).read_blob = lambda self, digest: seen_digests.append(digest) or loaded_blob(self, digest)
        assert own_watcher.once().version == "1" and not seen_digests
    finally:
        type(store).read_blob = loaded_blob


def test_a_node_reports_at_most_once_a_minute_and_every_two_minutes(store, rollout, tmp_path, clock):
    health = {"failure": "", "requests": 10, "errors": 0}
    own_watcher, _ = watcher(store, tmp_path / "a", clock, health=lambda facts: HealthAnswer(**health))
    times = []
    for seconds in range(0, 400, 30):
        clock.seconds = NOW.timestamp() + seconds
        health["errors"] = 1 if seconds >= 300 else 0
        own_watcher.once()
        result = sent(store, rollout)
        times.append(result.at[14:19])
    assert times == sorted(times) and set(times) == {"00:00", "02:00", "04:00", "05:00"}
    assert result.errors == 1 and result.requests == 10 and result.since[14:19] == "00:00"


def test_a_failed_pull_or_hook_is_reported(store, rollout, tmp_path, clock):
    own_watcher, _ = watcher(store, tmp_path / "a", clock, hook=Command("false"))
    with pytest.raises(EnginesmithError, match="hook"):
        own_watcher.once()
    (result,) = reports(store, rollout)
    assert (result.version, result.failure) == ("2", "hook") and "ended with 1" in result.detail
    store.remove(blob_key(digest_of_bytes(b"two")))
    own_watcher, _ = watcher(store, tmp_path / "b", clock)
    with pytest.raises(EnginesmithError):
        own_watcher.once()
    (result,) = reports(store, rollout)
    assert (result.version, result.failure) == ("", "pull") and len(result.detail) <= 200


def test_an_unhealthy_server_counts_as_starting_at_first(store, rollout, tmp_path, clock):
    own_watcher, _ = watcher(store, tmp_path / "a", clock, health=HealthCommand("false"))
    own_watcher.once()
    assert reports(store, rollout) == ()
    clock.seconds += 30
    own_watcher.once()
    (result,) = reports(store, rollout)
    assert (result.failure, result.detail) == ("unhealthy", "health command ended with 1")


def test_failed_writes_of_reports_are_reported_once(store, rollout, tmp_path, clock, monkeypatch):
    def refuse(*_):
        raise UnavailableError("access denied")

    monkeypatch.setattr("enginesmith.registry.rollouts.reports.write_report", refuse)
    own_watcher, output = watcher(store, tmp_path / "a", clock)
    for _ in range(5):
        assert own_watcher.once().version == "2"
        clock.seconds += 61
    assert [line for line in output if "access denied" in line] == [
        "the report of this node cannot be delivered, so rollout gates do not count the node: access denied"
    ]


def test_two_nodes_with_one_name_are_reported(store, rollout, tmp_path, clock):
    one_watcher, output = watcher(store, tmp_path / "a", clock)
    other_watcher, _ = watcher(store, tmp_path / "b", clock)
    one_watcher.once()
    clock.seconds += 1
    other_watcher.once()
    clock.seconds += 120
    one_watcher.once()
    assert [line for line in output if "another process reports as node 'n1'" in line]


@pytest.fixture
def stable(store: Any) -> Any:
    """digits:stable serves 1, and no rollout runs; the versions 1 and 2."""
    manifest = publish_engines(store, [engine(store, data=b"one")], "one", channel="stable").manifest
    return manifest, publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest


def outside(store: Any) -> NodeReport:
    return parse_report(store.read(report_key("digits", "stable", OUTSIDE, NODE.name)))


def test_outside_rollouts_changes_and_every_hour_are_reported(store, stable, tmp_path, clock):
    counts = {"requests": 1, "errors": 0}
    own_watcher, _ = watcher(store, tmp_path / "a", clock, health=lambda facts: HealthAnswer(**counts))
    times = []
    for minutes in (*range(0, 190, 10), 191, 192):
        clock.seconds = NOW.timestamp() + 60 * minutes
        if minutes == 191:
            channels.promote(store, stable[1], "stable")
        counts["errors"] += 1  # is no news
        own_watcher.once()
        times.append(outside(store).at[11:16])
    assert sorted(set(times)) == ["00:00", "01:00", "02:00", "03:00", "03:11"]
    report = outside(store)
    assert (report.version, report.failure, report.since[11:16]) == ("2", "", "03:11")
    assert (report.engine, report.unit) == (stable[1].engines[0].digest, stable[1].engines[0].unit)
    assert report.machine.startswith("cpu")


def test_a_process_continues_from_its_predecessors_reports(store, stable, tmp_path, clock):
    watcher(store, tmp_path / "a", clock)[0].once()
    clock.seconds += 600
    own_watcher, output = watcher(store, tmp_path / "a", clock)
    own_watcher.once()
    assert outside(store).at[11:16] == "00:00"
    clock.seconds += 3000
    own_watcher.once()
    assert (outside(store).at[11:16], outside(store).since[11:16]) == ("01:00", "00:00")
    store.remove(report_key("digits", "stable", OUTSIDE, NODE.name))  # by a collection that counted it as gone
    clock.seconds += 3600
    own_watcher.once()
    assert outside(store).at[11:16] == "02:00" and not [line for line in output if "report" in line]


def test_a_failed_pull_is_also_reported_with_the_served_version(store, stable, tmp_path, clock):
    own_watcher, _ = watcher(store, tmp_path / "a", clock)
    own_watcher.once()
    channels.promote(store, stable[1], "stable")
    store.remove(blob_key(digest_of_bytes(b"two")))
    clock.seconds += 60
    with pytest.raises(EnginesmithError):
        own_watcher.once()
    assert (outside(store).version, outside(store).failure) == ("1", "pull")


def test_only_selected_nodes_report_and_a_rollout_selects_first(store, rollout, tmp_path, clock):
    change_channel(store, "digits", "stable", lambda channel: replace(channel, reporters_ppm=0))
    own_watcher, _ = watcher(store, tmp_path / "a", clock)
    other_watcher, _ = watcher(store, tmp_path / "b", clock, ServingNode("n2", "eu"))
    own_watcher.once(), other_watcher.once()
    assert list(store.list(SERVING)) == [report_key("digits", "stable", rollout.id, "n1")]
    change_channel(store, "digits", "stable", lambda channel: replace(channel, reporters_ppm=1_000_000))
    own_watcher.once(), other_watcher.once()
    assert list(store.list(f"{SERVING}digits/stable/{OUTSIDE}/")) == [report_key("digits", "stable", OUTSIDE, "n2")]


def test_missing_write_access_is_reported_once(store, stable, tmp_path, clock, monkeypatch):
    tries = []

    def refuse(*_):
        tries.append(round((clock.seconds - NOW.timestamp()) / 3600))
        raise UnavailableError("access denied")

    monkeypatch.setattr("enginesmith.registry.rollouts.reports.write_report", refuse)
    own_watcher, output = watcher(store, tmp_path / "a", clock)
    for _ in range(300):
        own_watcher.once()
        clock.seconds += 3600
    assert tries == [0, 1, 2, 3, 5, 8, 14, 25, 47, 90, 176, 262]
    (line,) = [line for line in output if "rollout status --nodes` does not list the node" in line]
    assert "--report URL sends reports to a receiver" in line


def test_reports_go_to_a_url_without_write_access(store, rollout, tmp_path, clock):
    got = []

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def do_GET(self):
            self.send_response(503 if self.path == "/ill" else 200)
            self.end_headers()
            self.wfile.write(b'{"requests": 7, "errors": 2}')

    with serving(http.server.HTTPServer(("127.0.0.1", 0), Endpoint)) as url:
        own_watcher, _ = watcher(store, tmp_path / "a", clock, url=ReportUrl(url), health=HealthUrl(url))
        own_watcher.once()
        assert HealthUrl(f"{url}/ill")({}).failure == "health URL answers 503"
    assert (got[0]["rollout"], got[0]["report"]["node"], got[0]["report"]["requests"]) == (rollout.id, "n1", 7)
    assert reports(store, rollout) == ()
    assert "does not answer" in HealthUrl(url, 1)({}).failure
    with pytest.raises(UnavailableError, match=r"does not answer: .*refused"):
        ReportUrl(url, 1).send(SENT)


def test_a_health_command_may_print_counts(tmp_path):
    line = f'{sys.executable} -c "print(\'{{\\"requests\\": 5, \\"errors\\": 1}}\')"'
    assert (HealthCommand(line)({}).requests, HealthCommand(line)({}).errors) == (5, 1)
    assert HealthCommand("sleep 9", 0.1)({}).failure.endswith("was killed")
    assert "cannot be started" in HealthCommand(str(tmp_path / "none"))({}).failure
    assert HealthCommand("echo []")({}).requests is None
    for make in (lambda: HealthCommand(""), lambda: HealthUrl("ftp://x"), lambda: ReportUrl("x")):
        with pytest.raises(InputError):
            make()


def test_a_client_is_a_node(store, rollout, tmp_path, monkeypatch):
    assert Client(store.uri, node=NODE).resolve("digits:stable", "cpu").what == "digits@2"
    assert Client(store.uri, node=None).resolve("digits:stable", "cpu").what == "digits@1"
    monkeypatch.setenv("ENGINESMITH_LABELS", "canary")
    assert Client(store.uri).pull("digits:stable", tmp_path, target="cpu").located.manifest.version == "2"
    assert SILENT_S > 120


ANSWERS = {
    "cut": b"HTTP/1.1 500 Gone\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "leads to no URL": b"HTTP/1.1 302 Found\r\nLocation: http://[::x/\r\nContent-Length: 0\r\n\r\n",
    "leads to no name": b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 300 + b"/\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_no_response_of_a_url_ends_a_watcher(answer):
    def serve():
        for _ in range(3):
            connection, _ = listening_server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening_server:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening_server.getsockname()[1]}/"
        assert HealthUrl(url, 10)({}).failure
        assert Post(url, 10)({})
        with pytest.raises(UnavailableError, match=r"the report URL (answers 500|.*: (?!None)\w)"):
            ReportUrl(url, 10).send(SENT)
        thread.join()


def test_a_token_is_one_line_without_surrounding_spaces(monkeypatch):
    monkeypatch.setenv(TOKEN, " secret\n")
    assert read_token(TOKEN) == "secret"
    for wrong_name in ("two\nlines", "\u20ac"):
        monkeypatch.setenv(TOKEN, wrong_name)
        with pytest.raises(InputError, match="ENGINESMITH_REPORT_TOKEN holds no token"):
            ReportUrl("http://127.0.0.1:9/").send(SENT)


def test_a_health_command_with_endless_output_uses_no_memory():
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "took over 0.5 s" in HealthCommand("yes", 0.5)({}).failure
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 50 << 10  # KiB
    assert HealthCommand("sh -c 'head -c 1000000 /dev/zero'")({}).failure == ""
