import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginesmith.core.errors import DataError
from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.qdq import carries_qdq, quantize_int8
from tests.pipeline.quantization import small_nets as nets


def quantized(model: onnx.ModelProto, arrays: dict[str, np.ndarray], scheme_name: str) -> onnx.ModelProto:
    return quantize_int8(model, nets.measured(model, arrays), nets.SCHEMES[scheme_name])[0]


@pytest.mark.parametrize("scheme", nets.SCHEMES)
@pytest.mark.parametrize("net", nets.NETS)
def test_int8_computes_the_same_function(net: str, scheme: str) -> None:
    make, data, _ = nets.NETS[net]
    model, held_out = make(), data(16, 99)
    result = quantized(model, data(), scheme)
    exact_result = nets.run(result, held_out, optimized=False)  # kernels may saturate
    assert nets.sqnr_db(nets.run(model, held_out), exact_result) > 30


def test_tensorrt_scheme_is_symmetric_with_a_pair_on_each_weight_and_float_biases() -> None:
    result = quantized(nets.conv_net(), nets.images(), "tensorrt-fp32")
    for node in nets.of_type(result, "QuantizeLinear") + nets.of_type(result, "DequantizeLinear"):
        zero_point = nets.constant(result, node.input[2])
        assert zero_point.dtype == np.int8 and not zero_point.any()
    for node in nets.of_type(result, "Conv") + nets.of_type(result, "Gemm"):
        activation, weight, bias = node.input
        assert nets.maker(result, nets.maker(result, weight).input[0]).op_type == "QuantizeLinear"
        assert nets.maker(result, nets.maker(result, activation).input[0]).op_type == "QuantizeLinear"
        assert nets.constant(result, bias).dtype == np.float32


def test_tensorrt_scales_are_per_channel_maxima_over_127() -> None:
    model, arrays = nets.conv_net(), nets.images()
    result = quantized(model, arrays, "tensorrt-fp32")
    activation, weight = (nets.maker(result, name) for name in nets.named(result, "Conv_c1").input[:2])
    reach = nets.measured(model, arrays).reach("image")
    assert nets.constant(result, activation.input[1]) == pytest.approx(reach / 127, rel=1e-6)
    per_channel = np.abs(nets.constant(model, "w1")).max(axis=(1, 2, 3)) / 127
    np.testing.assert_allclose(nets.constant(result, weight.input[1]), per_channel, rtol=1e-6)


def test_cpu_scheme_is_asymmetric_with_int8_weights_and_int32_biases() -> None:
    result = quantized(nets.conv_net(), nets.images(), "cpu")
    activation, weight, bias = (nets.maker(result, name) for name in nets.named(result, "Conv_c1").input)
    assert nets.constant(result, activation.input[2]).dtype == np.uint8
    assert nets.constant(result, weight.input[0]).dtype == np.int8
    assert nets.constant(result, bias.input[0]).dtype == np.int32


@pytest.mark.parametrize(
    ("net", "kernels"), [("conv", {"QLinearConv", "QGemm"}), ("attention", {"MatMulIntegerToFloat"})]
)
def test_onnxruntime_picks_its_integer_kernels(net: str, kernels: set[str], tmp_path: Path) -> None:
    make, data, _ = nets.NETS[net]
    nets.session(quantized(make(), data(), "cpu"), save=tmp_path / "optimized.onnx")
    optimized_model = onnx.load(tmp_path / "optimized.onnx")
    assert kernels <= {node.op_type for node in optimized_model.graph.node}
    assert not nets.of_type(optimized_model, "Conv") and not nets.of_type(optimized_model, "Gemm")


def test_a_residual_add_reads_the_same_pair_as_the_convolution_so_that_it_fuses() -> None:
    result = quantized(nets.conv_net(), nets.images(), "tensorrt-fp32")
    shortcut, activation = nets.named(result, "Add_sum").input[1], nets.named(result, "Conv_c2").input[0]
    assert nets.maker(result, shortcut).op_type == "DequantizeLinear" and shortcut == activation
    assert nets.maker(result, nets.named(result, "Add_sum").input[0]).op_type == "Conv"


def test_an_unmeasured_residual_operand_costs_only_the_fusion() -> None:
    model = nets.build(
        "float[batch,1,8,8] image, float[batch,4,8,8] side",
        "float[batch,4,8,8] y",
        "c = Conv<pads=[1,1,1,1]>(image, w) y = Add(c, side)",
        {"w": np.random.default_rng(0).normal(size=(4, 1, 3, 3))},
    )
    ranges = Ranges({"image": (-3.0, 3.0), "c": (-9.0, 9.0)}, "minmax", "0" * 64, 1)
    for scheme in ("tensorrt-fp32", "cpu"):
        result, notes = quantize_int8(model, ranges, nets.SCHEMES[scheme])
        assert "side" in nets.named(result, "Add_y").input
    result, notes = quantize_int8(model, ranges, nets.TENSORRT_FP32)
    assert [(item.node, "not measured" in item.reason) for item in notes.float_nodes] == [("Add_y", True)]


def test_a_residual_around_a_matmul_keeps_the_exact_values() -> None:
    result = quantized(nets.attention_net(), nets.sentences(), "tensorrt-fp32")
    assert nets.maker(result, nets.named(result, "Add_y").input[0]).op_type == "LayerNormalization"


def test_a_tied_embedding_keeps_its_exact_values() -> None:
    result = quantized(nets.attention_net(), nets.sentences(), "tensorrt-fp32")
    table = nets.constant(result, nets.of_type(result, "Gather")[0].input[0])
    np.testing.assert_array_equal(table, nets.constant(nets.attention_net(), "table"))
    assert nets.maker(result, nets.named(result, "MatMul_scores").input[1]).op_type == "DequantizeLinear"


@pytest.mark.parametrize("scheme", nets.SCHEMES)
def test_one_weight_read_along_two_axes_gets_two_sets_of_scales(scheme: str) -> None:
    model, arrays = nets.x_net("a = Gemm(x, w) y = Gemm<transB=1>(a, w)"), nets.x_values()
    result = quantized(model, arrays, scheme)
    assert nets.sqnr_db(nets.run(model, arrays), nets.run(result, arrays, optimized=False)) > 30
    first_node, second_node = (nets.maker(result, node.input[1]) for node in nets.of_type(result, "Gemm"))
    assert nets.constant(result, first_node.input[1]).tolist() != nets.constant(result, second_node.input[1]).tolist()


@pytest.mark.parametrize("scheme", nets.SCHEMES)
def test_outputs_and_inputs_keep_their_names_and_types(scheme: str) -> None:
    # `a` is read by a quantized node and is an output of the model as well
    model = nets.build(
        "float[batch,5] x", "float[batch,5] a, float[batch,5] y", "a = Relu(x) y = MatMul(a, w)", {"w": np.eye(5)}
    )
    result = quantized(model, nets.x_values(), scheme)
    assert [(v.name, v.type.tensor_type.elem_type) for v in result.graph.output] == [("a", 1), ("y", 1)]
    assert [v.name for v in result.graph.input] == ["x"]
    assert result.producer_name == model.producer_name and not result.metadata_props
    np.testing.assert_allclose(nets.run(result, nets.x_values()), np.maximum(nets.x_values()["x"], 0), atol=2e-3)


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        ("y = MatMul(x, x5)", {"x5": np.full((5, 5), np.nan)}, "NaN"),
        ("y = Gemm<beta=0.5>(x, w, b)", {"b": np.ones(5)}, "beta"),
        ("y = MatMul(w, w)", {}, "both operands are constants"),
        ("t = Transpose(x) z = MatMul(t, x) y = MatMul(x, z)", {}, "two activations"),
    ],
)
def test_candidates_that_cannot_be_quantized_are_listed(text: str, weights: dict[str, object], reason: str) -> None:
    sites, float_nodes = find_sites(prepare_model(nets.x_net(text, **weights)))
    assert not sites and reason in float_nodes[0].reason


def test_gemm_alpha_survives() -> None:
    model, arrays = nets.x_net("y = Gemm<alpha=0.25>(x, w, b)", b=np.arange(5.0)), nets.x_values()
    for scheme in nets.SCHEMES:
        assert nets.sqnr_db(nets.run(model, arrays), nets.run(quantized(model, arrays, scheme), arrays)) > 30


@pytest.mark.parametrize(("low", "high", "folded"), [(0.0, 6.0, True), (-1.0, 1.0, True), (0.5, 2.0, False)])
def test_a_clip_is_folded_into_a_cpu_convolution_only_if_saturation_replaces_it(low, high, folded):
    weights = {
        "w": np.random.default_rng(0).normal(size=(4, 1, 3, 3)),
        "low": np.float32(low),
        "high": np.float32(high),
    }
    model = nets.build(
        "float[batch,1,8,8] image", "float[batch,4,6,6] y", "c = Conv(image, w) y = Clip(c, low, high)", weights
    )
    result = quantized(model, nets.images(), "cpu")
    assert bool(nets.of_type(result, "Clip")) != folded
    actual = nets.run(result, nets.images(8, 5))
    assert actual.min() >= low - 0.02 and actual.max() <= high + 0.02


def test_ranges_of_another_model_are_refused() -> None:
    with pytest.raises(DataError, match="lack tensor 'image'; calibrate with this same model"):
        quantize_int8(nets.conv_net(), Ranges({}, "minmax", "0" * 64, 1), nets.CPU)


def test_8_bit_storage_alone_does_not_prevent_quantization() -> None:
    """With DequantizeLinear alone it computes in float, and is no int8 model."""
    net = nets.x_net(
        "f = DequantizeLinear(v, s) a = Mul(x, f) y = MatMul(a, w)", v=np.ones(5, np.int8), s=np.float64(0.5)
    )
    assert not carries_qdq(net)
    dynamic_model = nets.x_net(
        "f = DequantizeLinear(v, s) q, r, z = DynamicQuantizeLinear(x) y = Mul(x, f)", v=np.ones(5, np.int8), s=0.5
    )
    assert carries_qdq(dynamic_model), "it rounds to scales that are made at run time"
    result, notes = quantize_int8(net, nets.measured(net, nets.x_values()), nets.CPU)
    assert len(notes.quantized) == 1 and carries_qdq(result)


def test_another_process_makes_the_same_bytes() -> None:
    code = (
        "import hashlib, test_qdq as t\n"
        "for net in t.nets.NETS:\n"
        "    make, data, _ = t.nets.NETS[net]\n"
        "    for scheme in t.nets.SCHEMES:\n"
        "        data_ = t.quantized(make(), data(), scheme).SerializeToString()\n"
        "        print(hashlib.sha256(data_).hexdigest())\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().split()) == len(nets.NETS) * len(nets.SCHEMES)


@pytest.mark.parametrize(
    ("scheme", "sm"),
    [*(("tensorrt", sm) for sm in ("SM75", "SM80", "SM86", "SM89", "SM120")), ("tensorrt-fp32", "SM80")],
)
@pytest.mark.parametrize("net", nets.NETS)
def test_tensorrt_rtx_builds_int8_over_fp16_for_every_generation_and_over_fp32_for_ampere(net, scheme, sm):
    make, data, _ = nets.NETS[net]
    shapes = nets.IMAGE_SHAPES if net == "conv" else nets.TEXT_SHAPES
    assert nets.compiles(quantized(make(), data(), scheme), sm, shapes) == ""


def test_fp16_scales_that_would_become_zero_are_raised_and_reported() -> None:
    model = nets.x_net("y = MatMul(x, w)", w=np.eye(5) * 1e-6)
    result, notes = quantize_int8(
        model, nets.measured(model, {"x": nets.x_values()["x"] * np.float32(1e-4)}), nets.TENSORRT
    )
    scales = [nets.constant(result, node.input[1]) for node in nets.of_type(result, "DequantizeLinear")]
    assert all((scale >= np.finfo(np.float16).tiny).all() and scale.dtype == np.float16 for scale in scales)
    assert notes.cast and len(notes.cast.floored_scales) == 2
    assert "2 Q/DQ scales were raised" in "\n".join(notes.lines())
    assert nets.compiles(result, "SM75", {"x": ((1, 5), (4, 5), (8, 5))}) == ""


def test_an_old_opset_is_raised_to_one_with_fp16_scales() -> None:
    result = quantized(nets.conv_net(13), nets.images(), "tensorrt")
    scales = {nets.constant(result, node.input[1]).dtype for node in nets.of_type(result, "QuantizeLinear")}
    assert scales == {np.dtype(np.float16)}
    assert nets.compiles(result, "SM75", nets.IMAGE_SHAPES) == ""


def test_int8_over_fp16_computes_all_but_the_edges_in_fp16() -> None:
    ranges = nets.measured(nets.conv_net(), nets.images())
    result, notes = quantize_int8(nets.conv_net(), ranges, nets.TENSORRT)
    assert notes.cast and not notes.cast.float_nodes
    assert {item.data_type for item in result.graph.initializer} == {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8}
    assert [v.type.tensor_type.elem_type for v in (*result.graph.input, *result.graph.output)] == [1, 1]
    assert len(nets.of_type(result, "Cast")) == 2
    assert quantize_int8(nets.conv_net(), ranges, nets.TENSORRT_FP32)[1].cast is None


@pytest.mark.parametrize("scheme", nets.SCHEMES)
@pytest.mark.parametrize("shape", [(1, 5), (1,), (16, 5)], ids=["row", "one value", "matrix"])
def test_a_gemm_whose_bias_is_not_one_value_for_each_output_stays_in_float(shape: tuple[int, ...], scheme: str) -> None:
    model = nets.x_net("y = Gemm(x, w, b)", b=np.ones(shape))
    result, notes = quantize_int8(model, Ranges({}, "minmax", "0" * 64, 0), nets.SCHEMES[scheme])
    assert not nets.of_type(result, "QuantizeLinear")
    assert "its bias has the shape" in notes.float_nodes[0].reason
