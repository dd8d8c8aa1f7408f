import dataclasses
import re
import shutil

import numpy as np
import onnx
import pytest

from builders.backends import discovery
from builders.backends.onnxruntime import OrtSession
from builders.backends.request_checks import profiles
from builders.backends.tvm import Tvm
from builders.backends.tvm import backend as tvm
from builders.backends.tvm.compile import _one_dimension
from enginesmith.core.errors import DataError, EnginesmithError, ModelError
from enginesmith.core.types import Dim
from pipeline.sources.onnx_model import specs_of
from tests.builders import graphs, native_graphs

TVM = Tvm()


@pytest.fixture
def compiler():
    pytest.importorskip("tvm")
    if not shutil.which("g++"):
        pytest.skip("TVM links with g++, which is missing")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(tvm, "versions_of", lambda *names, together: dict.fromkeys(names, "0.27"))
    monkeypatch.setattr(tvm.shutil, "which", lambda name: f"/usr/bin/{name}")


def own_request(target="cpu", precision="fp32", backend=TVM, **changes):
    toolchain, options = discovery.toolchain_of(backend), discovery.options_of(backend)
    return graphs.request(target, precision, "tvm", toolchain=toolchain, options=options, **changes)


@pytest.mark.parametrize(
    ("target", "precision", "words"),
    [
        ("cpu", "bf16", "not for bfloat16; use fp16 or fp32"),
        ("cpu", "fp8", "takes no FP8 .*; use int8"),
        ("cpu", "int4", "takes no weights in blocks.*; use int8"),
    ],
)
def test_unsupported_requests_are_refused_with_a_remedy(installed, target, precision, words):
    assert re.search(words, TVM.refuses(own_request(target, precision)))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int8-dynamic"])
def test_supported_requests_are_accepted(installed, precision):
    assert TVM.refuses(own_request("cpu", precision)) is None
    assert not TVM.serves(own_request("l4").target)


def test_missing_tools_are_refused_with_the_remedy(installed, monkeypatch):
    monkeypatch.setattr(tvm.shutil, "which", lambda name: None)
    assert TVM.refuses(own_request()).endswith("install g++")
    monkeypatch.setattr(tvm, "versions_of", lambda *names, together: {})
    assert TVM.versions() == {}
    assert TVM.refuses(own_request()) == "TVM is not installed; pip install '.[tvm]' in a clone"


def test_versions_of_the_code_generators_are_in_the_key(installed):
    assert TVM.versions() == {"apache-tvm": "0.27", "apache-tvm-ffi": "0.27"}
    assert Tvm(cpu="host").versions()["cpu"] == tvm.host_level()


def test_an_engine_computes_what_its_model_computes_at_every_batch(compiler, tmp_path):
    model = graphs.mlp(tmp_path / "model.onnx")
    engine = TVM.build(own_request(), model, tmp_path)
    assert engine.path == tmp_path / "engine.so" and engine.suffix == ".so"
    (tmp_path / "again").mkdir()
    build = TVM.build(own_request(), model, tmp_path / "again")  # its bytes are others now and then
    with TVM.open(engine) as session, TVM.open(build) as file, OrtSession(model, optimized=False) as reference:
        for batch in (1, 3, 16):
            x = {"image": np.random.default_rng(batch).standard_normal((batch, 8)).astype("f")}
            np.testing.assert_allclose(session.run(x)["logits"], reference.run(x)["logits"], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(file.run(x)["logits"], session.run(x)["logits"])  # as `determinism` says
        with pytest.raises(DataError, match="no optimization profile holds"):
            session.run({"image": np.zeros((17, 8), "f")})
    request = dataclasses.replace(engine.request, toolchain=(("apache-tvm", "0.20"),))
    with pytest.raises(EnginesmithError, match="apache-tvm"), TVM.open(dataclasses.replace(engine, request=request)):
        pass


def test_incomparable_sizes_are_a_model_error(compiler, tmp_path):
    model, request = native_graphs.two_sizes(tmp_path / "m.onnx", TVM)
    with pytest.raises(ModelError, match=r"TVM cannot compile the model: .*R\.add\('x', 'y'\)"):
        TVM.build(request, model, tmp_path)


def test_a_range_over_a_graph_size_has_no_dimension():
    node = onnx.helper.make_node("Range", ["zero", "limit", "one"], ["y"])
    values = {name: onnx.numpy_helper.from_array(np.array(index)) for index, name in enumerate(("zero", "one"))}
    of_shape = {
        "limit": onnx.helper.make_node("Squeeze", ["s"], ["limit"]),
        "s": onnx.helper.make_node("Shape", ["x"], ["s"], start=1, end=2),
    }
    assert _one_dimension(node, of_shape, values) == "s"
    assert _one_dimension(node, {}, values) is None
    other_fields = {**of_shape, "limit": onnx.helper.make_node("Add", ["s", "s"], ["limit"])}
    assert _one_dimension(node, other_fields, values) is None
    assert _one_dimension(node, {"limit": of_shape["limit"]}, values) is None


def test_counting_along_a_dynamic_dimension_keeps_its_size(compiler, tmp_path):
    model, request = native_graphs.positions(tmp_path / "m.onnx", TVM)
    with TVM.open(TVM.build(request, model, tmp_path)) as session, OrtSession(model) as reference:
        for shape in ((1, 1), (2, 3), (16, 16)):
            ids = {"ids": np.arange(np.prod(shape)).reshape(shape)}
            np.testing.assert_array_equal(session.run(ids)["y"], reference.run(ids)["y"])


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (lambda path: graphs.one_node(path, "Det", shape=(2, 2)), r"node 'block/the_node' \(Det\): .*not supported"),
        (graphs.fp8_mlp, r"node 'quantize' \(QuantizeLinear\): zero_point"),
    ],
)
def test_an_operator_it_lacks_is_named_with_its_node(compiler, tmp_path, graph, words):
    model = graph(tmp_path / "m.onnx")
    if b"Det" in model.read_bytes():
        loaded_model = onnx.load(model)
        del loaded_model.graph.output[0].type.tensor_type.shape.dim[:]
        onnx.save(loaded_model, model)
    with pytest.raises(ModelError, match=words):
        TVM.build(own_request(profiles=()), model, tmp_path)


def test_an_invalid_engine_is_refused_with_a_message(compiler, tmp_path):
    engine = TVM.build(own_request(), graphs.mlp(tmp_path / "m.onnx"), tmp_path)
    engine.path.unlink()  # the loader still has the old one by its name and inode
    engine.path.write_bytes(b"x" * engine.size_bytes)
    with pytest.raises(EnginesmithError, match=r"TVM cannot load engine\.so: .*; build it again"), TVM.open(engine):
        pass


def built(text, tmp_path, weights=()):
    """An engine of a graph in ONNX's own notation, always at the same place."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    inputs, outputs = specs_of(model)
    request = dataclasses.replace(own_request(profiles=()), inputs=inputs, outputs=outputs)
    return TVM.build(request, path, tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_an_engine_that_replaces_another_gives_its_own_answers(compiler, tmp_path, monkeypatch, links):
    """TVM unloads no library, and takes one at a path it knows for the one it has."""
    if not links:
        monkeypatch.setattr("pathlib.Path.hardlink_to", lambda *_: (_ for _ in ()).throw(OSError(18, "other device")))
    x = {"x": np.ones(4, "f")}
    for operator, expected in (("Neg", -1), ("Relu", 1), ("Exp", np.e)):
        (tmp_path / "engine.so").unlink(missing_ok=True)
        engine = built(f"g (float[4] x) => (float[4] y) {{ y = {operator}(x) }}", tmp_path)
        with TVM.open(engine) as session:
            np.testing.assert_allclose(session.run(x)["y"], expected, rtol=1e-6)


def test_a_shape_that_is_an_output_is_an_array(compiler, tmp_path):
    engine = built("g (float[n, 4] x) => (int64[2] s, float[n, 4] y) { s = Shape(x) y = Relu(x) }", tmp_path)
    with TVM.open(engine) as session:
        result = session.run({"x": np.ones((3, 4), "f")})["s"]
    assert result.dtype == np.int64 and result.tolist() == [3, 4]


def test_a_weight_without_elements_is_a_model_error(compiler, tmp_path):
    """TVM would write an engine that it cannot load."""
    with pytest.raises(ModelError, match=r"'none' has shape \(4, 0\) and so no elements"):
        text = "g (float[4, 4] x) => (float[4, 4] y) { y = Concat <axis = 1> (x, none) }"
        built(text, tmp_path, [("none", np.zeros((4, 0), "f"))])


@pytest.mark.parametrize(
    "node",
    [
        "y = IsInf <detect_negative = 0> (x)",
        "y = IsInf <detect_positive = 0> (x)",
        "f = Identity(x) d = Dropout(x, ratio, training) y = IsInf(d)",
    ],
)
def test_parts_that_the_importer_ignores_are_a_model_error(compiler, tmp_path, node):
    weights = [("ratio", np.array(0.5, "f")), ("training", np.array(True))]
    with pytest.raises(ModelError, match=r"node '.*' \((IsInf|Dropout)\): TVM ignores (training_mode|detect_positive)"):
        built(f"g (float[4] x) => (bool[4] y) {{ {node} }}", tmp_path, weights)


def test_dims_that_begin_at_0_are_refused(installed):
    request = own_request(profiles=tuple(profiles(own_request().inputs, [Dim("batch", 0, 1, 4)])))
    assert re.search(r"dims\.batch\.min is 0, .*set it to 1, or use onnxruntime", TVM.refuses(request))
