import json
from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.core.errors import InputError, UnavailableError, UnknownNameError, canonical_json
from enginesmith.core.hardware import machine
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.hardware.cuda import GpuDevice
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import Reference
from enginesmith.core.types import Target
from enginesmith.registry.manifest import ON_RANDOM
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.publish import add_attestation
from tests.enginesmith.registries import engine, names_in, on_each_store, publish_engines, pull, report

DIGITS = Reference("digits")
SM89 = parse_targets("sm_89")[0]


@on_each_store
def test_a_pulled_engine_has_all_that_a_server_needs(store: Store, dest: Path) -> None:
    entry = engine(store)
    published_manifest = publish_engines(store, [entry, engine(store, "sm_89", status="unproven")])
    pulled_engine = pull(store, DIGITS, CPU, dest)
    assert names_in(dest) == ["digits-1-cpu-fp32.json", "digits-1-cpu-fp32.onnx"]
    assert pulled_engine.path.read_bytes() == b"engine cpu fp32" and pulled_engine.warning is None
    document = json.loads(pulled_engine.description.read_bytes())
    assert document["file"] == pulled_engine.path.name and document["digest"] == entry.digest
    assert document["inputs"] == [{"name": "image", "dtype": "float32", "shape": ["batch", 1, 8, 8]}]
    assert document["outputs"][0]["name"] == "logits"
    assert document["profiles"][0]["inputs"][0] == ["image", [1, 1, 8, 8], [8, 1, 8, 8], [32, 1, 8, 8]]
    assert (document["model"], document["version"], document["channel"], document["status"], document["manifest"]) == (
        "digits", "1", "candidate", "proven", published_manifest.digest,
    )  # fmt: skip


@on_each_store
def test_pulling_again_copies_nothing_and_repairs_what_is_damaged(store: Store, dest: Path) -> None:
    publish_engines(store, [engine(store)])
    first_engine = pull(store, DIGITS, CPU, dest)
    assert not first_engine.cached and pull(store, DIGITS, CPU, dest).cached
    first_engine.path.write_bytes(b"damaged")
    assert not pull(store, DIGITS, CPU, dest).cached
    assert first_engine.path.read_bytes() == b"engine cpu fp32"


def test_an_unproven_engine_has_a_warning_or_is_refused(store: Store, dest: Path) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry, engine(store)]).manifest
    pulled_engine = pull(store, DIGITS, SM89, dest)
    assert (
        "UNPROVEN" in str(pulled_engine.warning)
        and json.loads(pulled_engine.description.read_bytes())["status"] == "unproven"
    )
    blind = replace(pulled_engine.engine, reason="not measured: y: constant", checks={"passed": 1, "not_measured": 1})
    message = replace(pulled_engine, resolution=replace(pulled_engine.resolution, chosen=blind)).warning
    assert message == f"UNPROVEN: {blind.unit} is not proven: not measured: y: constant", "a run would prove nothing"
    random_engine = replace(
        pulled_engine, resolution=replace(pulled_engine.resolution, chosen=replace(blind, status=ON_RANDOM))
    )
    assert str(random_engine.warning).startswith("PROVEN ON RANDOM INPUTS: "), "the word that channels and reports have"
    channels.promote(store, manifest, "stable", proven_only=True)
    for refusing_function in (
        lambda: pull(store, DIGITS, SM89, dest / "b", proven_only=True),
        lambda: pull(store, Reference("digits", channel="stable"), SM89, dest / "b"),
    ):
        with pytest.raises(UnknownNameError, match="only proven engines"):
            refusing_function()
    assert not (dest / "b").exists()
    add_attestation(store, manifest, report(entry, "proven"))
    assert pull(store, Reference("digits", channel="stable"), SM89, dest).warning is None
    add_attestation(store, manifest, report(entry, "failed", host="there"))
    with pytest.raises(UnknownNameError, match="failed when validated later"):
        pull(store, DIGITS, SM89, dest)


def test_a_destination_that_is_a_file_is_named(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [engine(store)])
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=str(tmp_path / "file")):
        pull(store, DIGITS, CPU, tmp_path / "file")


@pytest.mark.parametrize(
    ("gpus", "target"),
    [
        ([], CPU),
        ([GpuDevice(0, "NVIDIA L4", (8, 9))], Target("l4", (8, 9), "l4")),
        ([GpuDevice(0, "NVIDIA A100-SXM4-80GB", (8, 0))] * 2, Target("a100", (8, 0), "a100")),
        ([GpuDevice(0, "NVIDIA GeForce RTX 4080", (8, 9))], Target("sm_89", (8, 9))),
        ([GpuDevice(0, "Something New", (13, 0))], Target("sm_130", (13, 0))),
    ],
)
def test_auto_means_this_machines_gpu_or_its_cpu(gpus: list, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginesmith.core.hardware.cuda.gpus", lambda: tuple(gpus))
    assert machine.target_named("auto") == target


def test_a_target_must_be_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.target_named("l4") == Target("l4", (8, 9), "l4")
    with pytest.raises(UnknownNameError, match="stands for several: sm_80, sm_86"):
        machine.target_named("ampere")
    second_devices = (GpuDevice(0, "NVIDIA L4", (8, 9)), GpuDevice(1, "Tesla T4", (7, 5)))
    monkeypatch.setattr("enginesmith.core.hardware.cuda.gpus", lambda: second_devices)
    with pytest.raises(UnknownNameError, match="sm_75, sm_89"):
        machine.target_named("auto")


def test_an_engine_never_replaces_another_versions(store: Store, dest: Path) -> None:
    publish_engines(store, [engine(store)], version="1-2")
    publish_engines(store, [engine(store, data=b"other")], model="digits-1", version="2")
    first_engine = pull(store, DIGITS, CPU, dest)
    with pytest.raises(InputError, match=r"digits-1-2-cpu-fp32\.json belongs to digits@1-2; give another folder"):
        pull(store, Reference("digits-1"), CPU, dest)
    assert first_engine.path.read_bytes() == b"engine cpu fp32"


def test_engines_of_two_backends_have_their_own_files(store: Store, dest: Path) -> None:
    second_engine = replace(engine(store, data=b"of xla"), backend="xla", suffix=".xla")
    second_engine = replace(second_engine, report=store.put_bytes(canonical_json(report(second_engine).to_json())))
    publish_engines(store, [engine(store), second_engine])
    result = Client(store.uri).pull_all("digits", dest, target="cpu")
    assert {item.engine.backend for item in result} == {"onnxruntime", "xla"}
    for item in result:
        document = json.loads(item.description.read_bytes())
        assert (document["file"], document["digest"]) == (item.path.name, item.engine.digest)
