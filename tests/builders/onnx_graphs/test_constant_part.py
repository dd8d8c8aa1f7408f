from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builders import reference
from builders.backends.onnxruntime.session import OrtSession
from builders.onnx_graphs.structure import cut_constant_part, cut_varying_part
from builders.reference import ReferenceSession
from tests.builders.graphs import save

FLOAT = TensorProto.FLOAT


@pytest.fixture
def graph(tmp_path):
    """x -> two products, each with a quantized weight; the second is quantized in the graph, cast to fp16 and back."""
    rng = np.random.default_rng(0)
    node = helper.make_node
    nodes = [
        node("DequantizeLinear", ["w1", "scale"], ["w1f"]),
        node("QuantizeLinear", ["w2", "scale"], ["w2q"]),
        node("DequantizeLinear", ["w2q", "scale"], ["w2f"]),
        node("Cast", ["w2f"], ["w2h"], to=TensorProto.FLOAT16),
        node("Cast", ["w2h"], ["w2r"], to=FLOAT),
        node("MatMul", ["x", "w1f"], ["a"]),
        node("MatMul", ["a", "w2r"], ["b"]),
        node("Cast", ["sizes"], ["sizes_f"], to=FLOAT),
        node("Mul", ["b", "sizes_f"], ["y"]),
    ]
    weights = [
        ("w1", rng.integers(-127, 127, (300, 64), np.int8)),
        ("w2", rng.standard_normal((64, 32)).astype("f")),
        ("scale", np.float32(0.02)),
        ("sizes", np.arange(32)),
    ]
    return save(tmp_path / "graph.onnx", nodes, [("x", FLOAT, ["n", 300])], [("y", FLOAT, ["n", 32])], weights)


def test_only_float_weights_are_cut_out(graph):
    part = cut_constant_part(onnx.load(graph))
    assert [value.name for value in part.graph.output] == ["w1f", "w2r"]
    assert [node.output[0] for node in part.graph.node] == ["w1f", "w2q", "w2f", "w2h", "w2r"]


def test_the_rest_of_the_graph_reads_weights_as_inputs(graph):
    entries = {"w1f": np.zeros((300, 64), "f"), "w2r": np.zeros((64, 32), "f")}
    varying_graph = cut_varying_part(onnx.load(graph), entries).graph
    assert [node.op_type for node in varying_graph.node] == ["MatMul", "MatMul", "Cast", "Mul"]
    assert [value.name for value in varying_graph.input] == ["x", "w1f", "w2r"]
    assert [item.name for item in varying_graph.initializer] == ["sizes"]


@pytest.fixture
def exact(monkeypatch):
    """A CPU whose sums do not saturate, whatever this one is: graphs of such a kind are opened as they are."""
    kind = reference.this_kind()
    monkeypatch.setattr(reference, "this_kind", lambda: replace(kind, saturates=False))


@pytest.mark.usefixtures("exact")
def test_the_outputs_keep_their_bits_and_the_session_its_inputs(graph):
    inputs = {"x": np.random.default_rng(1).standard_normal((5, 300)).astype("f")}
    with ReferenceSession(graph) as cut_session, OrtSession(graph, optimized=False) as whole_session:
        assert isinstance(cut_session._session, reference._VaryingPart)
        assert cut_session.inputs == whole_session.inputs
        assert cut_session.run(inputs)["y"].tobytes() == whole_session.run(inputs)["y"].tobytes()


@pytest.mark.usefixtures("exact")
def test_weights_in_another_file_are_found(graph, tmp_path):
    onnx.save(
        onnx.load(graph), tmp_path / "apart.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )
    inputs = {"x": np.ones((1, 300), "f")}
    with ReferenceSession(tmp_path / "apart.onnx") as separate_session, ReferenceSession(graph) as whole_session:
        assert isinstance(separate_session._session, reference._VaryingPart)
        assert separate_session.run(inputs)["y"].tobytes() == whole_session.run(inputs)["y"].tobytes()


def test_a_tensor_that_is_an_output_is_computed_in_the_graph(graph):
    model = onnx.load(graph)
    model.graph.output.append(helper.make_tensor_value_info("w1f", FLOAT, [300, 64]))
    assert [value.name for value in cut_constant_part(model).graph.output] == ["w2r"]


def test_a_graph_without_such_weights_is_opened_whole(tmp_path):
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = [("w", np.ones((3, 2), "f"))]
    path = save(tmp_path / "plain.onnx", [node], [("x", FLOAT, [1, 3])], [("y", FLOAT, [1, 2])], weights)
    assert cut_constant_part(onnx.load(path)) is None
    with ReferenceSession(path) as session:
        assert not isinstance(session._session, reference._VaryingPart)


def test_a_cpu_whose_sums_saturate_opens_the_whole_graph(graph, monkeypatch):
    kind = reference.this_kind()
    monkeypatch.setattr(reference, "this_kind", lambda: replace(kind, saturates=True))
    with ReferenceSession(graph) as session:
        assert not isinstance(session._session, reference._VaryingPart)
