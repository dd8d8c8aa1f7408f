"""OCI layouts: by the rules of the specification always, and by skopeo where it is installed."""

import io
import json
import re
import shutil
import subprocess
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError, digest_of_file
from enginesmith.core.names import parse_reference
from enginesmith.exchange.oci import export_oci
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import locate
from tests.enginesmith.client.layouts.engines import cpu_engine, plan, publish_with_golden
from tests.enginesmith.registries import engine, flip, on_each_store, publish_engines, refusal, report

# image-spec 1.0.2, manifest.md, config.md, descriptor.md, annotations.md, image-layout.md
DESCRIPTOR = {"mediaType", "digest", "size"}
TAG = re.compile(r"[A-Za-z0-9]+(?:[-._:@/+][A-Za-z0-9]+|--[A-Za-z0-9]+)*")


def exported(store: Store, dest: Path, reference: str = "digits", **how: bool) -> tuple[str, ...]:
    return export_oci(store, locate(store, parse_reference(reference)), dest, **how)


def publish(store: Store, content: str = "a", model: str = "digits") -> None:
    entries = [engine(store, data=f"cpu {content}".encode()), engine(store, "l4", "int8", status="unproven")]
    publish_engines(store, entries, content, others=[refusal()], channel=None, model=model)


def check(root: Path) -> list[dict[str, Any]]:
    """The rules of the layout; the manifests' descriptors."""
    assert json.loads((root / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    for blob in (root / "blobs" / "sha256").iterdir():
        assert blob.name == digest_of_file(blob)
    top = json.loads((root / "index.json").read_bytes())
    assert top["schemaVersion"] == 2 and top["mediaType"] == "application/vnd.oci.image.index.v1+json"
    tags = [item["annotations"]["org.opencontainers.image.ref.name"] for item in top["manifests"]]
    assert len(set(tags)) == len(tags) and all(map(TAG.fullmatch, tags))
    paths = []
    for item in top["manifests"]:
        document = read(root, item)
        if item["mediaType"] == "application/vnd.oci.image.index.v1+json":
            assert document["schemaVersion"] == 2 and document["mediaType"] == item["mediaType"]
            for inner_manifest in document["manifests"]:
                check_image(root, inner_manifest)
        else:
            check_image(root, item)
            paths.append(item)
    return paths


def read(root: Path, descriptor: dict[str, Any]) -> Any:
    assert descriptor.keys() >= DESCRIPTOR
    path = root / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")
    assert path.stat().st_size == descriptor["size"]
    return json.loads(path.read_bytes()) if "json" in descriptor["mediaType"] else path


def check_image(root: Path, descriptor: dict[str, Any]) -> None:
    assert descriptor["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert descriptor["platform"].keys() >= {"architecture", "os"}
    document = read(root, descriptor)
    assert document["schemaVersion"] == 2 and document["mediaType"] == descriptor["mediaType"]
    for annotations in (document["annotations"], descriptor["annotations"]):
        assert all(isinstance(value, str) and key for key, value in annotations.items())
    assert datetime.fromisoformat(document["annotations"]["org.opencontainers.image.created"]).tzinfo
    assert document["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
    config = read(root, document["config"])
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"] for layer in document["layers"]]}
    assert {"architecture": config["architecture"], "os": config["os"]} == descriptor["platform"]
    for layer in document["layers"]:
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar"
        with tarfile.open(read(root, layer)) as tar:
            for member in tar.getmembers():
                assert member.isreg() and ("/" not in member.name or member.name.startswith("models/digits/"))
                assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (0, 0, 0, "", 0o444)


@on_each_store
def test_engines_follow_the_rules_of_the_format(store: Store, tmp_path: Path) -> None:
    publish(store)
    images = exported(store, tmp_path / "out")
    assert images == ("digits-1", "digits-1-cpu-fp32-onnxruntime", "digits-1-l4-int8-tensorrt-rtx")
    cpu, gpu = check(tmp_path / "out")
    entry = locate(store, parse_reference("digits")).manifest.engines[1]
    annotations = {
        "model": "digits",
        "version": "1",
        "target": "l4",
        "compute-capability": "8.9",
        "product": "l4",
        "precision": "int8",
        "backend": "tensorrt-rtx",
        "status": "unproven",
        "engine": f"sha256:{entry.digest}",
    }
    assert {key: gpu["annotations"][f"io.enginesmith.{key}"] for key in annotations} == annotations
    assert "io.enginesmith.compute-capability" not in cpu["annotations"]
    layer = read(tmp_path / "out", read(tmp_path / "out", gpu)["layers"][0])
    with tarfile.open(layer) as tar:
        assert tar.getnames() == ["digits-1-l4-int8.engine", "digits-1-l4-int8.json"]
        description = json.load(tar.extractfile("digits-1-l4-int8.json") or io.BytesIO())
        engine_bytes = (tar.extractfile("digits-1-l4-int8.engine") or io.BytesIO()).read()
    assert description["digest"] == entry.digest and store.read_blob(str(entry.digest)) == engine_bytes


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_same_engines_give_the_same_bytes_and_layouts_grow(store: Store, tmp_path: Path) -> None:
    publish(store)
    publish(store, model="other")
    exported(store, tmp_path / "a")
    exported(store, tmp_path / "b")
    first_objects = everything(tmp_path / "a")
    assert first_objects == everything(tmp_path / "b")
    exported(store, tmp_path / "a")
    assert everything(tmp_path / "a") == first_objects
    exported(store, tmp_path / "a", "other")
    assert len(check(tmp_path / "a")) == 4


def test_a_tag_is_never_taken_from_another_version(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [engine(store)], version="1-2", channel=None)
    publish_engines(store, [engine(store, "l4")], model="digits-1", version="2", channel=None)
    exported(store, tmp_path / "oci", "digits@1-2")
    exported(store, tmp_path / "oci", "digits@1-2")
    with pytest.raises(InputError, match="the tag digits-1-2 belongs to digits@1-2; name another folder"):
        exported(store, tmp_path / "oci", "digits-1@2")


def test_unexportable_versions_are_refused(store: Store, tmp_path: Path) -> None:
    publish(store)
    assert len(exported(store, tmp_path / "proven", proven_only=True)) == 2
    entry = locate(store, parse_reference("digits")).manifest.engines[1]
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not an OCI layout"):
        exported(store, tmp_path / "else")
    (tmp_path / "proven" / "index.json").write_text("[]")
    with pytest.raises(InputError, match="damaged"):
        exported(store, tmp_path / "proven")
    flip(store, str(entry.digest))
    with pytest.raises(IntegrityError, match="holds other bytes"):
        exported(store, tmp_path / "flipped")
    assert not (tmp_path / "flipped" / "index.json").exists()
    manifest = publish_engines(store, [entry], "u", channel=None, model="unproven").manifest
    with pytest.raises(UnknownNameError, match="has no proven engine"):
        exported(store, tmp_path / "none", "unproven", proven_only=True)
    attest(store, manifest, report(entry, "failed"))
    with pytest.raises(UnknownNameError, match="has no usable engine"):
        exported(store, tmp_path / "none", "unproven")


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed (Debian: apt-get install skopeo)")
def test_skopeo_reads_and_copies_it(store: Store, tmp_path: Path) -> None:
    publish(store)
    exported(store, tmp_path / "out")

    def skopeo(*words: str) -> str:
        command = ["skopeo", "--insecure-policy", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    inspection = json.loads(skopeo("inspect", f"oci:{tmp_path / 'out'}:digits-1-l4-int8-tensorrt-rtx"))
    assert inspection["Labels"]["io.enginesmith.compute-capability"] == "8.9"
    assert inspection["Os"] == "linux" and len(inspection["Layers"]) == 1
    raw_document = json.loads(skopeo("inspect", "--raw", f"oci:{tmp_path / 'out'}:digits-1"))
    assert len(raw_document["manifests"]) == 2
    skopeo(
        "copy", "--all", "--preserve-digests", f"oci:{tmp_path / 'out'}:digits-1", f"oci:{tmp_path / 'copy'}:digits-1"
    )
    names = {path.name for path in (tmp_path / "copy" / "blobs" / "sha256").iterdir()}
    assert names == {path.name for path in (tmp_path / "out" / "blobs" / "sha256").iterdir()}


def test_a_model_car_holds_the_repository_from_which_triton_serves(store: Store, tmp_path: Path) -> None:
    entries = [cpu_engine(store, 1), plan(store, "l4"), engine(store, "l4", "int8", status="unproven")]
    publish_with_golden(store, entries, tmp_path, "a")
    tags = exported(store, tmp_path / "oci", triton=True)
    assert tags == ("digits-1-triton", "digits-1-cpu-fp32-onnxruntime-triton", "digits-1-l4-fp16-tensorrt-triton")
    exported(store, tmp_path / "oci")  # the plain ones beside them
    images = {item["annotations"]["org.opencontainers.image.ref.name"]: item for item in check(tmp_path / "oci")}
    document = read(tmp_path / "oci", images["digits-1-l4-fp16-tensorrt-triton"])
    with tarfile.open(read(tmp_path / "oci", document["layers"][0])) as tar:
        assert sorted(tar.getnames()) == [
            "models/digits/1/model.json",
            "models/digits/1/model.plan",
            "models/digits/config.pbtxt",
            "models/digits/warmup/1/input0",
        ]
    exported(store, tmp_path / "again", triton=True)
    layers = {path.name for path in (tmp_path / "again" / "blobs" / "sha256").iterdir()}
    assert layers < {path.name for path in (tmp_path / "oci" / "blobs" / "sha256").iterdir()}, "the same bytes"
    publish_engines(store, [engine(store, "l4", "int8", status="unproven")], "b", channel=None)
    with pytest.raises(UnknownNameError, match="no engine that Triton can serve"):
        exported(store, tmp_path / "none", "digits@2", triton=True)
