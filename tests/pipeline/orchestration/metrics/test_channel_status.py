"""What channels serve, as text, and its way into a ConfigMap by the real client of Kubernetes, over a socket."""

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from enginesmith.core.errors import InputError
from enginesmith.registry.store.layout import MARKER, MARKER_CONTENT, channel_key
from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.index import list_all
from pipeline.orchestration.metrics import channel_status
from pipeline.orchestration.metrics.channel_status import ChannelStatus, ConfigMap, StatusWriter, describe
from pipeline.orchestration.metrics.live import Exporter
from tests.enginesmith.object_stores.servers import serving
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore
from tests.pipeline.fleet.test_cluster import access
from tests.pipeline.rollout.fleet import WHERE, begin_and_look, plan, registry


class Api(HTTPServer):
    """Answers a patch of a ConfigMap as kube-apiserver does. status: what else it answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.patches = 200, list[tuple[str, str, Any]]()


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.patches.append((self.path, self.headers["Content-Type"], body))
        answer = json.dumps({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {}}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def published(model: str = "digits", data: bytes = b"one", channel: str | None = "stable", store: Any = None) -> Any:
    """A store with a version that a channel serves."""
    store = store or MemoryStore({MARKER: MARKER_CONTENT})
    publish_engines(store, [engine(store, data=data)], data.decode(), model=model, channel=channel)
    return store


@pytest.fixture
def api() -> Iterator[Api]:
    with serving(server := Api()):
        yield server


def config_map(api: Api, folder: Path) -> ConfigMap:
    url = f"http://127.0.0.1:{api.server_address[1]}"
    return ConfigMap("engines", "enginesmith-channels", access(folder, url, timeout_s=5.0))


def test_a_line_shows_a_channels_version_and_rollout() -> None:
    store, served_manifest, new_manifest = registry()
    begin_and_look(store, new_manifest, plan("10%", "100%"))
    (text,) = ChannelStatus(store).texts(list_all(store)).values()
    channel = read_channel(store, *WHERE)
    assert channel is not None and channel.active_rollout is not None
    last_step = channel.active_rollout.history[-1]
    assert text == (
        f"stable: {served_manifest.version} since {channel.move.at}; "
        f"rollout of {new_manifest.version}: running, {last_step.what} ({last_step.at})\n"
    )
    moved_channel = replace(channel, rollout=None, move=replace(channel.move, by="ada"))
    assert describe(moved_channel) == f"stable: {served_manifest.version} since {channel.move.at} by ada"


def test_documents_are_read_after_a_change_in_a_rollout_or_in_turn(monkeypatch) -> None:
    monkeypatch.setattr(channel_status, "MOST_AGAIN", 1)
    store = published("a")
    for model in ("b", "c"):
        published(model, store=store)
    items, status = list[str](), ChannelStatus(store)
    monkeypatch.setattr(
        channel_status, "read_channel", lambda store, *where: (items.append(where[0]), read_channel(store, *where))[1]
    )
    first_texts = status.texts(list_all(store))
    assert sorted(items) == ["a", "b", "c"] and list(first_texts) == ["a", "b", "c"]
    items.clear()
    for _ in range(3):
        assert status.texts(list_all(store)) == first_texts
    assert sorted(items) == ["a", "b", "c"], "one at each look"
    published("b", b"two", store=store)
    items.clear()
    newest_version = list_all(store)[1].versions[-1]
    assert f"stable: {newest_version} since" in status.texts(list_all(store))["b"] != first_texts["b"]
    assert "b" in items and len(items) <= 2


def test_a_damaged_channel_is_a_line_and_omitted_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = published("a")
    for model in ("b", "c"):
        published(model, store=store)
    store.objects[channel_key("a", "stable")] = b"{"
    status = ChannelStatus(store)
    texts = status.texts(list_all(store))
    assert texts["a"].startswith("stable: unreadable: ") and texts["b"].startswith("stable: ")
    monkeypatch.setattr(channel_status, "MOST_MODELS", 2)
    assert list(status.texts(list_all(store))) == ["a", "b", "_left_out"]
    assert status.texts(list_all(store))["_left_out"].startswith("1 models")
    monkeypatch.setattr(channel_status, "MOST_BYTES", len(texts["a"]) + 30)
    assert status.texts(list_all(store))["_left_out"].startswith("2 models")


def test_each_poll_of_the_exporter_replaces_the_data(api: Api, tmp_path: Path) -> None:
    store, output = published(), list[str]()
    exporter = Exporter(store, output.append, StatusWriter(store, config_map(api, tmp_path), output.append).write)
    assert exporter.refresh() and not output
    (path, content, patch) = api.patches[-1]
    assert path.startswith("/api/v1/namespaces/engines/configmaps/enginesmith-channels")
    assert content == "application/json-patch+json"
    channel = read_channel(store, "digits", "stable")
    assert channel is not None
    texts = {"digits": f"{describe(channel)}\n"}
    assert patch == [{"op": "add", "path": "/data", "value": texts}]


def test_an_unreadable_registry_is_reported_beside_the_last_data(api: Api, tmp_path: Path) -> None:
    store = published()
    writer = StatusWriter(store, config_map(api, tmp_path), lambda _: None)
    writer.write(list_all(store))
    writer.write(None, "the registry cannot be read: no route")
    value_before, after = (patch[0]["value"] for _, _, patch in api.patches)
    assert after == {**value_before, "_problem": "the registry cannot be read: no route\n"}


def test_a_refusal_is_reported_once_and_the_next_poll_retries(api: Api, tmp_path: Path) -> None:
    store, output = MemoryStore(), list[str]()
    writer = StatusWriter(store, config_map(api, tmp_path), output.append)
    api.status = 403
    writer.write(())
    writer.write(())
    assert output == ["the status of channels is not written: ConfigMap engines/enginesmith-channels: 403 Forbidden"]
    api.status = 200
    writer.write(())
    api.status = 404
    writer.write(())
    assert len(api.patches) == 4 and len(output) == 2


@pytest.mark.parametrize("text", ["channels", "a/b/c", "/channels", "engines/"])
def test_an_invalid_name_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="NAMESPACE/NAME"):
        ConfigMap.parse(text)
