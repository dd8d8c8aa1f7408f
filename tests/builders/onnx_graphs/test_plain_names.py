import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builders.backends.onnxruntime import OrtSession
from builders.onnx_graphs.bodies import plain
from enginesmith.core.errors import ModelError
from tests.builders import graphs

ODD = ("seq-len", "a/b c", "ü.'\"", "x" * 300, "0", "v1", "n0")


def odd(path):
    """in -> Add(in, w) -> If(cond) of two branches that read an outer value -> out; every name is an odd one."""
    arguments, weight, total, cond, out_name, first_name, second_name = ODD
    branches = [
        helper.make_graph([helper.make_node(op, [total], [out_name], name="n0")], op, [], [vi(out_name)])
        for op in ("Neg", "Identity")
    ]
    nodes = [
        helper.make_node("Add", [arguments, weight], [total], name=first_name),
        helper.make_node("If", [cond], [second_name], name=arguments, then_branch=branches[0], else_branch=branches[1]),
    ]
    inputs = [(arguments, TensorProto.FLOAT, ("n-1", 2)), (cond, TensorProto.BOOL, ())]
    return graphs.save(path, nodes, inputs, [(second_name, TensorProto.FLOAT, ("n-1", 2))], [(weight, np.ones(2, "f"))])


def vi(name):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def all_names(graph):
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from (node.name, *filter(None, (*node.input, *node.output)))
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_names(attribute.g)


def test_every_name_becomes_plain_and_the_model_computes_the_same(tmp_path):
    path = odd(tmp_path / "odd.onnx")
    copy, names = plain(path)
    actual = set(all_names(copy.graph))
    assert all(name[0] in "vn" and name[1:].isdecimal() for name in actual), actual
    assert copy.graph.name == "main" and copy.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "d0"
    onnx.save(copy, tmp_path / "plain.onnx")
    x = np.array([[1, -2]], "f")
    with OrtSession(path) as own_session, OrtSession(tmp_path / "plain.onnx") as session:
        for cond in (True, False):
            expected = own_session.run({ODD[0]: x, ODD[3]: np.array(cond)})[ODD[6]]
            outputs = session.run(dict(zip([spec.name for spec in session.inputs], (x, np.array(cond)), strict=True)))
            np.testing.assert_array_equal(next(iter(outputs.values())), expected)
    assert names.restore("n0 of v0 over d0, not nv0") == "node 'v1' (Add) of 'seq-len' over 'n-1', not nv0"


def test_equal_models_give_equal_copies_whatever_their_names(tmp_path):
    first_model, second_model = (onnx.load(graphs.mlp(tmp_path / f"{seed}.onnx")) for seed in "ab")
    for node in second_model.graph.node:
        node.name, node.doc_string = f"other/{node.name}", "said elsewhere"
    second_model.producer_name, second_model.graph.doc_string = "somebody", "said elsewhere"
    onnx.save(second_model, tmp_path / "b.onnx")
    copies = [plain(tmp_path / f"{name}.onnx")[0].SerializeToString(deterministic=True) for name in "ab"]
    assert copies[0] == copies[1] and first_model.graph.node[0].name != second_model.graph.node[0].name


def test_an_omitted_input_stays_omitted_and_external_data_is_embedded(tmp_path):
    node = helper.make_node("Clip", ["x", "", "most"], ["y"], name="clip")
    value = ("x", TensorProto.FLOAT, ("n",)), ("y", TensorProto.FLOAT, ("n",))
    model = onnx.load(graphs.save(tmp_path / "m.onnx", [node], value[:1], value[1:], [("most", np.array(1, "f"))]))
    place = tmp_path / "external"
    place.mkdir()
    onnx.save(model, place / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    copy, _ = plain(place / "m.onnx")
    assert list(copy.graph.node[0].input) == ["v0", "", "v2"]
    assert copy.graph.initializer[0].raw_data == np.array(1, "f").tobytes()


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_invalid_models_are_refused(tmp_path, content):
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx is not a valid ONNX model"):
        plain(tmp_path / "m.onnx")


OLD = """
    <ir_version: 7, opset_import: ["": 11]>
    g (float[n, 3] x, bool c) => (float[n, 1, 3] y) {
        u = Unsqueeze <axes = [1]> (x)
        y = If (c) <then_branch = a () => (float[n, 1, 3] p) { p = Neg (u) },
                    else_branch = b () => (float[n, 1, 3] q) { q = Abs (u) }>
    }
"""


@pytest.mark.parametrize(("text", "opset"), [(OLD.partition("y = If")[0] + "y = Neg (u) }", 17), (OLD, 11)])
def test_an_old_opset_is_lifted_unless_a_node_has_a_graph_inside(tmp_path, text, opset):
    text = text if opset == 11 else text.replace(", bool c", "")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    copy, _ = plain(tmp_path / "model.onnx")
    assert copy.opset_import[0].version == opset
    onnx.checker.check_model(copy, full_check=True)
