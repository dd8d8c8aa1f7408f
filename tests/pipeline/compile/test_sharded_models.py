"""A model whose weights stay in files of their own, through every step: with a threshold of bytes instead of 1 GiB."""

import tarfile

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from builders.reference import ReferenceSession
from enginesmith.core.errors import IntegrityError
from pipeline.compile import preflight
from pipeline.compile.steps import exports
from pipeline.operations.offline.bundle import write_offline_bundle
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project, answers, units, write_model
from validation.gpu.devices import OfflineBundle


def wide_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"w1": (8, 256), "b1": (256,), "w2": (256, 10)}
    return {name: (rng.normal(size=shape) / 8).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def sharded(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose model has its weights in a file beside it; all over 1000 bytes is too large for one file."""
    monkeypatch.setattr(exports, "MOST_EMBEDDED_BYTES", 1000)
    monkeypatch.setattr(preflight, "MOST_EMBEDDED_BYTES", 1000)
    path, values = project.folder / "tiny.onnx", wide_weights()
    write_model(path, values)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="tiny.weights", size_threshold=0)
    with np.load(project.folder / "golden.npz") as golden:
        x = golden["x"]
    np.savez(project.folder / "golden.npz", x=x, label=answers(values, x).argmax(-1))
    project.change_spec(targets=["cpu"], backends={"onnxruntime": {}})
    return project


def test_a_sharded_model_is_built_published_pulled_and_copied_with_its_shards(sharded: Project, tmp_path) -> None:
    sharded.change_spec(precisions=["fp32", "fp16", "int8", "int8-dynamic"], quantization={"smoothing": "auto"})
    build = sharded.build()
    assert build.code == 0, build.err
    assert set(units(build.json, "status").values()) == {"proven"}
    store, manifest = sharded.published()
    engines = {entry.precision: entry for entry in manifest.engines}
    shards = {name: set(manifest.shards[str(entry.digest)]) for name, entry in engines.items()}
    assert shards["fp32"] == set(manifest.shards[manifest.onnx])  # the engine has its graph's
    assert not shards["fp32"] & shards["int8"]
    assert all(store.has(shard) for result in shards.values() for shard in result)
    sizes = {name: manifest.size_of(entry) for name, entry in engines.items()}
    assert sizes["fp16"] < 0.7 * sizes["fp32"] and engines["fp32"].size_bytes < 5000 < 18_000 < sizes["fp32"]
    assert any("quantization.smoothing" in note for note in engines["int8"].notes)
    assert sharded.run("registry", "fsck").code == 0
    assert sharded.run("registry", "gc", "--delete", "--grace", "0s").code == 0
    assert sharded.run("registry", "fsck").code == 0
    copy = tmp_path / "copy"
    assert sharded.run("registry", "mirror", "tiny@1", copy).code == 0
    for registry, folder in ((sharded.registry, tmp_path / "a"), (copy, tmp_path / "b")):
        sharded.registry = registry
        assert sharded.run("pull", "tiny@1", "--precision", "fp32", "--dest", folder, "--json").code == 0
        assert {path.name for path in folder.iterdir()} > shards["fp32"]
        with ReferenceSession(next(folder.glob("*.onnx"))) as session:
            x = np.ones((2, 8), np.float32)
            assert np.allclose(session.run({"x": x})["logits"], answers(wide_weights(), x), atol=1e-4)


@pytest.mark.slow
def test_an_unchanged_build_does_nothing_and_a_changed_weight_rebuilds(sharded: Project) -> None:
    sharded.change_spec(precisions=["fp32"], calibration=None)
    assert sharded.build().code == 0
    second_build = sharded.build()
    assert second_build.json["cached"] and second_build.json["version"] == "1"
    data = sharded.folder / "tiny.weights"
    changed_data = bytearray(data.read_bytes())
    changed_data[:4] = np.float32(0.5).tobytes()
    data.write_bytes(bytes(changed_data))
    assert sharded.build().json["version"] == "2"


def test_a_backend_that_takes_one_file_is_refused_before_anything_is_built(sharded: Project) -> None:
    sharded.change_spec(backends={"xla": {}}, precisions=["fp32", "fp16"], calibration=None)
    single_build, reason = sharded.build(), "one ONNX file ends at 2 GB (protobuf), and xla takes a model in one file"
    assert single_build.code == 2 and reason in single_build.err and "export" not in single_build.err
    sharded.change_spec(backends={"onnxruntime": {}, "xla": {}}, precisions=["fp32", "fp16"])
    engines = sharded.build().json["engines"]
    refused_engines = [engine for engine in engines if engine["status"] == "refused"]
    assert [engine["backend"] for engine in refused_engines] == ["xla"] * 2
    assert all(reason in engine["reason"] for engine in refused_engines)


def test_a_memory_limit_below_the_weights_is_reported_before_the_build(sharded, monkeypatch):
    monkeypatch.setattr(preflight, "graph_bytes", lambda _: 4 << 30)
    sharded.change_spec(precisions=["fp16", "int8"], build={"memory_mib": 2047})
    engine = sharded.build()
    assert engine.code == 2 and "export" not in engine.err
    assert "2047 MiB are too few: the weights alone take 2048 MiB at 16 bits each; set 4096" in engine.err
    sharded.change_spec(build={"memory_mib": 2048})
    preflight.check_files(load_spec(sharded.spec))


def test_images_and_bundles_hold_the_shards(sharded: Project, tmp_path) -> None:
    sharded.change_spec(precisions=["fp32"], calibration=None)
    sharded.build()
    assert sharded.run("registry", "export", "tiny@1", tmp_path / "image").code == 0
    layers = [path for path in (tmp_path / "image" / "blobs" / "sha256").iterdir() if tarfile.is_tarfile(path)]
    with tarfile.open(*layers) as tar:
        names = tar.getnames()
    store, manifest = sharded.published()
    shard, *other_shard = manifest.shards[str(manifest.engines[0].digest)]
    assert {shard, *other_shard} <= set(names)
    bundle = write_offline_bundle(store, manifest, tmp_path / "bundle")
    OfflineBundle.load(bundle.folder)
    (carried_path := bundle.engines[0].path.with_name(shard)).unlink()
    carried_path.write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match="has another digest than its name"):
        OfflineBundle.load(bundle.folder)


def test_models_in_one_file_are_unchanged(sharded: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exports, preflight):
        monkeypatch.setattr(module, "MOST_EMBEDDED_BYTES", 1 << 30)
    sharded.change_spec(precisions=["fp32"], calibration=None)
    sharded.build()
    store, manifest = sharded.published()
    assert manifest.shards == {}
    model = onnx.load_from_string(store.read_blob(manifest.onnx))
    inputs = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    assert np.array_equal(inputs["w1"], wide_weights()["w1"])
