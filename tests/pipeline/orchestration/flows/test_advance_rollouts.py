"""The flow of rollouts and its events: the flow's own function; Prefect's part is left out."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import channel_key
from enginesmith.registry.versions import lookup, policies
from enginesmith.registry.versions.channel_writes import read_rollout
from enginesmith.registry.versions.policies import ChannelPolicy
from pipeline.orchestration import watch
from pipeline.orchestration.flows import advance_rollouts as module
from pipeline.rollout import operations
from tests.enginesmith.registries import engine, overwrite, publish_engines
from tests.pipeline.projects import raising
from tests.pipeline.rollout.fleet import plan


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """digits:stable serves 1, and 2 comes to it in two waves without a time."""
    store = open_store(tmp_path / "registry", create=True)
    publish_engines(store, [engine(store, data=b"one")], "one", channel="stable")
    two = publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest
    operations.start(store, two, "stable", plan("10%", "100%", soak=0), operations.Operator("ada", datetime.now(UTC)))
    return tmp_path / "registry"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, object]]]:
    items: list[tuple[str, str, dict[str, object]]] = []

    def send(event: str, model: str, payload: dict[str, object]) -> None:
        watch.check_payload(event, {"model", *payload})
        items.append((event, model, payload))

    monkeypatch.setattr(watch, "send_event", send)
    return items


def advance(registry: Path, **options: float):
    with disable_run_logger():
        return module.advance_rollouts.fn(str(registry), interval_s=0.01, **options)


def test_the_flow_follows_a_rollout_to_its_end_and_sends_its_steps(started, sent):
    state = advance(started)
    assert state.is_completed() and state.message == "polled 1 rollout"
    assert [event for event, _, _ in sent] == ["enginesmith.rollout.advanced", "enginesmith.rollout.done"]
    assert sent[0][2]["wave"] == 2 and sent[0][2]["registry"] == str(started) and json.dumps(sent)
    assert advance(started).message == "polled 0 rollouts" and len(sent) == 2


def test_a_rollout_that_ends_early_is_sent(started, sent):
    store = open_store(started)
    second_manifest = lookup.load(store, "digits", "2")
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    advance(started)
    (event, model, payload) = sent[-1]
    assert (event, model) == ("enginesmith.rollout.halted", "digits") and "needs a canary's PASS" in str(payload["why"])
    assert second_manifest.version == payload["version"] == "2"


def test_an_unreachable_server_stops_nothing(started, monkeypatch):
    monkeypatch.setattr(watch, "send_event", raising(UnavailableError("no server")))
    assert advance(started).is_completed()
    rollout = read_rollout(open_store(started), "digits", "stable")
    assert rollout is not None and rollout.state == "done"


def test_the_flow_ends_after_its_time_and_a_damaged_model_fails_it(started, sent):
    overwrite(open_store(started), channel_key("digits", "stable"), b"{}")
    state = advance(started, lasts_s=0.05)
    assert state.is_failed() and state.message == "1 rollout could not be polled" and sent == []
