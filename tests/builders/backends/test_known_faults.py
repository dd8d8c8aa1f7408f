from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, shape_inference
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from builders.backends import discovery
from builders.backends.known_faults import COMPILERS, FAULTS, gather_samples, judge_faults, list_faults, without_faults
from builders.backends.tensorrt import TensorRTRTX
from builders.backends.tensorrt.library import recorder
from builders.onnx_graphs.rewriting import rewrite
from enginesmith.core.errors import ModelError
from tests.builders import graphs
from tests.pipeline.quantization.small_nets import build

SAMPLE = 'y = GridSample<mode="{mode}", padding_mode="{padding}", align_corners={corners}>(x, g)'
CUMSUMS = "a = CumSum(x, zero) y0 = CumSum{how}(a, {axis}) y = Identity(y0)"
ATTEND = """
    kt = Transpose<perm=[0,2,1]>({k}) s0 = MatMul(q, kt) {scaled}
    p = Softmax<axis=-1>(s) y = MatMul(p, q)
"""
CHOOSE = """
    z = If(b) <then_branch = one () => (float[n,1,4,4] t) {{ t = Add(x, c) }},
               else_branch = two () => (float[n,1,4,4] e) {{ e = Sub(x, c) }}>
    w = {between}(z) y = Resize<mode="cubic">(w, "", scales)
"""


def sampling(mode="linear", padding="zeros", corners=0, opset=20):
    text = SAMPLE.format(mode=mode, padding=padding, corners=corners)
    return build("float[n,c,h,w] x, float[n,k,l,2] g", "float[n,c,k,l] y", text, {}, opset)


def saved(model, folder):
    for node in model.graph.node:
        node.name = node.name or node.output[0]
    onnx.save(model, folder / "graph.onnx")
    return folder / "graph.onnx"


def request(compiler="tensorrt", version="11.1.0", target="sm_120", precision="fp32"):
    build_request = graphs.request(target, precision)
    return replace(build_request, backend=compiler, toolchain=((compiler, version), (f"enginesmith-{compiler}", "3")))


def verdict(model, folder, **of):
    build_request = request(**of)
    return judge_faults(list_faults(saved(model, folder), build_request.backend), build_request)


def sums(how="", axis="one"):
    numbers = {"zero": np.array(0), "one": np.array(1)}
    return build("float[3,4] x", "float[3,4] y", CUMSUMS.format(how=how, axis=axis), numbers)


def attention(k="k0", scaled="s = Mul(s0, c)"):
    text = "q = Relu(x) k0 = Relu(x)" + ATTEND.format(k=k, scaled=scaled)
    return build("float[2,6,16] x", "float[2,6,16] y", text, {"c": np.float32(0.25)})


def choosing(between="Transpose<perm=[0,1,3,2]>"):
    weights = {"c": np.float32(1), "scales": np.float32([1, 1, 2, 2])}
    return build("float[n,1,4,4] x, bool b", "float[n,1,8,8] y", CHOOSE.format(between=between), weights)


def quantized(low, dtype="int8", folded=True):
    """A Gemm as onnxruntime's quantizer writes it. low, dtype: the activation's zero point.  folded: the bias' scale"""
    weight = np.random.default_rng(0).integers(-127, 128, (4, 3)).astype(np.int8)
    codes = {"w": weight, "b": np.int32([3, -70000, 2]), "z": np.int32(0)}
    text = """q = QuantizeLinear(x, s, low) a = DequantizeLinear(q, s, low) v = DequantizeLinear(w, s)
        c = DequantizeLinear(b, t, z) y = Gemm(a, v, c)"""
    scales = {"s": np.float32(0.02), "t" if folded else "u": np.float32(0.0004), "low": np.dtype(dtype).type(low)}
    return build("float[2,4] x", "float[2,3] y", text if folded else f"t = Mul(s, u) {text}", codes | scales)


def wide():
    """A file of over 8 MiB, whose outline leaves the zero points of 1,024 channels and the mask in it."""
    arrays = {"w": np.ones((4, 1024), np.int8), "low": np.zeros(1024, np.int8), "s": np.full(1024, 0.02, np.float32)}
    arrays |= {"b": np.arange(1024, dtype=np.int32), "m": np.ones(1024, bool), "fill": np.zeros(1 << 23, np.int8)}
    text = "v = DequantizeLinear<axis=1>(w, s, low) c = DequantizeLinear<axis=0>(b, s) p = MatMul(x, v) y = Add(p, c)"
    return build("float[2,4] x", "float[2,1024] y", text, arrays)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("make", [lambda: quantized(0), lambda: quantized(0, folded=False), wide])
def test_int32_biases_are_written_as_floats(make, outside, tmp_path):
    path = tmp_path / "graph.onnx"
    onnx.save(make(), path, save_as_external_data=outside, location="data", size_threshold=0)
    actual = judge_faults(list_faults(path, "tensorrt"), request())
    assert actual.refusal is None and actual.written == {"int32-codes"} and "(DequantizeLinear)" in actual.notes[0]
    written_path, _ = without_faults(request(), path, tmp_path)
    feed = {"x": np.random.default_rng(1).normal(size=(2, 4)).astype("f")}
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    expected, actual_output = (InferenceSession(item, options).run(None, feed)[0] for item in (path, written_path))
    np.testing.assert_array_equal(actual_output, expected)


@pytest.mark.parametrize("opset", [16, 20])
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_gathers_sample_as_grid_sample_does(padding, corners, opset):
    model = sampling("linear" if opset == 20 else "bilinear", padding, corners, opset)
    written_model = shape_inference.infer_shapes(model)
    rewrite(written_model.graph, opset, {"GridSample": gather_samples})
    onnx.checker.check_model(written_model)
    assert "GridSample" not in {node.op_type for node in written_model.graph.node}
    rng = np.random.default_rng(0)
    points = rng.uniform(-1.6, 1.6, (2, 5, 7, 2)).astype("f")
    points[0, 0] = [-1, 1]  # at the corners themselves
    points[1, 0] = [1e6, -1e6]
    feed = {"x": rng.normal(size=(2, 3, 6, 9)).astype("f"), "g": points}
    expected, actual_output = (
        InferenceSession(item.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for item in (model, written_model)
    )
    np.testing.assert_allclose(actual_output, expected, rtol=1e-4, atol=1e-5)


def test_gathers_of_float16_give_float16():
    model = sampling()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    written_model = shape_inference.infer_shapes(model)
    rewrite(written_model.graph, 20, {"GridSample": gather_samples})
    onnx.checker.check_model(written_model, full_check=True)
    assert helper.get_attribute_value(written_model.graph.node[-1].attribute[0]) == TensorProto.FLOAT16


@pytest.mark.parametrize("compiler", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("opset", [16, 20])
def test_linear_grid_sample_becomes_gathers_and_the_plan_gives_the_reason(compiler, opset, tmp_path):
    model = sampling("linear" if opset == 20 else "bilinear", opset=opset)
    actual = verdict(model, tmp_path, compiler=compiler)
    assert actual.refusal is None and len(actual.notes) == 1
    assert "node 'y' (GridSample)" in actual.notes[0] and "written as other operators" in actual.notes[0]
    assert f"reported of {compiler} " in actual.notes[0] and "NVIDIA/TensorRT/issues/4813" in actual.notes[0]
    path, notes = without_faults(request(compiler), tmp_path / "graph.onnx", tmp_path)
    assert notes == actual.notes
    assert "GridSample" not in {node.op_type for node in onnx.load(path).graph.node}


def test_the_rtx_parser_reads_linear_and_cubic_correctly(tmp_path):
    trt = pytest.importorskip("tensorrt_rtx")
    logger = recorder("tensorrt_rtx")
    for mode in ("linear", "cubic"):
        path = saved(sampling(mode), tmp_path)
        network = trt.Builder(logger).create_network(0)
        assert trt.OnnxParser(network, logger).parse_from_file(str(path))
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        (layer,) = [item for item in layers if item.type == trt.LayerType.GRID_SAMPLE]
        layer.__class__ = trt.IGridSampleLayer
        assert layer.interpolation_mode == getattr(trt.InterpolationMode, mode.upper())


@pytest.mark.parametrize(
    ("model", "of", "words"),
    [
        (sampling("cubic"), {}, "takes the nearest pixel in place of cubic"),
        (sampling("linear", "reflection"), {}, "takes the nearest pixel in place of linear"),
        (sums(), {"version": "10.9.0"}, "with the axis and attributes of another CumSum"),
        (sums("<reverse=1>", "zero"), {"version": "10.9.0"}, "with the axis and attributes of another CumSum"),
        (attention("x"), {"version": "11.2.1", "precision": "fp16"}, "reads 'x' without its Transpose"),
        (choosing(), {"version": "11.2.1", "target": "sm_86"}, "transpose in both branches"),
        (quantized(3), {}, "(QuantizeLinear) has other zero points than 0; quantize to symmetric int8"),
        (quantized(0, "uint8"), {}, "has uint8; quantize to symmetric int8"),
    ],
)
def test_unwritable_operators_are_refused_with_node_remedy_and_source(model, of, words, tmp_path):
    actual = verdict(model, tmp_path, **of)
    assert actual.refusal and words in actual.refusal and ";" in actual.refusal
    assert "https://github.com/" in actual.refusal and "node '" in actual.refusal
    with pytest.raises(ModelError, match="tensorrt does not compile the model correctly: node "):
        without_faults(request(**of), tmp_path / "graph.onnx", tmp_path)


@pytest.mark.parametrize(
    ("model", "of", "words"),
    [
        (sums(), {"version": "11.4.0"}, "10.8 to 10.11"),  # a later version than was reported
        (choosing(), {"version": "11.2.1", "target": "sm_89"}, "only a proof on sm_89 shows it"),
        (attention(), {"version": "10.16.1", "precision": "fp16"}, "up to 10.16"),
    ],
)
def test_an_unknown_fault_is_reported_and_the_graph_is_built(model, of, words, tmp_path):
    actual = verdict(model, tmp_path, **of)
    assert actual.refusal is None and words in actual.notes[0] and "https://" in actual.notes[0]
    assert without_faults(request(**of), tmp_path / "graph.onnx", tmp_path) == (tmp_path / "graph.onnx", actual.notes)


@pytest.mark.parametrize(
    ("model", "of"),
    [
        (sampling("nearest"), {}),
        (sampling(), {"version": "10.12.0"}),  # before the first that was reported
        (sampling("cubic"), {"compiler": "tensorrt-rtx", "version": "1.7.1"}),  # seen to be right
        (sampling(), {"compiler": "onnxruntime"}),
        (sums("", "zero"), {"version": "10.9.0"}),
        (sums(), {"version": "10.7.0"}),
        (attention("x"), {"version": "11.2.1"}),  # fp32 has no fused kernel
        (attention(), {"version": "11.2.1", "precision": "fp16", "target": "sm_89"}),
        (attention("x", "s1 = Relu(s0) s = Mul(s1, c)"), {"version": "11.2.1", "precision": "fp16"}),  # two kernels
        (choosing("Identity"), {"version": "11.2.1", "target": "sm_86"}),
    ],
)
def test_correct_graphs_are_not_changed(model, of, tmp_path):
    actual = verdict(model, tmp_path, **of)
    assert actual.refusal is None and not actual.written
    assert not [note for note in actual.notes if "up to 10.16" not in note]


def test_unparsed_operators_are_refused_for_that_version_and_reported_for_later_ones(tmp_path):
    graph = build("float[n,2,2] x", "float[n] y", "y = Det(x)", {})
    refusal = verdict(graph, tmp_path, compiler="tensorrt-rtx", version="1.7.1").refusal
    assert refusal and refusal.startswith("node 'y' (Det) is not read by its parser; compute it outside")
    later_verdict = verdict(graph, tmp_path, compiler="tensorrt-rtx", version="1.8")
    assert later_verdict.refusal is None and later_verdict.notes


def test_every_row_has_a_source_and_a_compiler_that_exists():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.source.startswith(("https://github.com/", "ONNX's node tests"))
        assert all(discovery.load(name) for name in fault.compilers)
    assert {"tensorrt", "tensorrt-rtx", "iree"} <= COMPILERS


GATHERS = build("float[1,3,8,8] x, float[1,4,4,2] g", "float[1,3,4,4] y", SAMPLE.format(
    mode="linear", padding="border", corners=1), {})  # fmt: skip


@pytest.mark.parametrize("model", [GATHERS, quantized(0)])
def test_an_engine_is_built_from_the_written_graph(model, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    build_request = replace(graphs.request("sm_89"), inputs=(), outputs=(), profiles=())
    engine = TensorRTRTX().build(build_request, saved(model, tmp_path), tmp_path)
    assert "written as other operators" in engine.notes[0] and engine.size_bytes > 0
