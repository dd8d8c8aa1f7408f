import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from builders.backends.onnxruntime import session as module
from enginesmith.core.errors import DataError, EnginesmithError, ModelError
from enginesmith.core.hardware.cpu_kinds import CpuKind, this_kind
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs
from tests.pipeline.quantization.small_nets import build as net


def ort_request(precision="fp32", backend: OnnxRuntime | None = None, **changes):
    toolchain = tuple(sorted((backend or OnnxRuntime()).versions().items()))
    return graphs.request("cpu", precision, "onnxruntime", toolchain=toolchain, **changes)


def image(batch: int) -> dict[str, np.ndarray]:
    return {"image": np.random.default_rng(batch).standard_normal((batch, 8)).astype("f")}


@pytest.mark.parametrize("level", ["none", "extended", "all"])
def test_an_engine_computes_what_its_model_computes_at_every_batch(tmp_path, level):
    model = graphs.mlp(tmp_path / "model.onnx")
    backend = OnnxRuntime(graph_optimization=level)
    engine = backend.build(ort_request(backend=backend), model, tmp_path)
    assert engine.path.is_relative_to(tmp_path) and engine.suffix == ".onnx"
    with backend.open(engine) as session, OrtSession(model, optimized=False) as reference:
        for batch in (1, 3, 16):
            expected = reference.run(image(batch))["logits"]
            np.testing.assert_allclose(session.run(image(batch))["logits"], expected, rtol=1e-5, atol=1e-5)


def test_an_engine_takes_any_size_except_between_multiples(tmp_path):
    profile = ShapeProfile((("image", (4, 8), (8, 8), (16, 8)),), (("image", (4, 1)),))
    engine = OnnxRuntime().build(ort_request(profiles=(profile,)), graphs.mlp(tmp_path / "model.onnx"), tmp_path)
    with OnnxRuntime().open(engine) as session:
        assert len(session.run(image(32))["logits"]) == 32
        with pytest.raises(DataError, match="multiples of 4 there: pad, crop or scale it to 4 or 8"):
            session.run(image(6))


def domains(path) -> set[str]:
    return {node.domain for node in onnx.load(path).graph.node}


def test_by_default_no_host_specific_layout_is_saved(tmp_path):
    engine = OnnxRuntime().build(ort_request(), graphs.convnet(tmp_path / "model.onnx"), tmp_path)
    assert "com.microsoft.nchwc" not in domains(engine.path)
    assert "cpu" not in OnnxRuntime().versions()


def test_a_saved_layout_makes_the_cpu_part_of_the_toolchain_and_other_cpus_are_refused(tmp_path, monkeypatch):
    backend = OnnxRuntime(graph_optimization="all")
    assert backend.versions()["cpu"] == this_kind().name
    engine = backend.build(ort_request(backend=backend), graphs.convnet(tmp_path / "model.onnx"), tmp_path)
    if this_kind().name.startswith("x86-64-v"):
        assert "com.microsoft.nchwc" in domains(engine.path)
    with backend.open(engine):
        pass
    monkeypatch.setattr("enginesmith.core.hardware.machine.this_kind", lambda: CpuKind("arm64", "aarch64"))
    with pytest.raises(EnginesmithError, match="laid out for"), backend.open(engine):
        pass


def test_an_fp16_note_counts_the_nodes_that_stay_fp32(tmp_path):
    model = graphs.mlp(tmp_path / "model.onnx", "float16")
    engine = OnnxRuntime().build(ort_request("fp16"), model, tmp_path)
    with OnnxRuntime().open(engine) as session:
        assert np.isfinite(session.run(image(4))["logits"]).all()
    assert len(engine.notes) == 1 and "compute in fp32 on this CPU" in engine.notes[0]
    assert OnnxRuntime().build(ort_request(), graphs.mlp(tmp_path / "fp32.onnx"), tmp_path).notes == ()


def test_fusions_slower_than_their_parts_are_left_out(tmp_path):
    """With them, Add and LayerNormalization become one SkipLayerNormalization: in the file, or when it is opened."""
    text = "sum = Add(x, y) z = LayerNormalization(sum, gamma, beta)"
    weights = {"gamma": np.ones(4), "beta": np.zeros(4)}
    onnx.save(net("float[2,3,4] x, float[2,3,4] y", "float[2,3,4] z", text, weights), tmp_path / "model.onnx")
    engine = OnnxRuntime().build(ort_request(), tmp_path / "model.onnx", tmp_path)
    assert [node.op_type for node in onnx.load(engine.path).graph.node] == ["Add", "LayerNormalization"]
    options = module.session_options("ORT_ENABLE_ALL", 1)
    options.optimized_model_filepath = str(tmp_path / "opened.onnx")
    module.open_model(engine.path, options)
    assert "SkipLayerNormalization" not in {node.op_type for node in onnx.load(tmp_path / "opened.onnx").graph.node}


@pytest.mark.parametrize("bias_first", [False, True])
def test_a_bias_behind_an_integer_matmul_becomes_part_of_it(tmp_path, bias_first):
    rng = np.random.default_rng(0)
    weights = {"s": np.float32(0.05), "z": np.uint8(128), "b": np.arange(16.0)}
    weights |= {"w": rng.integers(-127, 128, (8, 16), "int8"), "sw": np.full(16, 0.02), "zw": np.zeros(16, "int8")}
    text = f"""
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) wd = DequantizeLinear<axis=1>(w, sw, zw)
        m = MatMul(d, wd) y = Add({"b, m" if bias_first else "m, b"})
    """
    onnx.save(net("float[n,3,8] x", "float[n,3,16] y", text, weights), model := tmp_path / "m.onnx")
    engine = OnnxRuntime().build(ort_request(), model, tmp_path)
    types = [node.op_type for node in onnx.load(engine.path).graph.node]
    assert types == ["QuantizeLinear", "MatMulIntegerToFloat"]
    x = {"x": rng.normal(size=(2, 3, 8)).astype("f")}
    with OnnxRuntime().open(engine) as opened_file, OrtSession(model, optimized=False) as reference:
        np.testing.assert_allclose(opened_file.run(x)["y"], reference.run(x)["y"], rtol=1e-4, atol=1e-4)


def test_bf16_fp8_and_gpus_are_refused_with_the_remedy():
    assert OnnxRuntime().refuses(ort_request("fp8")) == "CPUs have no FP8 arithmetic; use int8"
    assert "use fp32" in OnnxRuntime().refuses(ort_request("bf16"))
    assert "tensorrt-rtx" in OnnxRuntime().refuses(graphs.request("sm_89"))
    assert OnnxRuntime().refuses(ort_request()) is None
    assert OnnxRuntime().runs(graphs.request("sm_89").target)
    assert OnnxRuntime().runs(graphs.request("cpu").target) is None


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "No graph"), (b"garbage", "parsing failed"), (None, "doesn't exist")]
)
def test_an_invalid_model_file_is_a_model_error(tmp_path, content, words):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        OrtSession(path)


@pytest.mark.parametrize(
    ("op", "domain", "dtype", "words"),
    [
        ("Fooo", "", TensorProto.FLOAT, "no operator Fooo"),
        ("Foo", "acme", TensorProto.FLOAT, "no operator acme:Foo"),
        ("Relu", "", TensorProto.BFLOAT16, r"no operator Relu \(node 'block/the_node'\)"),
    ],
)
def test_an_unsupported_operator_is_named(tmp_path, op, domain, dtype, words):
    with pytest.raises(ModelError, match=words):
        OrtSession(graphs.one_node(tmp_path / "model.onnx", op, dtype, domain=domain))


def test_an_untaken_branch_that_the_optimizer_refuses_has_a_remedy(tmp_path):
    """The other branch squeezes an axis of 2: an error at these sizes, which only the optimizer sees."""
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    net (float[2,3] x, bool c) => (float[a,b] y) <int64[1] two = {2}, int64[1] three = {3}, int64[1] zero = {0}> {
        y = If (c) <
            then_branch = g () => (float[a,b] i) { i = Identity(x) },
            else_branch = h () => (float[a,b] q) {
                s = Concat<axis=0>(two, three) r = Reshape(x, s) q = Squeeze(r, zero)
            }
        >
    }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"must be 1 instead of 2.*opens without optimization: set backends"):
        OnnxRuntime().build(ort_request(), tmp_path / "model.onnx", tmp_path)
    engine = OnnxRuntime(graph_optimization="none").build(ort_request(), tmp_path / "model.onnx", tmp_path)
    assert engine.size_bytes


def test_an_opset_from_the_future_is_a_model_error(tmp_path):
    model = onnx.load(graphs.mlp(tmp_path / "model.onnx"))
    model.opset_import[0].version = 99
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="Opset 99"):
        OrtSession(tmp_path / "model.onnx")


def test_inputs_and_outputs_are_described(tmp_path):
    session = OrtSession(graphs.mlp(tmp_path / "model.onnx"))
    assert (list(session.inputs), list(session.outputs)) == ([graphs.IMAGE], [graphs.LOGITS])


def test_an_unnamed_dim_gets_its_own_name(tmp_path):
    session = OrtSession(graphs.one_node(tmp_path / "model.onnx", "Relu", shape=(None, None)))
    assert session.inputs[0].shape == ("x.0", "x.1")
    assert session.run({"x": np.zeros((2, 3), "f")})["y"].shape == (2, 3)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "no array for input 'image'"),
        ({"image": np.zeros((1, 8), "f"), "mask": np.zeros(1)}, "no input is named 'mask'"),
        ({"image": np.zeros((1, 8))}, "is float64; the model needs float32"),
        ({"image": np.zeros(8, "f")}, r"has shape \(8,\)"),
        ({"image": np.zeros((1, 9), "f")}, "size 9 on axis 1"),
        ({"image": np.zeros((1, 8), ">f4")}, "has the wrong byte order"),
        ({"image": [[0.0] * 8]}, "is of type list; the model needs a numpy array of float32"),
    ],
)
def test_arrays_that_do_not_fit_are_data_errors(tmp_path, inputs, words):
    session = OrtSession(graphs.mlp(tmp_path / "model.onnx"))
    with pytest.raises(DataError, match=words):
        session.run(inputs)


def test_one_dim_with_two_sizes_is_a_data_error(tmp_path):
    node = helper.make_node("Add", ["a", "b"], ["y"], name="add")
    values = [(name, TensorProto.FLOAT, ("batch", 2)) for name in "aby"]
    session = OrtSession(graphs.save(tmp_path / "model.onnx", [node], values[:2], values[2:]))
    with pytest.raises(DataError, match="'batch' is 1 elsewhere"):
        session.run({"a": np.zeros((1, 2), "f"), "b": np.zeros((3, 2), "f")})


def test_an_operator_that_fails_on_the_data_is_named(tmp_path):
    node = helper.make_node("MatMul", ["x", "x"], ["y"], name="square")
    value = ("x", TensorProto.FLOAT, ("a", "b"))
    session = OrtSession(graphs.save(tmp_path / "model.onnx", [node], [value], [("y", TensorProto.FLOAT, ("a", "b"))]))
    with pytest.raises(ModelError, match="square"):
        session.run({"x": np.zeros((2, 3), "f")})


def test_an_unoptimised_graph_stays_as_written(tmp_path, monkeypatch):
    """The reference must not be rewritten: a graph whose optimised form differs shows which one runs."""
    seen_levels = []
    options = module.session_options
    monkeypatch.setattr(
        module, "session_options", lambda level, threads, of=None: seen_levels.append(level) or options(level, threads)
    )
    model = graphs.mlp(tmp_path / "model.onnx")
    OrtSession(model, optimized=False)
    OrtSession(model)
    assert seen_levels == ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"]


def test_external_data_is_found_beside_the_model(tmp_path):
    model = onnx.load(graphs.mlp(tmp_path / "model.onnx"))
    path = tmp_path / "external"
    path.mkdir()
    onnx.save(model, path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    engine = OnnxRuntime().build(ort_request(), path / "model.onnx", tmp_path)
    shutil.rmtree(path)
    with OnnxRuntime().open(engine) as session:
        assert session.run(image(2))["logits"].shape == (2, 3)


def test_profiles_and_specs_are_not_needed(tmp_path):
    """The CPU engine takes any shape; a request without profiles builds."""
    scalar = ort_request(profiles=(ShapeProfile(()),), inputs=(TensorSpec("image", "float32", ("batch", 8)),))
    assert OnnxRuntime().build(scalar, graphs.mlp(tmp_path / "model.onnx"), tmp_path).size_bytes > 0
