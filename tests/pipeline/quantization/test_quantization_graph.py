import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from enginesmith.core.errors import ModelError
from pipeline.quantization.graph import element_types, finish, opset_of, raise_opset, sort_nodes, tidy
from pipeline.quantization.insertion_points import activations, prepare_model
from tests.pipeline.quantization.small_nets import attention_net, build, constant, conv_net, maker


@given(st.permutations(range(len(attention_net().graph.node))))
def test_sorting_puts_every_node_behind_what_it_reads(order: list[int]) -> None:
    graph = attention_net().graph
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(nodes[i] for i in order)
    sort_nodes(graph)
    available_names = {value.name for value in (*graph.input, *graph.initializer)}
    for node in graph.node:
        assert set(node.input) <= available_names
        available_names |= set(node.output)


def test_a_sorted_graph_stays_unchanged() -> None:
    graph = attention_net().graph
    model_bytes_before = graph.SerializeToString()
    sort_nodes(graph)
    assert graph.SerializeToString() == model_bytes_before


def test_a_cycle_is_an_error() -> None:
    model = build("float[N] x", "float[N] y", "a = Add(x, x) y = Add(a, x)", {})
    model.graph.node[0].input[0] = "y"
    with pytest.raises(ModelError, match="cycle"):
        tidy(model)


def test_nodes_get_unique_names_and_keep_existing_ones() -> None:
    model = build("float[N] x", "float[N] y", "a = Relu(x) b = Relu(a) y = Relu(b)", {})
    model.graph.node[0].name = model.graph.node[1].name = "same"
    assert [node.name for node in tidy(model).graph.node] == ["same", "same_2", "Relu_y"]


def test_types_are_known_behind_unknown_operators() -> None:
    text = "e, mask = com.microsoft.EmbedLayerNormalization(i, , w, w, , g, g) a, b = Split(e) y = Add(a, b)"
    weights = {"w": np.ones((8, 4), "f4"), "g": np.ones(4, "f4")}
    model = build("int32[N,4] i", "float[N,4,2] y", text, weights)
    model.opset_import.add(domain="com.microsoft", version=1)
    types = element_types(tidy(model))
    assert {name: types[name] for name in ("e", "mask", "a", "b")} == {"e": 1, "mask": 6, "a": 1, "b": 1}
    omitting = build("float[5,2,3] x", "float[1,2,4] y", ", y = RNN <hidden_size = 4> (x, w, r)", {"w": 0.0, "r": 0.0})
    assert "" not in element_types(tidy(omitting))
    body = "(int64 i, bool c, int64[1] k) => (bool d, int64[1] l, g) {d = Identity(c) l = Identity(k) g = my.Op(x)}"
    loop = build("float[2] x", "float[3,2] y", f"k, s = Loop <body = b {body}> (n, , n) y = Identity(s)", {"n": [3]})
    assert "s" not in element_types(tidy(loop))


def test_constant_nodes_become_initializers() -> None:
    text = """
        k = Constant<value = float[2] {1.0, 2.0}>()
        f = Constant<value_float = 3.0>()
        i = Constant<value_ints = [4, 5]>()
        a = Mul(x, k) b = Mul(a, f) r = Reshape(b, i) y = Identity(r)
    """
    result = tidy(build("float[10,2] x", "float[4,5] y", text, {}))
    assert [node.op_type for node in result.graph.node] == ["Mul", "Mul", "Reshape", "Identity"]
    assert constant(result, "f").shape == () and constant(result, "f").dtype == np.float32
    assert constant(result, "i").tolist() == [4, 5] and constant(result, "i").dtype == np.int64
    assert constant(result, "k").tolist() == [1.0, 2.0]


def test_initializers_are_not_inputs() -> None:
    model = conv_net()
    model.graph.input.append(helper.make_tensor_value_info("w1", TensorProto.FLOAT, [8, 1, 3, 3]))
    assert [value.name for value in tidy(model).graph.input] == ["image"]


def test_a_transposed_constant_counts_as_a_weight() -> None:
    model = build(
        "float[N,3] x", "float[N,2] y", "t = Transpose(w) i = Identity(t) y = MatMul(x, i)", {"w": np.ones((2, 3))}
    )
    result = prepare_model(model)
    assert [node.op_type for node in result.graph.node] == ["MatMul"] and constant(result, "i").shape == (3, 2)


def test_finish_refuses_an_invalid_graph() -> None:
    model = conv_net()
    maker(model, "r1").op_type = "Reluu"
    with pytest.raises(ModelError, match="not valid ONNX"):
        finish(model)


def test_finish_drops_unread_constants() -> None:
    model = build("float[N] x", "float[N] y", "y = Relu(x)", {"unread": np.ones(3)})
    assert not finish(model).graph.initializer


def test_opset_is_only_raised() -> None:
    assert opset_of(raise_opset(conv_net(13), 19)) == 19 and opset_of(raise_opset(conv_net(21), 19)) == 21
    with pytest.raises(ModelError, match="no default operator set"):
        opset_of(onnx.ModelProto())


def test_activations_are_the_float_tensors_that_are_no_constants() -> None:
    model = build("float[N] x, int64[N] i", "float[N] y", "g = Gather(w, i) y = Add(g, x)", {"w": np.ones(4)})
    assert activations(model) == ("g", "x", "y")
