"""Which files' int8 sums can saturate without VNNI, and how they are rewritten so that none does."""

from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from builders.backends.onnxruntime.saturation import exact_source, file_may_saturate, make_exact
from builders.backends.optional_methods import get_scheme
from builders.onnx_graphs.bodies import list_shards, walk_graphs
from builders.onnx_graphs.outline import save_graph
from enginesmith.core.hardware.cpu_kinds import KINDS, kind_named, this_kind
from enginesmith.core.requirements import WideSums
from enginesmith.core.types import Target
from tests.builders import graphs

U8, S8, S32 = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32


def product(path: Path, *weights: tuple[str, np.ndarray], as_input: bool = False, zero: str = "") -> Path:
    """u times the int8 tensor 'w': one of `weights`, or an input (made)."""
    items = [("u", U8, ["n", 4]), *([("w", S8, [4, 2])] if as_input else [])]
    node = helper.make_node("MatMulInteger", ["u", "w", "", zero] if zero else ["u", "w"], ["y"], name="y")
    return graphs.save(path, [node], items, [("y", S32, ["n", 2])], weights)


def full(value: int, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.int8)


@pytest.mark.parametrize(("value", "saturates"), [(0, False), (64, False), (65, True), (-64, False), (-65, True)])
def test_a_weight_beyond_64_may_saturate(tmp_path, value, saturates):
    """One such value is enough, wherever it is stored."""
    weight = full(3, 4, 2)
    weight[2, 1] = value
    path = product(tmp_path / "m.onnx", ("w", weight))
    assert file_may_saturate(path) == saturates
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert (tmp_path / "m.bin").exists() and file_may_saturate(path) == saturates


def test_weights_outside_integer_sums_saturate_nothing(tmp_path):
    other_texts = [("zero", full(-128, 1)), ("scalar", np.array(100, np.int8)), ("bias", np.full(2, 1000, np.int32))]
    other_texts += [("u8", np.full((4, 2), 255, np.uint8)), ("empty", full(0, 0)), ("table", full(100, 8, 4))]
    assert not file_may_saturate(product(tmp_path / "m.onnx", ("w", full(64, 4, 2)), *other_texts, zero="zero"))
    assert not file_may_saturate(graphs.mlp(tmp_path / "float.onnx"))


def test_a_factor_computed_at_run_time_may_saturate(tmp_path):
    assert file_may_saturate(product(tmp_path / "given.onnx", as_input=True))


@pytest.mark.parametrize(("activation", "changed"), [(np.uint8, 1), (np.int8, 0), (None, 0)])
def test_a_dequantized_weight_counts_where_it_may_be_fused(activation, changed):
    """A file that was saved without optimization is optimized by whoever opens it."""
    text = """
        <ir_version: 9, opset_import: ["": 20]> g (float[n, 64] x) => (float[n, 64] y) {
            q = QuantizeLinear(x, s, zx)
            d = DequantizeLinear(q, s, zx)
            wd = DequantizeLinear<axis=1>(w, sw)
            y = MatMul(ACTIVATION, wd)
        }
    """
    model = onnx.parser.parse_model(text.replace("ACTIVATION", "x" if activation is None else "d"))
    kind = activation or np.uint8
    parts = {"w": RANDOM, "s": np.array(0.01, "f"), "zx": np.array(0, kind), "sw": np.full(64, 0.01, "f")}
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in parts.items())
    x = {"x": np.random.default_rng(0).uniform(0, 1, (3, 64)).astype("f")}
    expected = onnx.reference.ReferenceEvaluator(model).run(None, x)[0]
    assert make_exact(model) == changed
    assert np.allclose(onnx.reference.ReferenceEvaluator(model).run(None, x)[0], expected, atol=1e-5)


def test_a_weight_within_a_nodes_graph_counts(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(SHARED["two branches alone"], path)
    assert file_may_saturate(path)


def test_unreadable_files_are_left_to_onnxruntime(tmp_path):
    (path := tmp_path / "m.onnx").write_bytes(b"\xff\xff")
    assert exact_source(path) == str(path)


def test_a_reference_is_rewritten_only_if_it_may_saturate(tmp_path):
    sources = [exact_source(product(tmp_path / "m.onnx", ("w", full(value, 4, 2)))) for value in (64, 65)]
    assert [isinstance(source, bytes) for source in sources] == [False, True]


@pytest.mark.parametrize(
    ("target", "value"), [(kind, value) for kind in ("avx2", "amx", "arm64") for value in (64, 65)]
)
def test_an_engine_is_exact_on_its_kind_of_cpu_or_states_its_requirement(tmp_path, target, value):
    """Exact is: no uint8 x int8 product of its file goes beyond 64."""
    model = product(tmp_path / "m.onnx", ("w", full(value, 4, 2)))
    engine = OnnxRuntime().build(graphs.request(kind_named(target).name, backend="onnxruntime"), model, tmp_path)
    assert file_may_saturate(engine.path) == (value == 65 and target != "avx2") == (WideSums() in engine.requires)
    assert [note for note in engine.notes if "as uint8" in note] == [
        "1 product takes an int8 factor beyond -64..64, or made at run time, as uint8: exact without VNNI in any "
        "session, but slower"
    ][: value == 65 and target == "avx2"]


def test_the_option_for_7_bit_weights_is_part_of_the_build_key():
    tools = [discovery.configure("onnxruntime", {"reduced_range": how}) for how in ("where-needed", "always", "never")]
    levels = {kind.name: [get_scheme(tool, Target(kind.name)).weight_levels for tool in tools] for kind in KINDS}
    assert levels == {kind.name: [64 if kind.saturates else 127, 64, 127] for kind in KINDS}
    assert get_scheme(tools[0], Target("cpu")) == get_scheme(tools[0], Target(this_kind().name))
    assert len({graphs.request("cpu", options=discovery.options_of(tool)).key for tool in tools}) == 3


RANDOM = np.random.default_rng(0).integers(-127, 128, (64, 64)).astype(np.int8)
RANDOM.flags.writeable = False
U64 = {"u": np.random.default_rng(1).integers(128, 256, (3, 64)).astype(np.uint8)}


def shared(*nodes: onnx.NodeProto, outputs: str, **weights: np.ndarray) -> onnx.ModelProto:
    """Nodes over u [n, 64] uint8 and the int8 weight w [64, 64]."""
    end_value_infos = [helper.make_tensor_value_info(name, S32, ["a", "b"]) for name in outputs.split()]
    items = [numpy_helper.from_array(values, name) for name, values in ({"w": RANDOM} | weights).items()]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("u", U8, ["n", 64])], end_value_infos, items)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def node(op: str, inputs: str, output: str, **more: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=output, **more)


def body(name: str, *nodes: onnx.NodeProto, **weights: np.ndarray) -> onnx.GraphProto:
    items = [numpy_helper.from_array(values, key) for key, values in weights.items()]
    return helper.make_graph(
        nodes, name, [], [helper.make_tensor_value_info(nodes[-1].output[0], S32, ["a", "b"])], items
    )


SHARED = {
    "two nodes": shared(
        node("MatMulInteger", "u w", "y"), node("MatMulInteger", "u w zero_u zero_w", "z"),
        outputs="y z", zero_u=np.array(3, np.uint8), zero_w=np.array(-5, np.int8),
    ),
    "a node that multiplies and one that does not": shared(
        node("MatMulInteger", "u w", "y"), node("Cast", "w", "z", to=S32), outputs="y z"
    ),
    "its transpose, made at run time": shared(
        node("MatMulInteger", "u w", "y"), node("Transpose", "w", "t", perm=[1, 0]), node("MatMulInteger", "u t", "z"),
        outputs="y z",
    ),
    "the main graph and both branches": shared(
        node("MatMulInteger", "u w", "y"),
        node("If", "yes", "z", then_branch=body("a", node("MatMulInteger", "u w", "p"), node("Neg", "p", "q")),
             else_branch=body("b", node("MatMulInteger", "u v", "r"), v=RANDOM)),
        outputs="y z", yes=np.array(True),
    ),
    "two branches alone": shared(
        node("If", "yes", "y", then_branch=body("a", node("MatMulInteger", "u w", "p")),
             else_branch=body("b", node("MatMulInteger", "u w", "p2"))),
        node("If", "no", "z", then_branch=body("c", node("MatMulInteger", "u v", "p3"), v=RANDOM),
             else_branch=body("d", node("MatMulInteger", "u v", "p4"), v=RANDOM[::-1])),
        outputs="y z", yes=np.array(True), no=np.array(False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED)
def test_a_weight_with_several_readers_is_rewritten_once(tmp_path, what):
    model = SHARED[what]
    expected = reference(model)
    changed_model = onnx.ModelProto()
    changed_model.CopyFrom(model)
    assert make_exact(changed_model) >= 1 and make_exact(changed_model) == 0
    onnx.checker.check_model(changed_model)
    for result, expected_result in zip(reference(changed_model), expected, strict=True):
        assert np.array_equal(result, expected_result)
    names = [item.name for graph in walk_graphs(changed_model.graph) for item in graph.initializer]
    assert len(names) == len(set(names))
    assert sum(name.startswith("w as uint8") for name in names) == 1
    # An engine for a CPU without VNNI is right on this machine, too, opened as anybody would.
    onnx.save(model, tmp_path / "m.onnx")
    engine = OnnxRuntime().build(graphs.request("x86-64-v3", backend="onnxruntime"), tmp_path / "m.onnx", tmp_path)
    session = ort.InferenceSession(str(engine.path), providers=["CPUExecutionProvider"])
    assert all(np.array_equal(output, other) for output, other in zip(session.run(None, U64), expected, strict=True))


def reference(model: onnx.ModelProto) -> list[np.ndarray]:
    return onnx.reference.ReferenceEvaluator(model).run(None, U64)


def lstm(weights: type) -> onnx.ModelProto:
    shift = 128 * (weights is np.uint8)
    rng, scale, zero = np.random.default_rng(0), np.full(1, 2e-3, "f"), np.full(1, shift, weights)
    entries = {"w": rng.integers(-127, 128, (1, 64, 64)), "r": rng.integers(-127, 128, (1, 16, 64))}
    entries = {name: (values + shift).astype(weights) for name, values in entries.items()}
    entries |= {"s": scale, "z": zero}
    lstm = node("DynamicQuantizeLSTM", "x w r", "y", domain="com.microsoft", hidden_size=16)
    lstm.input.extend([*[""] * 5, "s", "z", "s", "z"])
    parts = [numpy_helper.from_array(values, name) for name, values in entries.items()]
    end_value_infos = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, None)] for name in "xy"]
    end_value_infos[0][0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 1, 64]))
    graph = helper.make_graph([lstm], "g", *end_value_infos, parts)
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)


def test_both_weights_of_an_lstm_are_rewritten():
    x = {"x": np.ones((3, 1, 64), "f")}
    model, nodes = lstm(np.int8), lstm(np.uint8)
    assert (make_exact(model), make_exact(nodes)) == (2, 0)
    kinds = {item.name: item.data_type for item in model.graph.initializer}
    assert {kind for name, kind in kinds.items() if name != "s"} == {U8}
    result, expected = (ort.InferenceSession(entry.SerializeToString()).run(None, x)[0] for entry in (model, nodes))
    assert np.array_equal(result, expected)


def test_the_first_factor_of_an_integer_convolution_is_its_weight(tmp_path):
    """So that int8 activations saturate with uint8 weights, and int8 weights with nothing."""
    for kinds, changed_number in (((S8, np.uint8), 1), ((U8, np.int8), 0), ((S8, np.int8), 0), ((U8, np.uint8), 0)):
        weight = np.full((2, 4, 3, 3), 100, kinds[1])
        conv = [helper.make_node("ConvInteger", ["x", "w"], ["y"], name="y")]
        path = tmp_path / "m.onnx"
        graphs.save(path, conv, [("x", kinds[0], ["n", 4, 6, 6])], [("y", S32, ["n", 2, 4, 4])], [("w", weight)])
        assert make_exact(onnx.load(path)) == changed_number, kinds


def test_a_graph_in_shards_is_rewritten_into_a_file_beside_it(tmp_path):
    weight = np.random.default_rng(0).integers(-128, 128, (64, 32)).astype(np.int8)
    node = helper.make_node("MatMulInteger", ["u", "w"], ["y"], name="y")
    end_texts = [("u", U8, ["n", 64])], [("y", S32, ["n", 32])]
    path = graphs.save(tmp_path / "m.onnx", [node], *end_texts, [("w", weight)])
    save_graph(onnx.load(path), path)
    source = exact_source(path)
    assert isinstance(source, str) and source != str(path)
    assert not {*list_shards(Path(source))} & {*list_shards(path)}
    u = np.full((1, 64), 255, np.uint8)
    result = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"u": u})[0]
    assert np.array_equal(result, u.astype(np.int32) @ weight.astype(np.int32))
