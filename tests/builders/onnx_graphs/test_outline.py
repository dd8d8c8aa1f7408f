"""Outlines of graphs: what of a file is left out, and that the rest and the places of the weights are right."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.onnx_graphs.outline import lacks_lists, load_outline, load_without_lists, save_with_lists
from builders.onnx_graphs.weights import embed, is_external, to_array
from builders.reference import ReferenceSession
from enginesmith.core.errors import ModelError
from pipeline.sources.canonical import canonical
from pipeline.sources.onnx_model import load_onnx, save_onnx
from validation.limits.noise_floor import DoubleSession

WIDTH = 32


def graph(**more: np.ndarray) -> onnx.GraphProto:
    """x times w, and constants that nothing reads."""
    value = helper.make_tensor_value_info
    arrays = {"w": np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH), **more}
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    end_values = [[value(name, TensorProto.FLOAT, ["n", WIDTH])] for name in ("x", "y")]
    return helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "one", *end_values, weights)


def write(path, graph_model: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph_model, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return model


def test_large_weights_stay_in_the_file(tmp_path):
    indices, scale = np.arange(1000), np.zeros(4, np.float32)
    model = write(tmp_path / "graph.onnx", graph(indices=indices, scale=scale, b=np.ones(600, np.float16)))
    light_model = load_outline(tmp_path / "graph.onnx", 0)
    assert [item.name for item in light_model.graph.initializer if is_external(item)] == ["w", "b"]
    assert light_model.ByteSize() < model.ByteSize() - 4000
    for item, whole_tensor in zip(light_model.graph.initializer, model.graph.initializer, strict=True):
        assert np.array_equal(to_array(item), numpy_helper.to_array(whole_tensor))
        if is_external(item):
            embed(item)
    assert light_model == model
    assert load_outline(tmp_path / "graph.onnx") == model  # a small file is parsed as a whole


def test_weights_of_a_graph_in_two_pieces_keep_their_places(tmp_path):
    """Protobuf joins what stands in one file twice."""
    first_graph, second_graph = graph(), onnx.GraphProto()
    second_graph.initializer.append(numpy_helper.from_array(np.full(400, 7, np.float32), "late"))
    write(tmp_path / "graph.onnx", first_graph)
    with (tmp_path / "graph.onnx").open("ab") as file:
        file.write(onnx.ModelProto(graph=second_graph).SerializeToString())
    light_model = load_outline(tmp_path / "graph.onnx", 0)
    result = {item.name: to_array(item) for item in light_model.graph.initializer}
    assert result["w"][1, 0] == WIDTH and result["late"].tolist() == [7] * 400


@pytest.mark.parametrize("tail", [b"\x3b", b"\x3d\x12\x02ab", b"\x3a\x7f\x00"])
def test_an_invalid_model_file_gives_the_parsers_error(tmp_path, tail):
    """A group, the graph's number with four bytes for its value, and a graph longer than the file."""
    path = tmp_path / "graph.onnx"
    write(path, graph())
    path.write_bytes(path.read_bytes() + tail)

    def outcome(load):
        try:
            return load().graph.name
        except Exception as error:
            return type(error)

    assert outcome(lambda: load_outline(path, 0)) == outcome(lambda: onnx.load(path))


def test_weights_beside_the_graph_must_be_there(tmp_path):
    outline_graph = graph()
    model = write(tmp_path / "graph.onnx", outline_graph)
    onnx.save(model, tmp_path / "graph.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    with pytest.raises(ModelError, match="which is not a plain file beside the model"):
        load_outline(tmp_path / "graph.onnx", 0)


def test_a_graph_with_a_constant_part_runs_alike_from_its_outline(tmp_path, monkeypatch):
    """The reference takes what its constant part needs out of the file."""
    value = helper.make_tensor_value_info
    narrow, fixed_eye = np.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH).astype(np.int8), np.eye(WIDTH, dtype=np.float32)
    arrays = {"q": narrow, "s": np.float32(0.5), "z": np.int8(3), "w": fixed_eye}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    end_values = [[value(name, TensorProto.FLOAT, ["n", WIDTH])] for name in ("x", "y")]
    write(tmp_path / "graph.onnx", helper.make_graph(nodes, "two", *end_values, weights))
    x = {"x": np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)}
    with ReferenceSession(tmp_path / "graph.onnx") as session:
        expected = session.run(x)["y"]
    monkeypatch.setattr("builders.reference.load_outline", lambda path: load_outline(path, 0))
    with ReferenceSession(tmp_path / "graph.onnx") as session:
        assert np.array_equal(session.run(x)["y"], expected)


def write_trees(path, trees=3000) -> onnx.ModelProto:
    """Stumps, whose lists have three entries for each."""
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=np.repeat(np.arange(trees), 3),
        nodes_nodeids=np.tile([0, 1, 2], trees),
        nodes_featureids=np.tile([1, 0, 0], trees),
        nodes_values=np.tile([0.5, 0, 0], trees),
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * trees,
        nodes_truenodeids=np.tile([1, 0, 0], trees),
        nodes_falsenodeids=np.tile([2, 0, 0], trees),
        target_treeids=np.repeat(np.arange(trees), 2),
        target_nodeids=np.tile([1, 2], trees),
        target_ids=np.zeros(2 * trees, np.int64),
        target_weights=np.arange(2 * trees, dtype=np.float32),
    )
    value = helper.make_tensor_value_info
    end_values = [value("x", TensorProto.FLOAT, ["n", 4])], [value("y", TensorProto.FLOAT, ["n", 1])]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph([node], "trees", *end_values), opset_imports=opsets, ir_version=9)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return model


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("builders.onnx_graphs.outline._LONG_BYTES", 4 << 10)


@pytest.mark.usefixtures("short")
def test_long_lists_stay_in_the_file_and_are_written_again(tmp_path):
    model = write_trees(tmp_path / "trees.onnx")
    assert load_without_lists(tmp_path / "trees.onnx") == model, "a small file is parsed as a whole"
    light_model = load_without_lists(tmp_path / "trees.onnx", 0)
    assert lacks_lists(light_model) and not lacks_lists(model)
    assert light_model.ByteSize() < model.ByteSize() / 20
    assert load_outline(tmp_path / "trees.onnx", 0, lists=True) == light_model
    assert not lacks_lists(load_outline(tmp_path / "trees.onnx", 0))
    light_model.graph.node[0].input[0] = light_model.graph.input[0].name = "renamed"
    save_with_lists(light_model, tmp_path / "written.onnx")
    model.graph.node[0].input[0] = model.graph.input[0].name = "renamed"
    assert (tmp_path / "written.onnx").read_bytes() == model.SerializeToString(deterministic=True)


@pytest.mark.usefixtures("short")
def test_a_file_whose_lists_changed_meanwhile_is_refused(tmp_path):
    write_trees(tmp_path / "trees.onnx")
    light_model = load_without_lists(tmp_path / "trees.onnx", 0)
    write_trees(tmp_path / "trees.onnx", 2000)
    with pytest.raises(ModelError, match="was changed while it was read"):
        save_with_lists(light_model, tmp_path / "written.onnx")


@pytest.mark.usefixtures("short")
def test_the_canonical_form_and_its_file_equal_those_of_the_whole_model(tmp_path, monkeypatch):
    whole_trees = write_trees(tmp_path / "trees.onnx")
    monkeypatch.setattr(load_without_lists, "__defaults__", (0,))
    light_model = load_onnx(tmp_path / "trees.onnx", tmp_path)
    assert lacks_lists(light_model)
    save_onnx(canonical(light_model), tmp_path / "light.onnx")
    save_onnx(canonical(whole_trees), tmp_path / "whole.onnx")
    assert (tmp_path / "light.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    with pytest.raises(ValueError, match="tree ensemble of this size"):
        monkeypatch.setattr(load_outline, "__defaults__", (0, False))
        DoubleSession(tmp_path / "light.onnx")
