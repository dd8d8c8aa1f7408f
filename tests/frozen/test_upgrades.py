import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginesmith import open_onnx
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import TensorSpec
from enginesmith.recording.traffic import read_traffic
from enginesmith.registry.builds.build_history import Past, remember_builds, remember_totals
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import MARKER, TOTALS, history_key
from tests.frozen.surface import FILES, unpack
from tests.pipeline.projects import Project
from validation.canary.report import read_report
from validation.gpu.devices import OfflineBundle
from validation.gpu.results import Results

POLICY = "registry policy set tiny:stable --proven cpu --why changed"
# Each kind of document with a format, and the command that reads it.
READ = {
    MARKER: "list",
    "gc/state.json": "registry pin tiny@2 --why wanted",
    "gc/marks/*.json": "registry gc --delete",
    "models/tiny/channels/stable.json": "pull tiny:stable --target cpu",
    "models/tiny/histories/stable.json": "registry history tiny:stable",
    "models/tiny/policies/stable.json": POLICY,
    "models/tiny/versions/1/manifest.json": "show tiny@1",
    "models/tiny/versions/1/attachments/*/*.json": "show tiny@1",
    "models/tiny/versions/1/latency/*/*.json": "show tiny@1",
    "models/tiny/versions/2/canaries/*/*.json": "rollout status tiny:stable",
    "runs/*tiny.*.json": "status {stem}",
    "series/tiny/*.json": "profile tiny --series",
}
WRITE = ("registry gc --delete --grace 0s", "promote tiny@2 tiny:stable --proven-only --accept-loss", POLICY)
# Documents in which an unknown field is refused: all but two of which a few fields are read.
CLOSED = {
    **{pattern: words for pattern, words in READ.items() if "canaries" not in pattern and pattern != MARKER},
    "models/tiny/policies/stable.json": "registry policy show tiny:stable",
    "models/tiny/registered.json": "registry fsck",
}


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Project:
    """The frozen registry beside an empty folder, the current one."""
    unpack(tmp_path)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return Project(tmp_path / "project", capsys)


def change(place: Project, pattern: str, **fields: Any) -> tuple[Path, bytes]:
    """A document with other fields, and its bytes."""
    path = min(place.registry.glob(pattern))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))
    return path, path.read_bytes()


@pytest.mark.parametrize("pattern", READ)
def test_a_newer_format_gives_exit_code_2_and_only_asks_for_an_upgrade(place: Project, pattern: str) -> None:
    path, data = change(place, pattern, format=2)
    result = place.run(*READ[pattern].format(stem=path.stem).split())
    output = result.err.partition("; no collection runs")[0].strip()
    assert (result.code, output.rpartition(": ")[2]) == (2, "upgrade enginesmith"), result.err
    assert "format is 2; this enginesmith reads 1" in output
    assert {place.run(*words.split()).code for words in WRITE} <= {0, 2}
    assert path.read_bytes() == data


@pytest.mark.parametrize("pattern", CLOSED)
def test_an_unknown_field_is_named_and_its_document_stays(place: Project, pattern: str) -> None:
    path, data = change(place, pattern, novel=1)
    result = place.run(*CLOSED[pattern].format(stem=path.stem).split())
    assert result.code == 1 and "has no field 'novel'" in result.out + result.err
    place.run(*WRITE[1].split())
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("canary/report.json", lambda path: read_report(path.read_bytes())),
        ("results.json", Results.load),
        ("pulled/tiny-1-cpu-int8.json", open_onnx),
        ("carried/carry.json", lambda path: OfflineBundle.load(path.parent)),
        ("traffic.jsonl", lambda path: read_traffic(path, [TensorSpec("x", "float32", ("batch", 8))])),
    ],
)
def test_a_file_of_a_newer_format_asks_for_an_upgrade(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    with zipfile.ZipFile(FILES) as archive:
        archive.extractall(tmp_path)
    path = tmp_path / name
    path.write_text(re.sub('"format": ?1', '"format": 2', path.read_text(), count=1))
    with pytest.raises(EnginesmithError, match=r"format is 2; this enginesmith reads 1: upgrade enginesmith$") as error:
        read(path)
    assert error.value.exit_code == 2


def test_a_file_of_another_kind_asks_for_no_upgrade(tmp_path: Path) -> None:
    (path := tmp_path / "log.jsonl").write_text('{"kind": "observations", "format": 2}\n')
    with pytest.raises(EnginesmithError, match="is the head of 'observations' of format 2"):
        read_traffic(path, [TensorSpec("x", "float32", ("batch", 8))])
    with pytest.raises(EnginesmithError, match="this is not a canary report"):
        read_report(b'{"kind": "latency", "format": 2}')


def test_unknown_build_data_of_a_later_release_is_not_overwritten(place: Project) -> None:
    store = open_store(place.registry)
    keys = (TOTALS, history_key("onnxruntime"), history_key("onnxruntime", "tiny"))
    changes_before = [change(place, key, format=2) for key in keys]
    past_build = Past("tiny", "cpu", "fp32", 1.0, 1.0, 1, "built", "2026-01-01T00:00:00Z")
    remember_builds(store, {"onnxruntime": [past_build]})
    remember_totals(store, {"onnxruntime": [past_build]}, 1, 1)
    assert [path.read_bytes() for path, _ in changes_before] == [data for _, data in changes_before]


def test_documents_and_blobs_that_this_release_does_not_know_survive_a_collection(place: Project) -> None:
    store = open_store(place.registry)
    blob = store.put_bytes(b"of a later release")
    names = ("models/tiny/versions/1/novel/a.json", "models/tiny/novel/a.json", "novel/a.json")
    for name in names:
        assert store.create(name, json.dumps({"blob": blob}).encode())
    for _ in range(2):
        assert place.run("registry", "gc", "--delete", "--grace", "0s").code == 0
    assert store.has(blob) and [name for name in names if store.read(name) is None] == []
