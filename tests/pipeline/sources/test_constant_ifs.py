from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.backends.onnxruntime import OrtSession
from builders.onnx_graphs.bodies import walk_nodes
from pipeline.sources.canonical import canonical

FLOAT = TensorProto.FLOAT


def value(name: str, shape: list[int | str] | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def branch(name: str, op_type: str, weight: float) -> onnx.GraphProto:
    """y = x * weight, behind one more node, with a constant and names that the other branch has too."""
    nodes = [
        helper.make_node("Mul", ["x", "k"], ["t"], "inner"),
        helper.make_node(op_type, ["t"], [f"{name}_y"], "last"),
    ]
    constant = numpy_helper.from_array(np.float32(weight), "k")
    return helper.make_graph(nodes, name, [], [value(f"{name}_y", None)], [constant])


def model_of(condition: list[onnx.NodeProto], shape: list[int | str], constants: dict[str, object]) -> onnx.ModelProto:
    branches = {"then_branch": branch("a", "Relu", 2.0), "else_branch": branch("b", "Neg", 3.0)}
    nodes = [*condition, helper.make_node("If", ["c"], ["m"], "if", **branches), helper.make_node("Abs", ["m"], ["y"])]
    items = [numpy_helper.from_array(np.asarray(item), name) for name, item in constants.items()]
    graph = helper.make_graph(nodes, "g", [value("x", shape)], [value("y", ["n", 3])], items)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def ask_dim(axis: int) -> tuple[list[onnx.NodeProto], dict[str, object]]:
    """c: whether a dim of x is 3."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "axis"], ["d"]),
        helper.make_node("Equal", ["d", "three"], ["c"]),
    ]
    return nodes, {"axis": np.array([axis]), "three": np.array([3])}


def ask_rank() -> tuple[list[onnx.NodeProto], dict[str, object]]:
    """c: whether x has not two axes."""
    chain = [("Shape", ["x"]), ("Size", ["o0"]), ("Equal", ["o1", "two"]), ("Not", ["o2"])]
    nodes = [helper.make_node(kind, reads, [f"o{index}"]) for index, (kind, reads) in enumerate(chain)]
    nodes[-1].output[0] = "c"
    return nodes, {"two": np.array(2)}


def ask_zeros() -> tuple[list[onnx.NodeProto], dict[str, object]]:
    """c: whether what ConstantOfShape makes without a value is 0."""
    nodes = [helper.make_node("ConstantOfShape", ["one"], ["z"]), helper.make_node("Equal", ["z", "zero"], ["c"])]
    return nodes, {"one": np.array([1]), "zero": np.zeros(1, np.float32)}


def count_ifs(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "If" for node in walk_nodes(model.graph))


def answer(model: onnx.ModelProto, folder: Path) -> np.ndarray:
    onnx.save(model, folder / "m.onnx")
    x = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    return OrtSession(folder / "m.onnx", optimized=False).run({"x": x})["y"]


CASES = {
    "a constant": ([], {"c": np.array(False)}, "Neg"),
    "a dim": (*ask_dim(1), "Relu"),
    "a rank": (*ask_rank(), "Neg"),
    "zeros of a shape": (*ask_zeros(), "Relu"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_taken_branch_replaces_the_if(case: str, tmp_path) -> None:
    condition, constants, taken_action = CASES[case]
    model = model_of(condition, ["n", 3], constants)
    result = canonical(model)
    assert [node.op_type for node in result.graph.node] == ["Mul", taken_action, "Abs"]
    assert [item.name for item in result.graph.output] == ["y"] and canonical(result) == result
    np.testing.assert_array_equal(answer(model, tmp_path), answer(result, tmp_path))


def test_data_dependent_ifs_stay() -> None:
    nodes, constants = ask_dim(0)
    assert count_ifs(canonical(model_of(nodes, ["n", 3], constants))) == 1, "the dim is not known"
    assert count_ifs(canonical(model_of(nodes, [3, 3], constants))) == 0
    asked = [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0), helper.make_node("Greater", ["s", "zero"], ["c"])]
    assert count_ifs(canonical(model_of(asked, [3, 3], {"zero": np.float32(0)}))) == 1


def test_a_branchs_wrong_output_shape_is_corrected() -> None:
    """As Paddle's exporter writes for SLANet."""
    model = model_of([helper.make_node("Greater", ["first", "k"], ["c"])], ["n", 3], {"k": np.float32(1)})
    model.graph.input.append(value("first", []))
    for item in model.graph.node[1].attribute:
        item.g.output[0].CopyFrom(value(item.g.output[0].name, []))
    assert count_ifs(canonical(model)) == 1


def test_a_branch_of_captured_values_or_constants_is_copied() -> None:
    model = model_of([], ["n", 3], {"c": np.array(True)})
    body = next(item.g for item in model.graph.node[0].attribute if item.name == "then_branch")
    del body.node[:]
    body.node.append(helper.make_node("Identity", ["x"], ["a_y"]))
    model.graph.output[0].name = "m"
    del model.graph.node[1]
    result = canonical(model)
    assert count_ifs(result) == 0 and [item.name for item in result.graph.output] == ["m"]


PADS = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 3] y)
    <int64[2] last = {0, 1}, int64[1] axis = {0}, int64 two = {2}, int64[2] rows = {-1, 2}, int64[1] flat = {-1},
     int64[1] back = {-1}, int64[1] least = {-9223372036854775807}, int64[1] ends = {-1}, int64[1] width = {7},
     int64 one = {1}> {
        s = Shape (x)  rank = Size (s)  twice = Mul (rank, two)  more = Sub (twice, two)
        count = Unsqueeze (more, axis)  zeros = ConstantOfShape <value = int64[1] {0}> (count)
        pads = Concat <axis = 0> (last, zeros)  pairs = Reshape (pads, rows)
        turned = Slice (pairs, back, least, axis, ends)  columns = Transpose (turned)  given = Reshape (columns, flat)
        wide = Pad (x, given)  ws = Shape (wide)  w = Gather (ws, one)  wanted = Squeeze (width)  c = Equal (w, wanted)
        m = If (c) <then_branch = a () => (float[n, 3] a_y) { a_y = Relu (x) },
                    else_branch = b () => (float[n, 3] b_y) { b_y = Neg (x) }>
        y = Abs (m)
    }
"""


@pytest.mark.parametrize(("width", "expected"), [("4", "Relu"), ("7", "Neg")])
def test_pads_computed_from_a_rank_determine_the_size(tmp_path, width: str, expected: str) -> None:
    """As PyTorch's exporter writes a pad: of 2 axes [[0, 1], [0, 0]], its rows turned and read by columns."""
    model = onnx.parser.parse_model(PADS.replace("width = {7}", f"width = {{{width}}}"))
    result = canonical(model)
    assert count_ifs(result) == 0 and [node.op_type for node in result.graph.node] == [expected, "Abs"]
    np.testing.assert_array_equal(answer(model, tmp_path), answer(result, tmp_path))
