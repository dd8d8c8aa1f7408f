from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from builders.execution.jobs import WorkerContext
from enginesmith.core.types import Dim, QuantizationScheme, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline.compile.steps.calibration import CalibrationMethod
from pipeline.compile.steps.graphs import WriteGraph, WrittenGraph
from pipeline.quantization.graph import tidy
from pipeline.quantization.insertion_points import activations
from pipeline.quantization.ranges import refuse_share
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.schemes.write import write
from pipeline.quantization.shares import count_multiplications, narrow_share
from pipeline.quantization.statistics.observe import observe
from pipeline.values import GraphVariant, ModelShapes
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, build, conv_net, images, measured
from validation.data.samples import Samples

W = np.random.default_rng(0).normal(size=(64, 64))


def counts(model: ModelProto, **shapes: tuple[int, ...]) -> list[float]:
    """Of the nodes that multiply with weights, in order."""
    return list(count_multiplications(tidy(model), shapes, {}).values())


def net(text: str, output: str = "float[batch,64] y", inputs: str = "float[batch,64] x", **weights: Any) -> ModelProto:
    return build(inputs, output, text, {"w": W} | weights)


BODY = """
    body (int64 i, bool before, float[n,64] a) => (bool again, float[n,64] b{more}) {{
        again = Identity(before) {inside}
    }}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = MatMul(x, w)", [1]),
        ("y = Gemm<transB=1>(x, w)", [1]),
        ("t = Transpose(w) v = Mul(t, t) y = MatMul(x, v)", [1]),
        ("t = Transpose(x) z = MatMul(w, t) y = Transpose(z)", [1]),
        ("t = Transpose(x) z = MatMul(t, x) y = MatMul(x, z)", []),
        ("y = Einsum<equation=\"bi,ij->bj\">(x, w)", [1]),
        ("y = If(yes) <then_branch = a () => (float[n,64] p) { p = MatMul(x, w) }, else_branch = b () => "
         "(float[m,64] q) { r = MatMul(x, w) q = MatMul(r, w) }>", [2]),
        ("y = Loop(three, yes, x) <body = "
         + BODY.format(more="", inside="b = MatMul(a, w)") + ">", [3]),
        ("y0, z = Loop(\"\", yes, x) <body = "
         + BODY.format(more=", float[n,64] c", inside="b = MatMul(a, w) c = Identity(b)") + "> y = Relu(y0)", [1]),
    ],
)  # fmt: skip
def test_each_product_with_a_weight_counts_per_execution(text: str, expected: list[int]) -> None:
    constants = {"yes": np.array(True), "three": np.array(3)}
    weights = {name: value for name, value in constants.items() if name in text}
    assert [count / (5 * 64 * 64) for count in counts(net(text, **weights), x=(5, 64))] == expected


def test_a_scan_multiplies_at_each_step() -> None:
    inner_text = "a = MatMul(h, w) g = Add(a, s) o = Relu(g)"
    body = f"body (float[n,64] h, float[n,64] s) => (float[n,64] g, float[n,64] o) {{ {inner_text} }}"
    text = f"last, y = Scan <num_scan_inputs=1, body = {body}> (x, s)"
    model = net(text, "float[t,n,64] y", "float[n,64] x, float[t,n,64] s")
    assert counts(model, x=(5, 64), s=(7, 5, 64)) == [7 * 5 * 64 * 64]


@pytest.mark.parametrize(("kind", "gates", "directions"), [("GRU", 3, 1), ("LSTM", 4, 2), ("RNN", 1, 1)])
def test_recurrent_layers_multiply_with_both_weights_at_each_step(kind: str, gates: int, directions: int) -> None:
    weights = {"v": np.ones((directions, gates * 32, 64)), "r": np.ones((directions, gates * 32, 32))}
    side = 'direction="bidirectional", ' if directions == 2 else ""
    model = net(f"y, h = {kind}<{side}hidden_size=32>(x, v, r)", "float[t,d,n,32] y", "float[t,n,64] x", **weights)
    assert counts(model, x=(7, 5, 64)) == [7 * 5 * directions * gates * 32 * (64 + 32)]


def test_observed_shapes_replace_unknown_ones() -> None:
    """Behind a NonZero the number of rows follows from the data."""
    text = "n = NonZero(x) t = Transpose(n) f = Cast<to=1>(t) a = MatMul(f, u) b = MatMul(x, w) y = Relu(b)"
    model = net(text, "float[batch,64] y, float[k,9] a", u=np.ones((2, 9)))
    elements = {"x": 2.0 * 3 * 64, "a": 100.0, "b": 2.0 * 3 * 64, "f": 40.0}
    multiplications = count_multiplications(tidy(model), {"x": (3, 64)}, elements)
    assert list(multiplications.values()) == [100 * 2, 2 * 3 * 64 * 64]


def test_with_contradictory_shapes_a_weight_counts_once() -> None:
    model = net("y = MatMul(x, w)")
    assert counts(model, x=(5, 3)) == [64 * 64]
    model.graph.node[0].input.pop()
    assert counts(model, x=(5, 64)) == [], "no weight, and no crash either"


def test_a_quantized_model_has_its_original_share() -> None:
    ranges = measured(conv_net(), images())
    first_number, second_number, last = 8 * 64 * 9, 8 * 64 * 8 * 9, 80
    shapes = {"image": (3, 1, 8, 8)}
    whole_path, notes = write(conv_net(), "int8", TENSORRT_FP32, ranges)
    assert narrow_share(tidy(whole_path), (), shapes) == 1.0
    for scheme in (CPU, TENSORRT_FP32):
        part, _ = quantize_int8(conv_net(), ranges, scheme, dict.fromkeys(notes.quantized[:2], "fp16"))
        assert narrow_share(tidy(part), (), shapes) == pytest.approx(last / (first_number + second_number + last))
    dynamic_path, _ = write(conv_net(), "int8-dynamic", CPU, ranges)
    assert narrow_share(tidy(dynamic_path), (), shapes) == pytest.approx(last / (first_number + second_number + last))


@pytest.mark.parametrize(("share", "refused"), [(None, False), (0.0999, True), (0.1, False), (1.0, False)])
def test_a_tiny_share_of_a_format_counts_as_none(share: float | None, refused: bool) -> None:
    reason = refuse_share(share, "int4", "left in float: all")
    assert (reason is not None) is refused
    assert not reason or reason.startswith("only 9.9 % of the multiplications would be in int4 (minimum 10 %); left")


HEAD = {"int8": CPU, "fp8": TENSORRT_FP32, "int8-dynamic": CPU, "int4": CPU}


def recurrent_net(hidden: int) -> ModelProto:
    """A GRU and a small head, which is all that has a narrow form."""
    rng = np.random.default_rng(0)
    weights = {"v": rng.normal(size=(1, 3 * hidden, 64)) / 8, "r": rng.normal(size=(1, 3 * hidden, hidden)) / 8}
    weights |= {"axes": np.array([1]), "w": rng.normal(size=(hidden, 256)) / 8}
    text = f"s, h = GRU<hidden_size={hidden}, linear_before_reset=1>(x, v, r) q = Squeeze(s, axes) y = MatMul(q, w)"
    return build("float[4,batch,64] x", "float[4,batch,256] y", text, weights)


@pytest.mark.parametrize("precision", HEAD)
@pytest.mark.parametrize(("hidden", "idle"), [(64, False), (1024, True)])
def test_a_graph_with_a_tiny_share_of_its_format_is_refused(tmp_path, precision, hidden, idle):
    result = written(tmp_path, recurrent_net(hidden), precision, HEAD[precision])
    share = hidden * 256 / (hidden * 256 + 3 * hidden * (64 + hidden))
    assert result.share == pytest.approx(share) and (result.share < 0.1) is idle and (result.idle is not None) is idle
    assert not idle or "recurrent nodes have no int8 form here" in result.idle


def written(folder: Path, model: ModelProto, precision: Any, scheme: QuantizationScheme) -> WrittenGraph:
    """A graph as the step writes it, calibrated where it needs that."""
    store = open_store(folder / "registry", create=True)
    path = folder / "model.onnx"
    shapes = ModelShapes((TensorSpec("x", "float32", (4, "batch", 64)),), (Dim("batch", 1, 2, 4),))
    onnx.save(model, path)
    np.savez(folder / "samples.npz", x=np.random.default_rng(1).normal(size=(2, 4, 1, 64)).astype(np.float32))
    observations = None
    if precision in ("int8", "fp8"):
        samples = Samples.open(folder / "samples.npz", shapes.inputs, shapes.dims)
        observations = store.put_bytes(observe(path, samples, activations(model)).to_bytes())
    method = CalibrationMethod("minmax", None)
    variant = GraphVariant(precision, scheme)
    (folder / "job").mkdir()
    step = WriteGraph(store.put_file(path), variant, observations, method, (), None, shapes)
    return step.run(WorkerContext(folder / "job", store.uri))


def test_an_lstm_in_integers_counts_as_narrow() -> None:
    entries = {
        "v": np.ones((1, 64, 64), np.int8),
        "r": np.ones((1, 16, 64), np.int8),
        "s": np.ones(1, "f"),
        "z": np.zeros(1, np.int8),
    }
    lstm = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "v", "r", *[""] * 5, "s", "z", "s", "z"], ["y"], name="l", domain="com.microsoft"
    )
    value_infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [7, 5, 64]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph(
        [lstm], "g", value_infos[:1], value_infos[1:], [numpy_helper.from_array(v, k) for k, v in entries.items()]
    )
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains)
    assert count_multiplications(model, {"x": (7, 5, 64)}, {}) == {"l": 7 * 5 * (64 * 64 + 16 * 64)}
    assert narrow_share(model, (), {"x": (7, 5, 64)}) == 1.0
