import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from enginesmith.client.pull import BlobFetcher, download_engine
from enginesmith.client.resolve import Resolution
from enginesmith.core.errors import EnginesmithError, ModelError, digest_of_file
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.names import parse_reference
from enginesmith.core.types import CPU_KIND
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.versions.lookup import load, locate
from pipeline.operations.refit import RefitEngine, cannot
from pipeline.values import EngineBlob
from tests.pipeline import refitting_backend
from tests.pipeline.projects import Project, answers, weights, write_model, write_project

# A build by three backends. `tests/pipeline/operations/test_refit.py` compares models without one.
pytestmark = pytest.mark.slow

OLD, NEW = weights(), weights(5)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    refitting_backend.install(folder)
    return folder


@pytest.fixture
def backends(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backends, known here and, by sys.path, to every job."""
    monkeypatch.syspath_prepend(str(site))
    discovery._entries.cache_clear()
    yield
    discovery._entries.cache_clear()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    """Project and registry with version 1, by both backends and onnxruntime."""
    place = tmp_path_factory.mktemp("first")
    write_project(place / "project")
    both_fields = {"stripped": {}, "whole": {}, "onnxruntime": {}}
    Project(place / "project").change_spec(targets=["cpu"], precisions=["fp32"], backends=both_fields, calibration=None)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    command = [sys.executable, "-m", "enginesmith", "build", str(place / "project" / "tiny.yaml")]
    subprocess.run([*command, "--registry", place / "registry"], check=True, capture_output=True, env=environment)
    return place


@pytest.fixture
def project(first: Path, backends: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A copy of that, and a model that was trained on."""
    shutil.copytree(first, tmp_path / "place")
    new_project = Project(tmp_path / "place" / "project", capsys)
    write_model(new_project.folder / "tiny.onnx", NEW)
    golden = np.random.default_rng(7).normal(size=(24, 8)).astype(np.float32)
    np.savez(new_project.folder / "golden.npz", x=golden, label=answers(NEW, golden).argmax(-1))
    return new_project


def manifest(project: Project, version: str) -> Manifest:
    return load(project.store, "tiny", version)


def entry(project: Project, version: str, backend: str) -> EngineEntry:
    return next(engine for engine in manifest(project, version).engines if engine.backend == backend)


def test_refitted_engines_are_proven_and_published_with_their_origin(project: Project) -> None:
    foreseen_result = project.run("debug", "refit", "tiny", "--weights-from", project.spec, "--dry-run", "--json")
    assert foreseen_result.code == 0 and "version" not in foreseen_result.json
    reasons = {unit["unit"]: unit["reason"] for unit in foreseen_result.json["units"]}
    not_this_text = "onnxruntime does not refit"
    assert reasons == {"cpu fp32 stripped": "", "cpu fp32 whole": "", "cpu fp32 onnxruntime": not_this_text}
    result = project.run("debug", "refit", "tiny@1", "--weights-from", project.spec, "--json")
    assert result.code == 0, result.err
    assert (result.json["version"], result.json["failed"], result.json["from"]) == ("2", [], "tiny@1")
    refit_s = [float(text) for text in re.findall(r"refitted in (\S+) s", result.err)]
    assert len(refit_s) == 2 and max(refit_s) < time.monotonic()
    for backend in ("stripped", "whole"):
        before, after = entry(project, "1", backend), entry(project, "2", backend)
        assert after.status == "proven" and after.graph != before.graph and after.build_key != before.build_key
        assert (after.digest == before.digest) is (backend == "stripped"), "which stays as it is"
        assert manifest(project, "2").provenance[f"refitted from cpu fp32 {backend}"] == before.digest
        assert any(note.startswith("refitted from tiny@1, engine") for note in after.notes)
    assert (project.registry / "blobs" / "sha256" / str(before.digest)[:2] / str(before.digest)).is_file()
    second_build = project.build()
    assert (second_build.json["version"], second_build.json["cached"]) == ("2", True), "it is what a build would be"
    assert project.run("registry", "fsck").code == 0


def test_weights_of_another_version_give_a_version_without_the_spec(project: Project) -> None:
    project.change_spec(backends={"onnxruntime": {}})
    assert project.build().json["version"] == "2"
    shutil.rmtree(project.folder)
    result = project.run("debug", "refit", "tiny@1", "--weights-from", "tiny@2", "--json")
    assert result.code == 0, result.err
    assert result.json["version"] == "3"
    engine = entry(project, "3", "stripped")
    assert engine.status == "proven" and engine.digest == entry(project, "1", "stripped").digest
    assert engine.graph == entry(project, "2", "onnxruntime").graph and engine.options["strip_weights"] is True
    assert entry(project, "3", "onnxruntime") == entry(project, "2", "onnxruntime"), "what was there stays"
    assert manifest(project, "3").provenance["refitted from cpu fp32 stripped"] == engine.digest
    assert project.run("registry", "fsck").code == 0
    repeated_result = project.run("debug", "refit", "tiny@1", "--weights-from", "tiny@2", "--json")
    assert repeated_result.code == 1 and "is in the registry" in {u["unit"]: u for u in repeated_result.json["units"]}[
        "cpu fp32 whole"]["reason"]  # fmt: skip


def test_a_stripped_engine_is_pulled_with_the_model_that_has_its_weights(project: Project, tmp_path: Path) -> None:
    store = project.store
    located_version = locate(store, parse_reference("tiny@1"))
    for backend in ("whole", "stripped"):
        engine = entry(project, "1", backend)
        resolution = Resolution(engine, "", (engine,), ())
        pulled = download_engine(store, located_version, resolution, tmp_path / backend, BlobFetcher())
        fields = json.loads(pulled.description.read_bytes())
        if backend == "whole":
            assert pulled.weights is None and "weights" not in fields
            continue
        assert pulled.weights and pulled.weights.name == fields["weights"] == "tiny-1-cpu-fp32-stripped.weights.onnx"
        assert digest_of_file(pulled.weights) == engine.graph


CHANGES = {
    "weights": ({"model": "1" * 64}, None),
    "nothing": ({}, "its weights are the same"),
    "option": ({"model": "1" * 64, "options": (("gain", 2), ("refittable", True), ("strip_weights", False))},
               "more than weights changed: option gain: 1 -> 2"),
    "shapes": ({"model": "1" * 64, "profiles": ()}, "more than weights changed: the shapes changed"),
    "version": ({"model": "1" * 64, "toolchain": ((CPU_KIND, this_kind().name), ("refitting", "2.0"))},
                "more than weights changed: version of enginesmith-whole: 1 -> none; version of refitting: 1.0 -> 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_unrefittable_engines_are_reported_from_the_manifest(project: Project, change: str) -> None:
    base, entry_before = manifest(project, "1"), entry(project, "1", "whole")
    changes, reason = CHANGES[change]
    assert cannot(replace(request_of(entry_before), **changes), entry_before, base) == reason
    assert cannot(request_of(entry_before), None, base) == "tiny@1 has no engine for it"


def test_an_engine_not_built_for_refitting_is_refused(project: Project) -> None:
    base, before = manifest(project, "1"), entry(project, "1", "whole")
    plain = replace(before, options={**before.options, "refittable": False})
    plain = replace(plain, build_key=replace(request_of(before), options=tuple(sorted(plain.options.items()))).key)
    assert "cannot be refitted: it was built without refittable" in str(cannot(request_of(plain), plain, base))


def refit_job(project: Project, folder: Path, model: Path, **options: Any) -> Any:
    """The worker's side, in this process."""
    store = project.store
    request = request_of(entry(project, "1", "whole"))
    expected_request = replace(
        request, model=store.put_file(model), options=tuple(sorted({**dict(request.options), **options}.items()))
    )
    engine = str(entry(project, "1", "whole").digest)
    refit = RefitEngine(EngineBlob(request, engine, ".refitting"), expected_request, "tiny@1")
    return refit.run(WorkerContext(folder, store.uri))


def test_a_model_with_another_graph_is_refused_with_the_difference(project: Project, tmp_path: Path) -> None:
    store = project.store
    model = onnx.load_from_string(store.read_blob(str(entry(project, "1", "whole").graph)))
    model.graph.node[2].op_type = "Sigmoid"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match=r"differ in more than their weights: node .* \(Relu\) differs; build"):
        refit_job(project, tmp_path, tmp_path / "other.onnx")


def test_an_engine_that_refuses_the_weights_is_reported(project: Project, tmp_path: Path) -> None:
    same_path = tmp_path / "same.onnx"
    same_path.write_bytes(project.store.read_blob(str(entry(project, "1", "whole").graph)))
    with pytest.raises(EnginesmithError, match="did not accept the new weights: gain"):
        refit_job(project, tmp_path, same_path, gain=2)


def test_nothing_is_published_without_a_refitted_engine(project: Project) -> None:
    result = project.run("debug", "refit", "tiny@1", "--weights-from", "tiny@1")
    assert result.code == 1 and "nothing was refitted and nothing published" in result.out
    assert "its weights are the same" in result.out
    assert [path.name for path in (project.registry / "models" / "tiny" / "versions").iterdir()] == ["1"]
