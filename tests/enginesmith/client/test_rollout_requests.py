"""What a rollout costs a node in requests: each number is a promise of docs/scale.md."""

from datetime import UTC, datetime
from pathlib import Path

from enginesmith.client.client import Client
from enginesmith.client.watching.server import Reporter
from enginesmith.client.watching.watch import ChannelWatcher
from enginesmith.registry.rollouts.reports import OUTSIDE, report_key
from enginesmith.registry.rollouts.rollout_state import Gates, RolloutPlan, ServingNode, parse_wave
from enginesmith.registry.store.layout import blob_key, channel_key
from enginesmith.registry.versions.channel_state import read_channel
from pipeline.rollout import operations
from pipeline.rollout.advance import advance
from tests.enginesmith.client.watching.test_watch import following
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.counting import CountingStore

NOW = datetime(2026, 11, 1, tzinfo=UTC)
CHANNEL = channel_key("digits", "stable")


def watcher(store: CountingStore, folder: Path, *labels: str) -> ChannelWatcher:
    client = Client("memory://registry", cache=folder / "cache", node=ServingNode("n1", "", labels))
    client.__dict__["store"] = store
    reporter = Reporter(say=len, clock=lambda: NOW.timestamp())
    return following(client, folder / "engines", reference="digits:stable", reporter=reporter)


def test_a_rollout_costs_a_reached_node_two_more_requests_and_a_report(tmp_path):
    store = CountingStore()
    publish_engines(store, [engine(store, data=b"one")], "one", channel="stable")
    second_manifest = publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest
    own_watcher, other_watcher = watcher(store, tmp_path / "a", "canary"), watcher(store, tmp_path / "b")
    for watch in (own_watcher, other_watcher):
        watch.once()
    plan = RolloutPlan((parse_wave("label=canary"), parse_wave("100%")), (0, 60), Gates())
    operations.start(store, second_manifest, "stable", plan, operations.Operator("ada", NOW))
    with store.counted() as counts:
        other_watcher.once()
    assert counts.keys == [f"GET {CHANNEL}"] and counts.received < 2048
    with store.counted() as counts:
        own_watcher.once()
    channel = read_channel(store, "digits", "stable")
    assert channel is not None and channel.rollout is not None
    snapshot = blob_key(channel.snapshots[channel.rollout.manifest])
    kinds = [key.split(" ")[0] for key in counts.keys]
    assert counts.keys[:2] == [f"GET {CHANNEL}", f"GET {snapshot}"] and kinds == ["GET", "GET", "GET", "PUT"]
    with store.counted() as counts:
        own_watcher.once()
        other_watcher.once()
    assert counts.keys == [f"UNCHANGED {CHANNEL}"] * 2
    advance(store, "digits", "stable")
    with store.counted() as counts:
        own_watcher.once()  # it has what the next wave brings to the others
    assert counts.keys == [f"GET {CHANNEL}"]


def test_outside_rollouts_a_report_costs_two_requests_and_an_idle_poll_none(tmp_path):
    store = CountingStore()
    publish_engines(store, [engine(store, data=b"one")], "one", channel="stable")
    own_watcher = watcher(store, tmp_path)
    with store.counted() as counts:
        own_watcher.once()
    key = report_key("digits", "stable", OUTSIDE, "n1")
    assert counts.keys[-2:] == [f"GET {key}", f"PUT {key}"]
    with store.counted() as counts:
        own_watcher.once()
    assert counts.keys == [f"UNCHANGED {CHANNEL}"]


def test_requests_of_a_controllers_poll(tmp_path: Path) -> None:
    store = CountingStore()
    publish_engines(store, [engine(store, data=b"one")], "one", channel="stable")
    second_manifest = publish_engines(store, [engine(store, data=b"two")], "two", channel=None).manifest
    plan = RolloutPlan((parse_wave("label=canary"), parse_wave("100%")), (60, 60), Gates())
    operations.start(store, second_manifest, "stable", plan, operations.Operator("ada", NOW))
    watcher(store, tmp_path / "a", "canary").once()
    with store.counted() as counts:
        advance(store, "digits", "stable")
    assert counts.kinds["PUT"] == 1, "the time of the wave begins"
    with store.counted() as counts:
        advance(store, "digits", "stable")
    assert counts.count <= 8 and counts.kinds["PUT"] == 0, counts.keys  # one of them the node's report
