import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builders.backends.onnxruntime import OrtSession
from builders.backends.xla import Xla
from builders.backends.xla import backend as xla
from builders.backends.xla import file as xla_file
from enginesmith.core.errors import DataError, EnginesmithError, IntegrityError, ModelError
from enginesmith.core.hardware import cuda
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs
from tests.pipeline.quantization.small_nets import build as net


def xla_request(target="cpu", precision="fp32", **changes):
    return graphs.request(target, precision, "xla", **changes)


def image(batch, width=8):
    return {"image": np.random.default_rng(batch).standard_normal((batch, width)).astype("f")}


@pytest.fixture
def as_installed(monkeypatch):
    monkeypatch.setattr(xla, "versions_of", lambda *names, together=False: dict.fromkeys(names, "0.10.2"))


@pytest.mark.usefixtures("as_installed")
def test_unsupported_requests_are_refused_with_the_remedy():
    assert Xla().refuses(xla_request()) is Xla().refuses(xla_request("l4", "fp8")) is None
    assert Xla().refuses(xla_request(precision="fp8")) == "CPUs have no FP8 arithmetic; use int8"
    assert Xla().refuses(xla_request("a100", "fp8")) == "sm_80 has no FP8 arithmetic; use int8"
    assert "use fp16" in Xla().refuses(xla_request("t4", "bf16"))
    assert "add dims.batch.max" in Xla().refuses(xla_request(profiles=()))
    empty_profile = ShapeProfile((("image", (0, 8), (4, 8), (16, 8)),))
    assert "dims.batch.min is 0" in Xla().refuses(xla_request(profiles=(empty_profile,)))
    words = TensorSpec("image", "string", ("batch", 8))
    assert "'image' is string" in Xla().refuses(xla_request(inputs=(words,)))


@pytest.mark.usefixtures("as_installed")
def test_gpu_engines_run_where_the_gpu_and_jaxs_plugin_are(monkeypatch):
    l4 = xla_request("l4").target
    assert Xla().runs(l4) == "no sm_89 GPU on this machine" and Xla().runs(xla_request().target) is None
    monkeypatch.setattr(cuda, "gpus", lambda: (cuda.GpuDevice(0, "NVIDIA L4", (8, 9)),))
    assert Xla().runs(l4) is None
    monkeypatch.setattr(xla, "_CUDA_PLUGINS", ())
    assert "no CUDA plugin" in Xla().runs(l4)


def test_a_file_returns_program_and_weights_in_order_bit_for_bit(tmp_path):
    import ml_dtypes

    weights = {
        "w/2": np.arange(6, dtype="f").reshape(2, 3),
        "a": np.array([1, 2], ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), "int64"),
        "mask": np.array([[True, False]]),
    }
    for name in ("one", "two"):
        xla_file.write_engine(tmp_path / name, b"program", weights)
    loaded_engine = xla_file.read_engine(tmp_path / "one")
    assert loaded_engine.program == b"program"
    for result, expected in zip(loaded_engine.weights, weights.values(), strict=True):
        assert result.dtype == expected.dtype and np.array_equal(result, expected)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"garbage", None, "cut"])
def test_a_damaged_file_is_an_integrity_error(tmp_path, damage):
    path = tmp_path / "engine.xla"
    xla_file.write_engine(path, b"program", {"w": np.zeros(100, "f")})
    if damage is None:
        from safetensors.numpy import save_file

        save_file({"program": np.zeros(1, "uint8")}, path)
    else:
        path.write_bytes(path.read_bytes()[:-10] if damage == "cut" else damage)
    with pytest.raises(IntegrityError, match=r"engine\.xla"):
        xla_file.read_engine(path)


# From here on with JAX.


@pytest.fixture(scope="session")
def jax():
    return pytest.importorskip("jax")


def built(tmp_path, model, request=None, backend=None, name="engine"):
    folder = tmp_path / name
    folder.mkdir()
    return (backend or Xla()).build(request or xla_request(), model, folder)


@pytest.mark.usefixtures("jax")
def test_an_engine_computes_what_its_model_computes_at_every_size_within_its_profiles(tmp_path):
    model = graphs.mlp(tmp_path / "model.onnx")
    engine = built(tmp_path, model)
    assert engine.suffix == ".xla" and engine.path.is_relative_to(tmp_path)
    model_bytes = engine.path.read_bytes()
    assert b"pickle" not in model_bytes and str(tmp_path).encode() not in model_bytes
    with Xla(kept_sizes=2).open(engine) as session, OrtSession(model, optimized=False) as reference:
        assert (list(session.inputs), list(session.outputs)) == ([graphs.IMAGE], [graphs.LOGITS])
        for batch in (1, 4, 7, 16, 1):
            expected = reference.run(image(batch))["logits"]
            np.testing.assert_allclose(session.run(image(batch))["logits"], expected, rtol=1e-5, atol=1e-5)
        assert len(session._compiled) == 2
        for batch in (17, 0):
            with pytest.raises(DataError, match="no optimization profile holds"):
                session.run(image(batch))
        with pytest.raises(DataError, match="is float64"):
            session.run({"image": np.zeros((1, 8))})
    with pytest.raises(EnginesmithError, match="closed"):
        session.run(image(1))


@pytest.mark.usefixtures("jax")
def test_a_dim_of_multiples_is_dynamic_in_steps(tmp_path):
    text = "a = Reshape(image, pairs) y = Reshape(a, rows)"
    sizes = {"pairs": np.array([-1, 4, 8]), "rows": np.array([-1, 8])}
    onnx.save(net("float[n,8] image", "float[n,8] y", text, sizes), model := tmp_path / "m.onnx")
    profile = ShapeProfile((("image", (4, 8), (8, 8), (16, 8)),), (("image", (4, 1)),))
    specs = {"inputs": (TensorSpec("image", "float32", ("n", 8)),), "outputs": (TensorSpec("y", "float32", ("n", 8)),)}
    engine = built(tmp_path, model, xla_request(profiles=(profile,), **specs))
    with Xla().open(engine) as session:
        for rows in (4, 12):
            np.testing.assert_array_equal(session.run(image(rows))["y"], image(rows)["image"])
        with pytest.raises(DataError, match="multiples of 4"):
            session.run(image(6))


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize(
    ("precision", "write"),
    [
        ("fp16", lambda path: graphs.mlp(path, "float16")),
        ("bf16", lambda path: graphs.mlp(path, "bfloat16")),
        ("int8", lambda path: graphs.int8_mlp(path, "float32")),
    ],
)
def test_narrow_precisions_are_near_the_graph(tmp_path, precision, write):
    from pipeline.quantization.schemes.cast import emulate

    model = write(tmp_path / "model.onnx")
    logits = TensorSpec("logits", "float32", ("batch", 16 if precision == "int8" else 3))
    engine = built(tmp_path, model, xla_request(precision=precision, outputs=(logits,)))
    onnx.save(emulate(onnx.load(model)), tmp_path / "emulated.onnx")
    with Xla().open(engine) as session, OrtSession(tmp_path / "emulated.onnx", optimized=False) as reference:
        actual, expected = session.run(image(8))["logits"], reference.run(image(8))["logits"]
        np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("jax")
def test_a_gpu_engine_is_written_without_a_gpu_and_opened_only_with_one(tmp_path):
    engine = built(tmp_path, graphs.mlp(tmp_path / "model.onnx"), xla_request("l4"))
    import jax.export

    program = jax.export.deserialize(bytearray(xla_file.read_engine(engine.path).program))
    assert program.platforms == ("cuda",)
    with pytest.raises(EnginesmithError, match="no sm_89 GPU"), Xla().open(engine):
        pass


@pytest.mark.usefixtures("jax")
def test_an_operator_outside_the_table_is_named(tmp_path):
    node = helper.make_node("RandomNormalLike", ["x"], ["y"], name="block/the_node")
    values = [(name, TensorProto.FLOAT, (2, 4)) for name in "xy"]
    model = graphs.save(tmp_path / "model.onnx", [node], values[:1], values[1:])
    with pytest.raises(ModelError, match=r"node 'block/the_node' \(RandomNormalLike\)"):
        built(tmp_path, model, fixed())


def fixed(**changes):
    """A request for x -> y, [2, 4] both."""
    tensors = {"inputs": (TensorSpec("x", "float32", (2, 4)),), "outputs": (TensorSpec("y", "float32", (2, 4)),)}
    return xla_request(**{**tensors, "profiles": (), **changes})


@pytest.mark.usefixtures("jax")
def test_a_shape_that_depends_on_data_is_refused_and_the_node_named(tmp_path):
    node = helper.make_node("NonZero", ["x"], ["y"], name="where")
    model = graphs.save(tmp_path / "m.onnx", [node], [("x", 1, (2, 4))], [("y", 7, (2, "n"))])
    expected = fixed(outputs=(TensorSpec("y", "int64", (2, "n")),))
    with pytest.raises(ModelError, match=r"node 'where' \(NonZero\): the shape of its output depends on data"):
        built(tmp_path, model, expected)


@pytest.mark.usefixtures("jax")
def test_a_damaged_program_is_an_integrity_error(tmp_path):
    engine = built(tmp_path, graphs.mlp(tmp_path / "model.onnx"))
    xla_file.write_engine(engine.path, b"no program at all", {})
    damaged_engine = dataclasses.replace(engine, size_bytes=engine.path.stat().st_size)
    with pytest.raises(IntegrityError, match="holds no program"), Xla().open(damaged_engine):
        pass
