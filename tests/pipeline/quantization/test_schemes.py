import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from enginesmith.core.errors import DataError, InputError
from enginesmith.core.reports.breakdown import FloatNode
from enginesmith.core.types import QUANTIZED, QuantizationScheme
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.ranges import QuantizationNotes, Ranges
from pipeline.quantization.schemes.cast import emulate
from pipeline.quantization.schemes.overrides import Override, resolve
from pipeline.quantization.schemes.qdq import LARGEST_REACH
from pipeline.quantization.schemes.write import SHARES, blocks_of, quantize_int4, write
from pipeline.values import GraphVariant
from tests.pipeline.quantization import small_nets as nets

BIASES = (("uint8", True), ("uint8", False), ("int8", False))


def written(net: onnx.ModelProto, data: dict[str, np.ndarray], precision: str, **more: object) -> onnx.ModelProto:
    scheme = nets.CPU if precision == "int8-dynamic" else nets.TENSORRT
    return write(net, precision, scheme, nets.measured(net, data), **more)[0]


@pytest.mark.parametrize("net", nets.NETS)
def test_fp8_computes_the_same_function(net: str) -> None:
    make, data, _ = nets.NETS[net]
    held_out = data(16, 99)
    result = written(make(), data(), "fp8")
    assert nets.sqnr_db(nets.run(make(), held_out), nets.run(emulate(result), held_out, optimized=False)) > 22


def test_fp8_stores_e4m3_weights_and_reaches_448() -> None:
    model, arrays = nets.conv_net(), nets.images()
    result = written(model, arrays, "fp8")
    activation, weight = (nets.maker(result, name) for name in nets.named(result, "Conv_c1").input[:2])
    assert nets.constant(result, weight.input[0]).dtype == ml_dtypes.float8_e4m3fn
    assert np.abs(nets.constant(result, weight.input[0]).astype(np.float32)).max(axis=(1, 2, 3)).tolist() == [448.0] * 8
    assert float(nets.constant(result, activation.input[1])) == pytest.approx(
        np.abs(arrays["image"]).max() / 448, rel=1e-3
    )


@pytest.mark.parametrize("sm", ["SM89", "SM120"])
@pytest.mark.parametrize("net", nets.NETS)
def test_tensorrt_rtx_builds_fp8_where_the_hardware_has_it(net: str, sm: str) -> None:
    make, data, shapes = nets.NETS[net]
    assert nets.compiles(written(make(), data(), "fp8"), sm, shapes) == ""


@pytest.mark.parametrize("sm", ["SM75", "SM80", "SM86"])
def test_fp8_is_refused_below_sm_89_for_a_reason(sm: str) -> None:
    assert "fp8" in nets.compiles(written(nets.conv_net(), nets.images(), "fp8"), sm, nets.IMAGE_SHAPES)


@pytest.mark.parametrize(("sm", "builds"), [("SM75", False), ("SM80", True), ("SM89", True), ("SM120", True)])
def test_tensorrt_rtx_builds_int4_from_ampere_on(sm: str, builds: bool) -> None:
    message = nets.compiles(written(nets.wide_net(), nets.wide_data(), "int4"), sm, nets.WIDE_SHAPES)
    assert (message == "") == builds
    assert builds or "int4" in message


def test_int4_uses_blocks_that_divide_the_depth() -> None:
    result, notes = quantize_int4(nets.wide_net(), nets.CPU)
    shapes = {
        node.output[0]: (nets.constant(result, node.input[1]).shape, node.attribute)
        for node in result.graph.node
        if node.op_type == "DequantizeLinear"
    }
    assert sorted(shape for shape, _ in shapes.values()) == [(1, 256), (2, 10)]  # 64 in blocks of 64, 256 of 128
    assert {nets.constant(result, node.input[0]).dtype for node in nets.of_type(result, "DequantizeLinear")} == {
        np.dtype(ml_dtypes.int4)
    }
    float_nodes = quantize_int4(nets.conv_net(), nets.CPU)[1].float_nodes
    assert ["MatMul and Gemm" in item.reason for item in float_nodes] == [True, True, False]
    assert "not a multiple" in float_nodes[2].reason and len(notes.quantized) == 2


def test_int4_computes_the_same_function_on_both_backends() -> None:
    model, held_out = nets.wide_net(), nets.wide_data(16, 99)
    for scheme in (nets.CPU, nets.TENSORRT, nets.TENSORRT_FP32):
        result = quantize_int4(model, scheme)[0]
        assert nets.sqnr_db(nets.run(model, held_out), nets.run(emulate(result), held_out, optimized=False)) > 15


def test_onnxruntime_multiplies_int4_weights_in_one_kernel(tmp_path: Path) -> None:
    nets.session(quantize_int4(nets.wide_net(), nets.CPU)[0], save=tmp_path / "optimized.onnx")
    assert "MatMulNBits" in {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}


def test_searched_scales_beat_maximum_scales() -> None:
    weights = np.random.default_rng(6).normal(size=(256, 32)).astype(np.float32)
    stored_array, scales = blocks_of(weights, 64)
    result = stored_array.astype(np.float32).reshape(4, 64, 32) * scales[:, None]
    full_number = np.abs(weights.reshape(4, 64, 32)).max(axis=1, keepdims=True) / 7
    plain_array = np.clip(np.rint(weights.reshape(4, 64, 32) / full_number), -8, 7) * full_number
    errors = [np.square(weights.reshape(4, 64, 32) - item).sum(axis=1) for item in (result, plain_array)]
    assert (errors[0] <= errors[1] + 1e-6).all() and errors[0].sum() < 0.9 * errors[1].sum()
    assert (scales >= full_number[:, 0] * SHARES[-1] * 0.999).all()


def test_a_weight_quantized_in_parts_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(7).normal(size=(192, 50)).astype(np.float32)
    whole_blocks = blocks_of(weights, 64)
    monkeypatch.setattr("pipeline.quantization.schemes.write._AT_ONCE", 64 * 7)
    for block, other_block in zip(whole_blocks, blocks_of(weights, 64), strict=True):
        assert np.array_equal(block.astype(np.float32), other_block.astype(np.float32))


def test_a_block_of_zeros_stays_zero() -> None:
    stored_array, scales = blocks_of(np.zeros((64, 3), np.float32), 64)
    assert not stored_array.astype(np.float32).any() and (scales == 1).all()


@pytest.mark.parametrize("net", ["wide", "attention"])
def test_dynamic_int8_computes_the_same_function_without_calibration(net: str, tmp_path: Path) -> None:
    model, held_out = (
        (nets.wide_net(), nets.wide_data(16, 99)) if net == "wide" else (nets.attention_net(), nets.sentences(16, 99))
    )
    result, notes = write(model, "int8-dynamic", nets.CPU)
    exact_result = nets.run(result, held_out, optimized=False)  # kernels may saturate
    assert nets.sqnr_db(nets.run(model, held_out), exact_result) > 30
    nets.session(result, save=tmp_path / "optimized.onnx")
    actual = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert actual & {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"} and "MatMulInteger" not in actual
    assert not nets.of_type(result, "QuantizeLinear") and isinstance(notes, QuantizationNotes)


def test_dynamic_int8_omits_tensors_with_masks() -> None:
    ranges = Ranges({"x": (-LARGEST_REACH, 0.0), "r": (0.0, 1.0)}, "minmax", "0" * 64, 1)
    notes = write(nets.wide_net(), "int8-dynamic", nets.CPU, ranges)[1]
    assert [item.node for item in notes.float_nodes] == ["MatMul_h"]


@pytest.mark.parametrize("precision", QUANTIZED)
def test_every_scheme_repeats_and_leaves_its_argument_alone(precision: str) -> None:
    model = nets.wide_net()
    model_bytes_before = model.SerializeToString()
    first_model_bytes, model_bytes = (written(model, nets.wide_data(), precision).SerializeToString() for _ in range(2))
    assert first_model_bytes == model_bytes and model.SerializeToString() == model_bytes_before


@pytest.mark.parametrize("precision", ["int8", "fp8", "nvfp4"])
def test_a_calibrated_precision_without_ranges_names_the_remedy(precision: str) -> None:
    with pytest.raises(DataError, match=f"{precision} needs calibrated ranges.*calibration.data"):
        write(nets.wide_net(), precision, nets.TENSORRT)


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("match", ["Gemm", "Gemm_y", "*_y"])
def test_overrides_leave_a_node_in_float_by_type_name_or_glob(precision: str, match: str) -> None:
    ranges = Ranges({"x": (-4.0, 4.0), "r": (0.0, 4.0)}, "minmax", "0" * 64, 1)
    result, notes = write(nets.wide_net(), precision, nets.CPU, ranges, [Override(match, "fp16")])
    assert notes.quantized == ("MatMul_h",)
    assert [(item.node, "overrides says fp16" in item.reason) for item in notes.float_nodes] == [("Gemm_y", True)]
    assert nets.named(result, "Gemm_y").input[1] == "w2"


def test_fp32_overrides_apply_to_the_cast_and_fp16_ones_do_not() -> None:
    ranges = Ranges({"x": (-4.0, 4.0), "r": (0.0, 4.0)}, "minmax", "0" * 64, 1)
    for precision, scheme, expected in (("fp32", nets.TENSORRT, 1), ("fp16", nets.TENSORRT, 10)):
        result = write(nets.wide_net(), "int8", scheme, ranges, [Override("Gemm", precision)])[0]
        types = {
            v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(result).graph.value_info
        }
        types |= {item.name: item.data_type for item in result.graph.initializer}
        assert types[nets.named(result, "Gemm_y").input[1]] == expected
    assert write(nets.wide_net(), "fp16", None, None, [Override("Gemm_y", "fp32")])[1].float_nodes[0].node == "Gemm_y"


def test_the_last_override_counts_and_int8_reverts() -> None:
    graph = prepare_model(nets.wide_net())
    rules = [Override("*", "fp32"), Override("MatMul", "int8"), Override("Relu*", "fp16")]
    assert resolve(graph, rules) == {"MatMul_h": "own", "Relu_r": "fp16", "Gemm_y": "fp32"}


def test_an_override_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(InputError, match="no node matches 'Gemm_z'; did you mean 'Gemm_y'"):
        resolve(prepare_model(nets.wide_net()), [Override("Gemm_z", "fp32")])


@pytest.mark.parametrize("precision", QUANTIZED)
def test_flavours_of_one_name_are_one_graph(precision: str) -> None:
    """A manifest keeps graphs by name: a second graph under one name would be lost."""
    ranges = nets.measured(nets.conv_net(), nets.images())
    entries: dict[str, set[bytes]] = {}
    for (activation, bias), rest, levels in itertools.product(BIASES, ("fp32", "fp16"), (127, 64)):
        scheme = QuantizationScheme(activation, quantize_bias=bias, float_precision=rest, weight_levels=levels)
        graph = write(nets.conv_net(), precision, scheme, ranges)[0].SerializeToString(deterministic=True)
        entries.setdefault(GraphVariant(precision, scheme).name, set()).add(graph)
    assert all(len(graphs) == 1 for graphs in entries.values()), entries.keys()
    assert precision != "int8" or len(set.union(*entries.values())) == 12


def test_a_scheme_states_whether_biases_are_quantized() -> None:
    scheme = QuantizationScheme("uint8", quantize_bias=False, float_precision="fp32")
    ranges = nets.measured(nets.conv_net(), nets.images())
    result, held_out = write(nets.conv_net(), "int8", scheme, ranges)[0], nets.images(16, 99)
    assert all(nets.constant(result, node.input[2]).dtype == np.float32 for node in nets.of_type(result, "Conv"))
    assert nets.sqnr_db(nets.run(nets.conv_net(), held_out), nets.run(result, held_out)) > 30
    assert GraphVariant("int8", scheme).name == "int8 (uint8 activations, biases in float, fp32 elsewhere)"
    with pytest.raises(ValueError, match="leaves biases in floating point"):
        QuantizationScheme("int8", quantize_bias=True, float_precision="fp32")


def test_reasons_are_listed_once_by_number_of_nodes() -> None:
    reasons = ["it multiplies two activations"] * 2 + ["K=32 is not a multiple of the block"] * 9
    float_nodes = tuple(FloatNode(f"/{index}", "MatMul", reason) for index, reason in enumerate(reasons))
    idle = str(QuantizationNotes(float_nodes=float_nodes, precision="int4 weights").idle)
    assert idle.count("it multiplies two activations") == idle.count("not a multiple of the block") == 1
    assert idle.index("not a multiple of the block") < idle.index("it multiplies two activations") and "..." not in idle


@pytest.mark.parametrize("precision", ["int4", "int8-dynamic"])
def test_without_a_search_the_reasons_are_the_schemes(precision: str) -> None:
    net, ranges = nets.conv_net(), nets.measured(nets.conv_net(), nets.images())
    single_model, other_model = (
        write(net, precision, nets.CPU, ranges, float_nodes=nodes)[1] for nodes in ({}, {"Conv_c1": "search"})
    )
    assert "Conv_c1" in [node.node for node in single_model.float_nodes] and single_model == other_model
