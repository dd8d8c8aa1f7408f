import os
from pathlib import Path

import boto3
import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.registered_specs import registrations
from enginesmith.registry.store.base import Store
from pipeline.orchestration import watch as events
from pipeline.orchestration.watch import SentEvent, WatchedSpec, watch_place
from tests.enginesmith.s3_server import BUCKET
from tests.ensembles import write_ensemble
from tests.pipeline.projects import Project, weights, write_model


class Server:
    """In the place of a Prefect server: it hears events, or is down."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, object]] = []
        self.down = False

    def tell(self, event: str, model: str, payload: dict[str, object]) -> SentEvent:
        if self.down:
            raise UnavailableError("the server is down")
        self.heard.append((event, model, payload["digest"]))
        return SentEvent("1", event, "here")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    event_server = Server()
    monkeypatch.setattr(events, "send_event", event_server.tell)
    return event_server


def look(store: Store, place: object, times: int = 1, *, settled: bool = False) -> list[WatchedSpec]:
    """A watcher that is started anew, and what it says in so many looks."""
    output: list[WatchedSpec] = []
    with watch_place(store, str(place), output.append) as watch:
        for _ in range(times):
            watch.look(stable_only=settled)
    return output


def test_new_content_is_reported_once_also_by_a_restarted_watcher(project, store, server):
    [seen_look] = look(store, project.folder, 2)
    assert seen_look.told and seen_look.spec == "tiny.yaml"
    assert look(store, project.folder) == [] and len(server.heard) == 1
    os.utime(project.folder / "tiny.onnx")
    assert look(store, project.folder) == [], "touched, and the same"
    write_model(project.folder / "tiny.onnx", weights(seed=1))
    assert look(store, project.folder)[0].told and len(server.heard) == 2


def test_a_reverted_change_is_reported_again(project: Project, store: Store, server: Server) -> None:
    first_data = (project.folder / "tiny.onnx").read_bytes()
    output: list[WatchedSpec] = []
    with watch_place(store, str(project.folder), output.append) as watch:
        watch.look(stable_only=False)
        write_model(project.folder / "tiny.onnx", weights(seed=1))
        watch.look(stable_only=False)
        (project.folder / "tiny.onnx").write_bytes(first_data)
        watch.look(stable_only=False)
        watch.look(stable_only=False)
    assert [digest for _, _, digest in server.heard] == [output[0].digest, output[1].digest, output[0].digest]
    assert registrations(store, "tiny")[-1].bundle.digest == output[0].digest
    assert look(store, project.folder) == [], "and a watcher that starts anew does not tell it once more"


def test_a_lost_report_is_sent_at_the_next_poll(project: Project, store: Store, server: Server) -> None:
    server.down = True
    with pytest.raises(UnavailableError):
        look(store, project.folder)
    assert len(registrations(store, "tiny")) == 1, "killed or cut off between registering and telling"
    server.down = False
    assert look(store, project.folder)[0].told
    assert len(registrations(store, "tiny")) == 1


def test_changing_files_are_waited_for(project: Project, store: Store, server: Server) -> None:
    output: list[WatchedSpec] = []
    with watch_place(store, str(project.folder), output.append) as watch:
        watch.look()
        write_model(project.folder / "tiny.onnx", weights(seed=1))
        watch.look()
        assert output == []
        watch.look()
    assert [seen_line.told for seen_line in output] == [True]


def test_an_unreadable_spec_is_reported_once_and_stops_no_other(project, store, server):
    (project.folder / "a.yaml").write_text("model: a\n")
    result = look(store, project.folder, 3)
    assert [(seen_event.spec, seen_event.told) for seen_event in result] == [("a.yaml", False), ("tiny.yaml", True)]
    assert "a.yaml:1" in result[0].said


def test_a_missing_place_is_unreachable(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="create it, or name another folder"):
        look(store, tmp_path / "absent")


def test_a_buckets_prefix_can_be_watched(project: Project, store: Store, server: Server, s3_uri: str) -> None:
    prefix = s3_uri.partition("?")[0].removeprefix(f"s3://{BUCKET}/")
    client = boto3.client("s3", endpoint_url=s3_uri.partition("endpoint=")[2], region_name="us-east-1")
    for path in project.folder.iterdir():
        client.upload_file(str(path), BUCKET, f"{prefix}/tiny/{path.name}")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/tiny/../../escape.yaml", Body=b"model: x")
    with watch_place(store, s3_uri, lambda _: None) as watch:
        watch.look()
        watch.look()
        assert len(server.heard) == 1
        write_model(project.folder / "tiny.onnx", weights(seed=1))
        client.upload_file(str(project.folder / "tiny.onnx"), BUCKET, f"{prefix}/tiny/tiny.onnx")
        watch.look()
        watch.look()
        assert len(server.heard) == 2
        client.delete_object(Bucket=BUCKET, Key=f"{prefix}/tiny/tiny.yaml")
        watch.look()
    assert len(server.heard) == 2


def test_an_ensemble_is_registered_only_with_its_graphs(tmp_path: Path, store: Store, server: Server) -> None:
    path = write_ensemble(tmp_path / "project")
    [seen_look] = look(store, path.parent)
    assert seen_look.told and seen_look.spec == "pair.yaml"
    assert look(store, path.parent) == []
    (path.parent / "decoder.yaml").write_text((path.parent / "decoder.yaml").read_text() + "# changed\n")
    assert [item.spec for item in look(store, path.parent)] == ["pair.yaml"]
    assert [model for _, model, _ in server.heard] == ["pair", "pair"]
