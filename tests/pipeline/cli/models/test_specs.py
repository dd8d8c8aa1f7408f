import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict

import pytest
import yaml

from enginesmith.core.errors import canonical_json
from enginesmith.core.types import PRECISIONS
from enginesmith.registry.builds.build_history import LockHolder, hold_build_lock
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import build_lock_key
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project, exit_code


def test_the_starter_spec_is_valid(project: Project) -> None:
    path = project.folder / "model.yaml"
    assert exit_code("init", path) == 0
    for name in ("model.py", "weights.safetensors"):
        (project.folder / name).touch()
    assert load_spec(path).model == "my-model"
    comments = [line.split() for line in path.read_text().splitlines() if line.startswith("  # ")]
    named_texts = {word.rstrip(",") for words in comments for word in words[1:3]}
    assert set(PRECISIONS) <= named_texts, "each precision, with a word about it"
    assert exit_code("init", path) == 2, "an existing file is not overwritten"


def test_register_without_a_server_stores_the_spec_and_exits_with_3(project):
    result = project.run("prefect", "register", project.spec, "--no-event", "--json")
    assert result.code == 0 and result.json["event"] is None and result.json["files"].keys() >= {"tiny.yaml"}
    from prefect.settings import PREFECT_API_URL, temporary_settings

    for url, reason in ((None, "no Prefect server is configured"), ("http://127.0.0.1:9/api", "did not reach")):
        with temporary_settings({PREFECT_API_URL: url}):
            result = project.run("prefect", "register", project.spec)
        assert result.code == 3 and reason in result.err and "PREFECT_API_URL" in result.err
        assert "registered already" in result.out
    assert yaml.safe_load(project.spec.read_text())["model"] == "tiny"


SMALL = {"precisions": ["fp32"], "targets": ["cpu"], "calibration": None}


def test_one_failing_model_never_stops_another(project: Project) -> None:
    project.change_spec(**SMALL)
    place = project.folder.parent / "catalog"
    for name in ("good", "garbage"):
        shutil.copytree(project.folder, place / name)
    (place / "garbage" / "tiny.onnx").write_bytes(b"garbage")
    (place / "wrong").mkdir()
    (place / "wrong" / "spec.yml").write_text("model: wrong\nsource: {onnx: none.onnx}\n")
    (place / "compose.yaml").write_text("services: {}\n")
    result = project.run("build", "--all", place, "--json", "--quiet")
    rows = {row["spec"].removeprefix(f"{place}/"): row for row in result.json}
    assert result.code == 1
    expected = {"good/tiny.yaml": "published", "garbage/tiny.yaml": "failed", "wrong/spec.yml": "failed"}
    assert {name: row["state"] for name, row in rows.items()} == expected, rows["good/tiny.yaml"]["reason"]
    assert rows["good/tiny.yaml"]["engines"] == {"proven": 1} and rows["good/tiny.yaml"]["version"] == "1"
    assert "tiny.onnx" in rows["garbage/tiny.yaml"]["reason"]
    assert "inputs: is missing" in rows["wrong/spec.yml"]["reason"]
    assert "Error: " not in rows["garbage/tiny.yaml"]["reason"], "an error that explains itself needs no class"
    for name in ("garbage", "wrong"):
        shutil.rmtree(place / name)
    second_result = project.run("build", "--all", place, "--json", "--quiet")
    assert second_result.code == 0 and [row["state"] for row in second_result.json] == ["unchanged"]


def test_a_catalog_names_the_models_that_a_model_waits_for(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.change_spec(**SMALL)
    assert project.run("build", "--all", project.folder, "--quiet").code == 0
    store = open_store(project.registry, create=True)
    taken_keys: list[str] = []

    def held(store: Store, name: str, what: str, say: Callable[[str], object]) -> AbstractContextManager[None]:
        """Somebody's turn, until it is seen."""
        key = build_lock_key(name)
        holder = LockHolder(what, "elsewhere", "", 7, 1, "0", 0, "2026-11-20T18:23:01+00:00")
        store.replace(key, canonical_json(asdict(holder)), None)
        taken_keys.append(key)
        return hold_build_lock(store, name, what, lambda who: (say(who), store.remove(key)))

    monkeypatch.setattr("pipeline.compile.run_context.hold_build_lock", held)
    result = project.run("build", "--all", project.folder)
    assert result.code == 0 and taken_keys
    assert (
        "tiny lock: waiting: compiling tiny is running on elsewhere, process 7, since 2026-11-20 18:23:01 UTC"
        in result.err
    )
    assert "tiny lock: done: waited " in result.err and "tiny export: cached" in result.err
    run = json.loads(project.run("status", "tiny", "--json").out)
    assert next(item for item in run["items"] if item["name"] == "lock")["why"].startswith("waited ")
    assert store.read(taken_keys[0]) is None
