import json
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from enginesmith.client.watching.server import ReportUrl
from enginesmith.core.errors import ConflictError, HttpAddress, InputError, UnavailableError, UnknownNameError
from enginesmith.registry.rollouts.reports import OUTSIDE, TOKEN, NodeReport, SentReport, read_reports, report_key
from enginesmith.registry.rollouts.rollout_state import Rollout, ServingNode, format_time, is_reached
from enginesmith.registry.store.base import FileStore, Store
from enginesmith.registry.versions import channel_state
from enginesmith.registry.versions.channel_writes import read_rollout
from pipeline.rollout.receiving import ReportReceiver, make_server
from tests.enginesmith.cli.commands import run, said, told
from tests.waiting import PATIENCE_S

WHERE = "digits:stable"


@pytest.fixture
def serving(three: Store) -> Store:
    said("promote", "digits@1")
    return three


def stable_rollout(store: Store) -> Rollout:
    rollout = read_rollout(store, "digits", "stable")
    assert rollout is not None
    return rollout


def started(store: Store, *options: object) -> Rollout:
    """The rollout of version 2 in these waves."""
    said("rollout", "start", "digits@2", WHERE, *options)
    return stable_rollout(store)


def test_a_rollout_runs_from_start_to_end(serving: Store) -> None:
    text = said("rollout", "start", "digits@2", WHERE, "--wave", "50%,100%", "--soak", "0s", "--why", "faster")
    assert "digits:stable: rollout" in text and "is running (started, wave 50%; the channel serves version 1)" in text
    assert "50%, 100% with 0s each; gates: none" in text
    assert "open; no controller has polled" in said("rollout", "status", WHERE)
    assert len(told("rollout", "status")) == 1
    assert "is paused" in said("rollout", "pause", WHERE, "--why", "lunch")
    assert "is running (resumed" in said("rollout", "resume", "digits")
    result = run("rollout", "watch", WHERE, "--interval", "0.05", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["state"] == "done" and "digits:stable: wave: its time is over" in result.stderr
    channel = channel_state.read_channel(serving, "digits", "stable")
    assert channel and channel.version == "2" and channel.move.by == "ada"
    (actual,) = told("rollout", "status", WHERE)
    expected = ["started, wave 50%", "paused", "resumed", "wave 100%", "done"]
    assert [item["what"] for item in actual["history"]] == expected
    assert (actual["history"][1]["why"], actual["history"][1]["by"]) == ("lunch", "ada")
    assert said("rollout", "status") == "no rollout is running\n"


def test_an_operators_decision_has_the_stores_time(serving: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "now", lambda _: datetime(2031, 1, 1, tzinfo=UTC))
    said("rollout", "start", "digits@2", WHERE, "--wave", "50%,100%", "--soak", "6h")
    for command in ("pause", "resume", "abort"):
        said("rollout", command, WHERE)
    rollout = stable_rollout(serving)
    assert {item.at[:4] for item in rollout.history} == {rollout.opened[:4]} == {"2031"}


def test_the_next_rollout_records_an_abort(serving: Store) -> None:
    said("rollout", "start", "digits@2", WHERE, "--wave", "100%")
    second_result = run("rollout", "start", "digits@3", WHERE, "--wave", "100%")
    assert isinstance(second_result.exception, ConflictError) and "ada started it" in str(second_result.exception)
    assert "is aborted (the channel serves version 1)" in said("rollout", "abort", WHERE, "--why", "no")
    assert run("rollout", "watch", WHERE, "--once").exit_code == 1
    assert "is aborted since" in str(run("rollout", "abort", WHERE).exception)
    said("rollout", "start", "digits@3", WHERE, "--wave", "region=eu,100%", "--soak", "1m,2h")
    text = said("rollout", "status", WHERE)
    assert "earlier rollouts" in text and "region=eu" in text and "7200 s" in text


def test_a_rollback_during_a_rollout_aborts_only_the_rollout(serving: Store) -> None:
    said("promote", "digits@2")
    said("rollout", "start", "digits@3", WHERE, "--wave", "100%")
    result = run("rollback", WHERE, "--why", "smoke")
    assert result.exit_code == 0 and "digits:stable -> 2" in result.stdout
    assert "the rollout of 3 is aborted; to leave 2 too, roll back again" in result.stderr
    rollout = stable_rollout(serving)
    assert rollout.state == "aborted" and rollout.history[-1].why == "rollback: smoke"
    assert "digits:stable -> 1" in said("rollback", WHERE)


def test_a_policy_may_contain_waves(serving: Store) -> None:
    inputs = "--wave 1%,5%,25%,100% --soak 5m,5m,10m,1h --gate health=95% --gate reports=20 --gate errors=1% --approve"
    text = said("registry", "policy", "set", WHERE, *inputs.split())
    gates = "gates: health 95% of at least 20 nodes, errors 1%, approval"
    assert f"rollout waves: 1%, 5%, 25%, 100% with 5m, 5m, 10m, 1h; {gates}" in text
    assert "1%, 5%, 25%, 100%" in said("registry", "policy", "show", WHERE)
    result = run("promote", "digits@2")
    assert result.exit_code != 0 and "`enginesmith rollout start digits@2 digits:stable`" in str(result.exception)
    assert gates in said("rollout", "start", "digits@2")
    assert told("registry", "policy", "set", WHERE)["proven"] == []
    assert "no waves" in str(run("rollout", "start", "digits@3").exception)


@pytest.mark.parametrize(("options", "why"), [
    (["--wave", "5%"], "must be 100%"),
    (["--wave", "x"], "wave 'x'"),
    (["--soak", "1m"], "need waves"),
    (["--wave", "100%", "--soak", "1m", "--soak", "2m"], "--soak has 2 durations for 1 waves"),
    (["--wave", "100%", "--gate", "health"], "gate 'health' is not valid"),
    (["--wave", "100%", "--gate", "health=0%"], "give a share"),
    (["--wave", "100%", "--gate", "reports=3"], "give health=SHARE too"),
    (["--wave", "100%", "--max-unavailable", "10"], "with --nodes"),
    (["--wave", "5%,100%", "--nodes", "100"], "leave --nodes out"),
])  # fmt: skip
def test_invalid_plans_are_refused(serving: Store, options: list[str], why: str) -> None:
    result = run("rollout", "start", "digits@2", WHERE, *options)
    assert isinstance(result.exception, InputError) and why in str(result.exception)
    assert read_rollout(serving, "digits", "stable") is None


def test_step_size_limits_simultaneous_swaps(serving: Store) -> None:
    options = ("--wave", "100%", "--max-unavailable", "100", "--nodes", "10000")
    (wave,) = told("rollout", "start", "digits@2", WHERE, *options)["reach"]
    assert wave["share_ppm"] == 10_000
    assert "opening: 1%" in said("rollout", "status", WHERE)


def test_a_number_of_nodes_makes_waves_limits(serving: Store) -> None:
    options = ("--wave", "1%,region=eu,100%", "--nodes", "10000")
    text = said("rollout", "start", "digits@2", WHERE, *options)
    assert "waves are limits of 10000 nodes" in text and "0.5972% on average keeps this limit" in text
    assert "1%, at most 100 of 10000" in said("rollout", "status", WHERE)
    (result,) = told("rollout", "status", WHERE)
    assert (result["nodes"], result["shares_ppm"]) == (10_000, [5_972, 1_000_000, 1_000_000])
    said("rollout", "abort", WHERE)
    assert "to make them limits, pass --nodes" in said("rollout", "start", "digits@2", WHERE, "--wave", "1%,100%")
    said("rollout", "abort", WHERE)
    text = said("rollout", "start", "digits@2", WHERE, "--wave", "region=eu:5%,5%,100%", "--nodes", "10000")
    assert "limits for 10000 nodes; the first wave is region=eu:5%\n" in text and "on average" not in text
    said("rollout", "abort", WHERE)
    refused_result = run("registry", "policy", "set", WHERE, "--wave", "1%,100%", "--nodes", "50")
    assert isinstance(refused_result.exception, InputError) and "of 50 nodes" in str(refused_result.exception)


def test_a_missing_rollout_is_reported(serving: Store) -> None:
    for command in ("status", "watch", "pause", "abort"):
        result = run("rollout", command, WHERE)
        assert isinstance(result.exception, UnknownNameError) and "has no rollout" in str(result.exception)


def test_an_invalid_report_is_refused(serving: Store) -> None:
    rollout = started(serving, "--wave", "50%,100%", "--gate", "health=90%")
    nodes = [ServingNode(f"n{n}") for n in range(40) if is_reached(ServingNode(f"n{n}"), rollout.id, rollout.reach)]
    other_texts = [f"n{n}" for n in range(40) if ServingNode(f"n{n}") not in nodes]
    current_time = datetime.now(UTC)
    receiver = ReportReceiver(serving, current_time.timestamp)

    def take(node: str = nodes[0].name, hours: float = 0, **changes: object) -> tuple[int, str]:
        time = format_time(current_time + timedelta(hours=hours))
        report = NodeReport(node, "", "2", time, time)
        return receiver.take(SentReport("digits", "stable", rollout.id, replace(report, **changes)).to_bytes())

    for status, reason, answer in (
        (422, "has not reached node", take(other_texts[0])),
        (422, "version '77' is neither new 2 nor old 1", take(version="77")),
        (422, "201 characters", take(detail="x" * 201)),
        (400, "requests is -1; it must be a whole number from 0", take(requests=-1)),
    ):
        assert answer[0] == status and reason in answer[1], answer
    assert not read_reports(serving, rollout).reports
    assert take()[0] == 204 and take()[0] == 429 and take(nodes[1].name, version="1")[0] == 204
    assert take(nodes[2].name, version="", failure="pull")[0] == 204
    # Who fails is heard, whatever its clock says.
    for node, hours in zip(nodes[3:], (-7, 7, 24 * 365 * 900), strict=False):
        assert take(node.name, hours, failure="unhealthy")[0] == 204


def test_a_receiver_limits_the_nodes_of_a_rollout(serving: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.rollout.receiving.MOST_NODES", 3)
    rollout = started(serving, "--wave", "100%")
    current_time, clock = datetime.now(UTC), [datetime.now(UTC).timestamp()]

    def take(receiver: ReportReceiver, node: str, channel: str = "stable") -> int:
        report = NodeReport(node, "", "2", format_time(current_time), format_time(current_time))
        return receiver.take(SentReport("digits", channel, rollout.id, report).to_bytes())[0]

    receiver = ReportReceiver(serving, lambda: clock[0])
    assert [take(receiver, f"n{n}") for n in range(5)] == [204, 204, 204, 429, 429]
    assert take(ReportReceiver(serving, current_time.timestamp), "n9") == 429, "those of before count"
    assert {take(receiver, f"n{n}", f"c{n}") for n in range(50)} == {409}
    assert len(receiver._counts) == 1
    serving.remove(report_key("digits", "stable", rollout.id, "n1"))
    clock[0] += 3601
    assert [take(receiver, f"n{n}") for n in (7, 8)] == [204, 429], "they are counted anew every hour"


def test_labels_select_the_nodes_of_a_wave(serving: Store) -> None:
    rollout = started(serving, "--wave", "label=canary,100%")
    current_time = datetime.now(UTC)
    report = NodeReport("n1", "", "2", format_time(current_time), format_time(current_time))
    sent_report = SentReport("digits", "stable", rollout.id, report)
    receiver = ReportReceiver(serving, current_time.timestamp)
    assert receiver.take(sent_report.to_bytes())[0] == 422
    assert receiver.take(replace(sent_report, labels=("canary",)).to_bytes())[0] == 204


def test_beyond_loopback_nodes_need_a_token(serving: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    exception = run("rollout", "receive", "--listen", "0.0.0.0:0").exception
    assert isinstance(exception, InputError) and f"anybody can send to it; set {TOKEN}" in str(exception)
    monkeypatch.setenv(TOKEN, "secret")
    rollout = started(serving, "--wave", "100%")
    time = format_time(datetime.now(UTC))
    sent_report = SentReport("digits", "stable", rollout.id, NodeReport("n1", "", "2", time, time))
    with make_server(serving, HttpAddress("127.0.0.1", 0)) as server:
        monkeypatch.setenv(TOKEN, "other")
        with pytest.raises(UnavailableError, match="answers 401: a bearer token is needed"):
            ReportUrl(server.url).send(sent_report)
        monkeypatch.setenv(TOKEN, "secret")
        ReportUrl(server.url).send(sent_report)
    assert [report.node for report in read_reports(serving, rollout).reports] == ["n1"]


def test_reports_arrive_over_http(serving: Store) -> None:
    rollout = started(serving, "--wave", "100%", "--gate", "health=90%")
    clock = [datetime.now(UTC).timestamp()]

    def post(node: str, **changes: str) -> int:
        current_text = datetime.fromtimestamp(clock[0], UTC).isoformat(timespec="milliseconds")
        report = NodeReport(node, "eu", "2", current_text, current_text)
        entries = {"model": "digits", "channel": "stable", "rollout": rollout.id, **changes}
        request = urllib.request.Request(server.url, SentReport(**entries, report=report).to_bytes())
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with make_server(serving, HttpAddress("127.0.0.1", 0), lambda: clock[0]) as server:
        assert [post("n1"), post("n1"), post("n2")] == [204, 429, 204]
        clock[0] += 61
        assert post("n1") == 204
        expected = [400, 409, 400, 413]
        assert [post("a b"), post("n3", rollout="other"), post("n4", model="../x"), post("n5" * 5000)] == expected
    assert sorted(item.node for item in read_reports(serving, rollout).reports) == ["n1", "n2"]
    assert "2 reports, 0 failing\n" in said("rollout", "status", WHERE)


def test_rollout_status_lists_nodes(serving: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("rollout", "status", "--nodes").startswith("no node has reported; nodes that cannot write")
    result = run("rollout", "status", "none:stable", "--nodes")
    assert isinstance(result.exception, UnknownNameError) and "no channel none:stable" in str(result.exception)
    begin = serving.now()
    receiver = ReportReceiver(serving, begin.timestamp)

    def take(node: str, version: str, **changes: object) -> int:
        machine = "sm_89 (l4), tensorrt 11"
        report = NodeReport(node, "eu", version, format_time(begin), format_time(begin), machine=machine)
        entries = {"unit": f"cpu fp32 {version}", "engine": version * 64 or None, **changes}
        report = replace(report, **entries)  # type: ignore[arg-type]
        return receiver.take(SentReport("digits", "stable", OUTSIDE, report).to_bytes())[0]

    assert [take(f"n{n}", "1") for n in range(3)] == [204] * 3 and take("n1", "1") == 429
    assert take("n3", "2") == 204 and take("n4", "", failure="pull", detail="no engine fits") == 204
    assert (take("n5", ""), take("n5", "../x", engine=None), take("n5", "1", machine="x" * 201)) == (422, 422, 422)
    (status,) = told("rollout", "status", "--nodes")  # type: ignore[misc]
    assert (status["version"], status["reports"]) == ("1", {"nodes": 5, "read": 5, "damaged": 0})
    assert list(status["engines"][0].values()) == ["1", "cpu fp32 1", "1" * 64, 3, {}]
    problems = {node["node"]: node["problem"] for node in status["nodes"]}
    assert problems == {"n0": "", "n1": "", "n2": "", "n3": "serves another version", "n4": "pull"}
    text = said("rollout", "status", WHERE, "--nodes")
    assert "digits:stable points to version 1 since 20" in text and "5 nodes reported; nodes that cannot write" in text
    assert "pull: no engine fits" in text and "1 serves another version" in text
    assert text.count("sm_89 (l4)  ") == 5 and "tensorrt 11" not in text
    # Of a node that is in a rollout, what it reported there counts.
    said("rollout", "start", "digits@2", WHERE, "--wave", "100%")
    rollout = stable_rollout(serving)
    report = NodeReport("n0", "eu", "2", format_time(begin), format_time(begin))
    assert receiver.take(SentReport("digits", "stable", rollout.id, report).to_bytes())[0] == 204
    monkeypatch.setattr("pipeline.cli.serving.rollout._MOST_ROWS", 2)
    text = said("rollout", "status", WHERE, "--nodes")
    assert "a rollout to version 2 is in progress" in text and "3 more nodes: --json" in text
    (status,) = told("rollout", "status", WHERE, "--nodes")  # type: ignore[misc]
    assert [node["version"] for node in status["nodes"] if node["node"] == "n0"] == ["2"]
    monkeypatch.setattr(FileStore, "now", lambda _: begin + timedelta(hours=3, seconds=9))
    text = said("rollout", "status", "--nodes")
    assert text.count("silent") == 6 and "were read" not in text and text.count("  3 h  3 h\n") == 2
    newer_text = report_key("digits", "stable", OUTSIDE, "n1")
    data = serving.read(newer_text)
    assert data and serving.replace(newer_text, data.replace(b'"format":1', b'"format":2'), data)
    text = said("rollout", "status", "--nodes")
    assert "5 nodes reported; 4 were read, 1 damaged or of a newer enginesmith; nodes that" in text
