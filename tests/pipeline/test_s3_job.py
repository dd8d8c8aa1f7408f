from pathlib import Path

import pytest
from blake3 import blake3

from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.objects.place import parse_s3_place
from enginesmith.registry.store.s3.requests import client
from enginesmith.registry.versions import lookup
from pipeline.compile.publication.pages import STATEMENT
from tests.pipeline.projects import Project


@pytest.mark.slow
def test_build_promote_pull_and_verify_in_a_bucket(project: Project, s3_uri: str, tmp_path: Path) -> None:
    """Engines are uploaded by the processes that build them: nothing but documents and reports leave this one."""
    project.registry = s3_uri
    project.change_spec(targets=["cpu"], precisions=["fp32"], calibration=None)
    sent_texts: list[str] = []
    events = client(parse_s3_place(s3_uri)).meta.events
    events.register("before-send.s3", lambda request, **_: sent_texts.append(f"{request.method} {request.url}"))

    build = project.build()
    assert build.code == 0, build.err
    (engine,) = build.json["engines"]
    assert engine["status"] == "proven" and any("/manifest.json" in request for request in sent_texts)
    assert not any(engine["digest"] in request for request in sent_texts if not request.startswith("HEAD"))
    assert build.json["report"].startswith("s3://") and "?" not in build.json["report"]

    second_document = project.build().json
    assert second_document["cached"] and second_document["version"] == "1"
    assert project.run("promote", "tiny", "--json").json["version"] == "1"
    json = project.run("pull", "tiny:stable", "--target", "cpu", "--dest", tmp_path / "out", "--json").json
    assert json["digest"] == engine["digest"] and Path(json["path"]).stat().st_size == engine["size"]
    store = open_store(s3_uri)
    manifest = lookup.load(store, "tiny", "1")
    assert manifest.blake3.get(engine["digest"]) == blake3(Path(json["path"]).read_bytes()).hexdigest()
    onnx = manifest.sources["onnx"]
    assert manifest.blake3.get(onnx) == blake3(store.read_blob(onnx)).hexdigest()
    assert b"blake3 of" not in store.read_blob(manifest.sources[STATEMENT]), "it lists digests by SHA-256"
    assert project.run("registry", "fsck").code == 0 and "tiny" in project.run("list").out
    runs = project.run("status", "--json").json["runs"]
    assert [(run["state"], run["units"]) for run in runs] == [("done", "1 cached"), ("done", "1 built")]
    metrics = project.run("registry", "metrics", "--once").out
    assert 'enginesmith_builds_total{backend="onnxruntime",state="built",target="cpu"} 1.0' in metrics
    result = project.run("show", "tiny@7")
    assert result.code == 2 and "no version of tiny '7'" in result.err and "Traceback" not in result.err
