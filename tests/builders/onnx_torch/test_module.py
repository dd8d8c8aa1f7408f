import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from builders.backends.onnxruntime import OrtSession
from builders.onnx_ops.torch_arrays import to_array, to_tensor
from enginesmith.core.errors import ModelError
from tests.builders import graphs
from tests.builders.onnx_torch import to_module

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def assert_as_onnxruntime(path, inputs, atol=1e-6):
    """The module and the unoptimized graph give the same, in type and shape too."""
    expected = OrtSession(path, optimized=False).run(inputs)
    actual = to_module(path)(*(to_tensor(array) for array in inputs.values()))
    for tensor, (name, array) in zip(actual, expected.items(), strict=True):
        actual_array = to_array(tensor)
        assert actual_array.dtype == array.dtype and actual_array.shape == array.shape, name
        np.testing.assert_allclose(actual_array.astype("f8"), array.astype("f8"), atol=atol, rtol=1e-6, err_msg=name)


def image(rows=5, columns=8):
    return {"image": np.random.default_rng(3).standard_normal((rows, columns)).astype("f")}


@pytest.mark.parametrize(
    ("make", "columns", "atol"),
    [
        (lambda path: graphs.mlp(path), 8, 1e-5),
        (lambda path: graphs.mlp(path, "float16"), 8, 0.02),
        (lambda path: graphs.int8_mlp(path, "float32"), 8, 1e-4),
        (lambda path: graphs.int8_mlp(path, "float16"), 8, 0.5),
    ],
    ids=["fp32", "fp16", "int8", "int8 over fp16"],
)
def test_graphs_of_each_precision_give_the_results_of_onnxruntime(tmp_path, make, columns, atol):
    assert_as_onnxruntime(make(tmp_path / "model.onnx"), image(5, columns), atol)


@pytest.mark.parametrize(("make", "columns"), [(graphs.fp8_mlp, 8), (graphs.int4_mlp, 64)], ids=["fp8", "int4"])
def test_narrow_types_give_the_results_of_onnxs_evaluator(tmp_path, make, columns):
    path = make(tmp_path / "model.onnx")
    expected = ReferenceEvaluator(str(path)).run(None, image(5, columns))[0]
    (actual,) = to_module(path)(to_tensor(image(5, columns)["image"]))
    np.testing.assert_allclose(to_array(actual), expected, atol=0.5, rtol=2e-3)  # fp16 sums of up to 64 in other orders


def test_a_4_bit_quantization_saturates_at_4_bits(tmp_path):
    zero = numpy_helper.from_array(np.array(1, dtype="int8"), "unused")
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[4] x) => (float[4] y) <float s = {1.0}>
        { q = QuantizeLinear <output_dtype: int = 22> (x, s)  y = DequantizeLinear (q, s) }
    """)
    model.graph.initializer.append(zero)
    onnx.save(model, tmp_path / "model.onnx")
    (actual,) = to_module(tmp_path / "model.onnx")(torch.tensor([-100.0, 100.0, 0.5, 1.5]))
    assert actual.tolist() == [-8.0, 7.0, 0.0, 2.0]


def test_external_data_shared_weights_and_odd_names(tmp_path):
    weight = np.arange(9, dtype="f").reshape(3, 3)
    texts = ["w/1 'quoted'", "w.1", "w_1", "wé" * 40]
    nodes = [helper.make_node("MatMul", ["x", texts[0]], ["a"], name="ä/b c")]
    nodes += [helper.make_node("MatMul", ["a", texts[1]], ["b"]), helper.make_node("Add", ["b", texts[2]], ["c"])]
    nodes += [helper.make_node("Sub", ["c", texts[3]], ["d"]), helper.make_node("MatMul", ["d", texts[0]], ["class"])]
    path = graphs.save(
        tmp_path / "plain.onnx",
        nodes,
        [("x", FLOAT, ("n", 3))],
        [("class", FLOAT, ("n", 3))],
        [(name, weight + index) for index, name in enumerate(texts)],
    )
    model = onnx.load(path)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="data.bin", size_threshold=0)
    module = to_module(tmp_path / "model.onnx")
    assert len(list(module.parameters())) == 4 and not any(p.requires_grad for p in module.parameters())
    assert_as_onnxruntime(tmp_path / "model.onnx", {"x": np.eye(3, dtype="f")})


def test_outputs_may_be_inputs_constants_or_numbers(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[n, 3] x, bool[1] unused) => (float[n, 3] x, float[2] k, int64[2] s, int64 count, float[n, 3] twice)
        <float[2] k = {1.0, 2.0}> { s = Shape (x)  count = Size (x)  twice = Add (x, x) }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    x, k, s, count, twice = to_module(tmp_path / "model.onnx")(torch.ones(4, 3), torch.tensor([True]))
    assert (k.tolist(), s.tolist(), count.item(), twice.sum().item()) == ([1, 2], [4, 3], 12, 24)
    assert s.dtype == torch.int64 and x.shape == (4, 3)


def branched(path, condition=None):
    """x -> If(condition) then x + w (a name from around it) else -x -> y; without a condition, sum(x) > 0."""
    inner_texts = [
        ("then_branch", helper.make_node("Add", ["x", "w"], ["r"])),
        ("else_branch", helper.make_node("Neg", ["x"], ["r"])),
    ]
    bodies = {
        name: helper.make_graph([node], name, [], [helper.make_tensor_value_info("r", FLOAT, ("n", 3))])
        for name, node in inner_texts
    }
    nodes = (
        []
        if condition is not None
        else [
            helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            helper.make_node("Greater", ["sum", "zero"], ["c"]),
        ]
    )
    weights = [("w", np.arange(3, dtype="f")), ("zero", np.array(0, dtype="f"))]
    weights += [] if condition is None else [("c", np.array(condition))]
    nodes.append(helper.make_node("If", ["c"], ["y"], name="choice", **bodies))
    return graphs.save(path, nodes, [("x", FLOAT, ("n", 3))], [("y", FLOAT, ("n", 3))], weights)


@pytest.mark.parametrize("condition", [True, False, None])
def test_branches_may_be_constant_or_data_dependent(tmp_path, condition):
    path = branched(tmp_path / "model.onnx", condition)
    for sign in (1, -1):
        assert_as_onnxruntime(path, {"x": np.full((2, 3), sign, "f")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda node: node.__setattr__("op_type", "NonMaxSuppression"),
            r"node 'block/the_node' \(NonMaxSuppression\).*use the backend",
        ),
        (
            lambda node: node.__setattr__("domain", "com.microsoft"),
            r"node 'block/the_node' \(com.microsoft.Relu\).*does not know",
        ),
        (lambda node: node.attribute.append(helper.make_attribute("slope", 1)), "'block/the_node'.*attribute 'slope'"),
        (lambda node: node.input.append("x"), "'block/the_node'.*2 inputs"),
    ],
)
def test_unknown_operators_are_refused_by_name(tmp_path, change, words):
    path = graphs.one_node(tmp_path / "model.onnx", "Relu")
    model = onnx.load(path)
    change(model.graph.node[0])
    onnx.save(model, path)
    with pytest.raises(ModelError, match=words):
        to_module(path)


@pytest.mark.parametrize("opset", [0, 99])
def test_unread_opsets_are_refused(tmp_path, opset):
    path = graphs.one_node(tmp_path / "model.onnx", "Relu")
    model = onnx.load(path)
    model.opset_import[0].version = opset
    onnx.save(model, path)
    with pytest.raises(ModelError, match=f"opset {opset} is not in 1"):
        to_module(path)


def test_types_without_operators_are_refused(tmp_path):
    path = graphs.one_node(tmp_path / "model.onnx", "Identity", TensorProto.UINT16)
    with pytest.raises(ModelError, match="input 'x': it is UINT16"):
        to_module(path)


def test_a_refusal_by_torch_names_the_node(tmp_path):
    module = to_module(graphs.mlp(tmp_path / "model.onnx"))
    with pytest.raises(ModelError, match=r"node 'first' \(MatMul\): torch cannot run it"):
        module(torch.ones(2, 5))


def test_garbage_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model.onnx cannot be read"):
        to_module(path)


def test_another_number_of_inputs_is_refused(tmp_path):
    with pytest.raises(ModelError, match="takes 1 inputs, not 2"):
        to_module(graphs.mlp(tmp_path / "model.onnx"))(torch.ones(1, 8), torch.ones(1))
