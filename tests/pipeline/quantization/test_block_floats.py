"""NVFP4 and MXFP8: their arithmetic against a slow definition, their graphs, and the graphs that ONNX Runtime runs."""

import itertools
import re
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.backends.tensorrt import TensorRTRTX
from builders.backends.tensorrt.build import LEAST
from enginesmith.core.types import BLOCK_FLOATS, ShapeProfile, TensorSpec
from pipeline.compile.steps.blobs import runnable
from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.block_floats import E4M3, FORMATS, emulate_blocks, exponents_of, round_e2m1
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.schemes.write import write
from pipeline.quantization.search.quality import SearchFloor
from pipeline.quantization.search.repair import QuantizationRecipe
from pipeline.quantization.search.selection import choose_each
from pipeline.quantization.search.steps import list_formats
from pipeline.quantization.search.trial import SearchTarget
from pipeline.quantization.settings.groups import compensate, find_groups, matrices, nearest
from tests.builders import graphs
from tests.pipeline.quantization import small_nets as nets

E2M1_VALUES = [Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3_VALUES = [Fraction(float(value)) for value in np.arange(0x7F, dtype=np.uint8).view(E4M3)]
FLOATS = st.floats(-1000, 1000, width=32)
WIDE = [pytest.param(scheme, id=scheme.float_precision) for scheme in (nets.TENSORRT, nets.TENSORRT_FP32)]


def defined(value: Fraction, grid: list[Fraction]) -> Fraction:
    """The number of the grid that is nearest; of two the one at an even place; the last one for all beyond it."""
    size = min(abs(value), grid[-1])
    place = min(range(len(grid)), key=lambda index: (abs(grid[index] - size), index % 2))
    return -grid[place] if value < 0 else grid[place]


def exact(values: np.ndarray) -> list[Fraction]:
    return [Fraction(float(value)) for value in values.reshape(-1)]


def defined_activation(block: np.ndarray, name: str, whole: Fraction) -> list[Fraction]:
    """A block as kernels multiply it, by exact arithmetic; the quotient of a scale is rounded to fp32 before."""
    values = exact(block)
    reach = max(map(abs, values))
    if FORMATS[name].four_bits:
        scale = defined(Fraction(float(np.float32(float(reach)) / np.float32(6))) / whole, E4M3_VALUES) * whole
        codes = [
            defined(Fraction(float(np.float32(float(value / scale)))), E2M1_VALUES) if scale else Fraction(0)
            for value in values
        ]
        return [code * scale for code in codes]
    exponent = min((k for k in range(-127, 128) if reach <= 448 * Fraction(2) ** k), default=127)
    return [defined(value / Fraction(2) ** exponent, E4M3_VALUES) * Fraction(2) ** exponent for value in values]


@given(st.lists(FLOATS, min_size=32, max_size=32), st.sampled_from(["nvfp4", "mxfp8"]), st.sampled_from([1.0, 0.125]))
@settings(max_examples=25, deadline=None)
def test_activations_are_rounded_as_defined(values: list[float], name: str, whole: float) -> None:
    form, row = FORMATS[name], np.array(values, np.float32)
    rounded_values = form.rounded_activation(row[None], np.float32(whole))
    defined_fractions = [defined_activation(block, name, Fraction(whole)) for block in row.reshape(-1, form.block)]
    assert exact(rounded_values) == [value for block in defined_fractions for value in block]


@given(st.lists(FLOATS, min_size=64, max_size=64), st.sampled_from(BLOCK_FLOATS))
@settings(max_examples=25, deadline=None)
def test_weights_have_the_nearest_codes_and_quantize_idempotently(values, name) -> None:
    form, weight = FORMATS[name], np.array(values, np.float32).reshape(32, 2)
    codes, scales, whole_value = form.encode(weight)
    stored = form.decode(codes, scales, whole_value)
    grid = E2M1_VALUES if form.four_bits else E4M3_VALUES
    effective = np.repeat(form.scales(weight), form.block, axis=0)
    for value, code, scale in zip(exact(weight), exact(codes.astype(np.float32)), exact(effective), strict=True):
        assert not scale or code == defined(Fraction(float(np.float32(float(value / scale)))), grid)
    assert np.array_equal(form.decode(*form.encode(stored)), stored)
    assert np.array_equal(stored.astype(np.float16), stored) or np.abs(weight).max() < 2.0**-10, "fp16 holds them"


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=8))
def test_exponents_are_the_smallest_without_overflow(reach: list[float]) -> None:
    values = np.array(reach, np.float32)
    for value, exponent in zip(exact(values), exponents_of(values).tolist(), strict=True):
        assert value <= 448 * Fraction(2) ** exponent
        assert exponent == -127 or value > 448 * Fraction(2) ** (exponent - 1)


def test_numbers_of_e2m1_are_rounded_as_ml_dtypes_does() -> None:
    values = np.linspace(-8, 8, 4097, dtype=np.float32)
    assert np.array_equal(round_e2m1(values), values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_codes_are_packed_two_per_byte_with_the_first_one_low() -> None:
    result = written(nets.wide_net(96), "nvfp4-weights")
    stored_item = next(item for item in result.graph.initializer if item.data_type == onnx.TensorProto.FLOAT4E2M1)
    codes = onnx.numpy_helper.to_array(stored_item).reshape(-1).view(np.uint8)
    assert stored_item.raw_data == bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def written(net: onnx.ModelProto, precision: str, scheme=nets.TENSORRT_FP32, data=None, rules=()) -> onnx.ModelProto:
    return write_with_notes(net, precision, scheme, data, rules)[0]


def write_with_notes(net, precision, scheme=nets.TENSORRT_FP32, data=None, rules=()):
    return write(net, precision, scheme, nets.measured(net, data or nets.wide_data()), rules)


@pytest.mark.parametrize("scheme", WIDE)
@pytest.mark.parametrize("precision", BLOCK_FLOATS)
def test_each_layer_of_the_twin_equals_numpy_on_equal_inputs(precision, scheme, tmp_path) -> None:
    """Of whole models with rounded activations two right runs differ by 19 to 22 dB, so layers are compared."""
    form, result = FORMATS[precision], written(nets.wide_net(96), precision, scheme)
    onnx.save(result, tmp_path / "graph.onnx")
    twin = onnx.load(runnable(tmp_path / "graph.onnx", precision))
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in result.graph.initializer}
    data = nets.wide_data()
    just_above = np.nextafter(np.float32(448 * 2.0**-13), np.float32(1))  # where a logarithm comes out a little low
    data["x"][0] = np.tile(np.geomspace(1e-7, just_above, 32), 2)
    for node in ("MatMul_h", "Gemm_y"):
        multiply = nets.named(twin, node)
        source = multiply.input[0].removesuffix("/blocks_dequantized")
        names = [source, *multiply.input, multiply.output[0]]
        values = nets.values_of(twin, data, tuple({*names}), optimized=False)
        value_before, operands, right_value, output = (values[name] for name in names)
        stored = [constants[name] for name in constants if name.startswith(f"{node}/weight_")]
        assert np.array_equal(right_value, form.decode(*stored, *[np.float32(1)] * (3 - len(stored))))
        if form.activations:
            whole_constant = constants.get(f"{source}/global", np.float32(1))
            assert np.array_equal(operands, form.rounded_activation(value_before, whole_constant)), "to the bit"
        product = operands.astype(np.float64) @ right_value
        assert (
            np.abs(output - product).max()
            <= (2.0**-10 if scheme is nets.TENSORRT else 2.0**-20) * np.abs(product).max()
        )


@pytest.mark.parametrize("scheme", WIDE)
@pytest.mark.parametrize(("precision", "sm"), [*itertools.product(BLOCK_FLOATS, ["SM120", "SM121"])])
def test_tensorrt_rtx_builds_block_floats(precision: str, sm: str, scheme) -> None:
    assert nets.compiles(written(nets.wide_net(96), precision, scheme), sm, nets.WIDE_SHAPES) == ""


@pytest.mark.parametrize(
    ("precision", "sm", "builds"),
    [("nvfp4", "SM89", False), ("nvfp4-weights", "SM89", False), ("mxfp8", "SM89", True), ("mxfp8", "SM80", False)],
)
def test_refusals_match_the_compiler(precision: str, sm: str, builds: bool) -> None:
    message = nets.compiles(written(nets.wide_net(96), precision), sm, nets.WIDE_SHAPES)
    refuses = TensorRTRTX().refuses(graphs.request(f"sm_{sm[2:]}", precision))
    assert (message == "") == builds == (refuses is None), (message, refuses)


def test_a_backend_builds_an_engine_of_a_written_graph(tmp_path: Path) -> None:
    onnx.save(written(nets.wide_net(96), "nvfp4", nets.TENSORRT), tmp_path / "graph.onnx")
    specs = {
        "inputs": (TensorSpec("x", "float32", ("batch", 64)),),
        "outputs": (TensorSpec("y", "float32", ("batch", 10)),),
    }
    request = graphs.request("sm_120", "nvfp4", profiles=(ShapeProfile((("x", *nets.WIDE_SHAPES["x"]),)),), **specs)
    assert TensorRTRTX().build(request, tmp_path / "graph.onnx", tmp_path).size_bytes > 0


def test_weights_take_at_most_a_third_of_their_fp16_size() -> None:
    result = written(nets.wide_net(96), "nvfp4", nets.TENSORRT)
    stored_total = sum(len(item.raw_data) for item in result.graph.initializer if "/weight_" in item.name)
    assert stored_total <= 0.32 * 2 * (64 * 96 + 96 * 10)
    assert not [item for item in result.graph.initializer if item.name.startswith("w")], "float weights are gone"


def test_unsuitable_nodes_use_fp8_with_the_reason() -> None:
    notes = write_with_notes(nets.conv_net(), "nvfp4", data=nets.images())[1]
    assert [item.reason for item in notes.eight_bits] == [
        *["nvfp4 is for MatMul and Gemm"] * 2,
        "its depth, 8, is not a multiple of the block, 16",
    ]
    assert any(line.startswith("in fp8: Gemm_logits (Gemm): its depth") for line in notes.lines())
    result, notes = write_with_notes(nets.attention_net(), "mxfp8", data=nets.sentences())
    assert {node.op_type for node in result.graph.node} >= {"QuantizeLinear", "TRT_MXFP8DynamicQuantize"}
    assert [item.reason for item in notes.float_nodes] == ["it multiplies two activations"] * 2, "they stay in float"


def test_weight_only_formats_leave_the_rest_in_float_without_calibration() -> None:
    result, notes = write(nets.conv_net(), "nvfp4-weights", nets.TENSORRT_FP32)
    assert len(notes.float_nodes) == 3 and not nets.of_type(result, "QuantizeLinear")
    result, notes = write(net := nets.wide_net(96), "nvfp4-weights", nets.TENSORRT_FP32)
    assert len(notes.quantized) == 2
    assert nets.sqnr_db(nets.run(net, nets.wide_data()), nets.run(emulate_blocks(result), nets.wide_data())) > 15


@pytest.mark.parametrize(("exponent", "fits"), [(-10, False), (-9, True), (14, True), (15, False)])
def test_weights_with_scales_beyond_fp16_are_omitted(exponent: int, fits: bool) -> None:
    net = nets.build(
        "float[batch,64] x", "float[batch,8] y", "y = MatMul(x, w)", {"w": np.full((64, 8), 2.0**exponent)}
    )
    notes = write(net, "nvfp4-weights", nets.TENSORRT_FP32)[1]
    assert [item.reason for item in notes.float_nodes] == (
        [] if fits else [f"its weights reach {2.0**exponent:.3g}, whose scales fp16 does not hold"]
    )


def test_activations_of_other_ranks_are_omitted() -> None:
    net = nets.build("float[batch,2,3,64] x", "float[batch,2,3,8] y", "y = MatMul(x, w)", {"w": np.ones((64, 8))})
    notes = write(net, "mxfp8", nets.TENSORRT_FP32)[1]
    assert "rank 4; TensorRT takes blocks of rank 2 and 3" in notes.float_nodes[0].reason


def test_rules_and_missing_ranges() -> None:
    notes = write_with_notes(nets.wide_net(96), "nvfp4", rules=[Override("Gemm", "fp16")])[1]
    assert notes.quantized == ("MatMul_h",) and "overrides says fp16" in notes.float_nodes[0].reason
    zero = Ranges({"x": (0.0, 0.0), "r": (0.0, 1.0)}, "minmax", "0" * 64, 1)
    _, notes = write(nets.wide_net(96), "nvfp4", nets.TENSORRT, zero)
    assert "zero in every calibration sample" in notes.float_nodes[0].reason


def test_projections_that_read_one_tensor_share_its_quantization() -> None:
    result = written(nets.attention_net(), "nvfp4", data=nets.sentences())
    assert len(nets.of_type(result, "TRT_FP4DynamicQuantize")) == 5 and nets.constant(result, "x/global").shape == ()


def search(precision: str, *floors_db: float) -> tuple:
    """A net, the SQNR of its plain graph on unseen samples; choice, notes and SQNR without a floor, and with each."""
    net, data, held_out = nets.attention_net(), nets.sentences(96), nets.sentences(64, 99)
    runs = [(8, {name: values[index : index + 8] for name, values in data.items()}) for index in range(0, 96, 8)]
    ranges, expected, searched_choices = nets.measured(net, data), nets.run(net, held_out), []
    target = SearchTarget(ranges, nets.TENSORRT_FP32, precision=precision)

    def lost_db(graph: onnx.ModelProto) -> float:
        return nets.sqnr_db(expected, nets.run(emulate_blocks(graph), held_out, optimized=False))

    for floor in (None, *map(SearchFloor, floors_db)):
        (choice,) = choose_each(net, [target], runs, floor, "none")
        more_fields = {"float_nodes": choice.left, "formats": choice.formats}
        graph, notes = write(choice.model, precision, nets.TENSORRT_FP32, choice.ranges, **more_fields)
        searched_choices.append((choice, notes, lost_db(graph)))
    return net, lost_db(write(net, precision, nets.TENSORRT_FP32, ranges)[0]), searched_choices


def test_a_floor_mixes_nvfp4_with_wider_formats_and_rounding_errors_cancel() -> None:
    """Groups that cost the most go on in fp8 or floats; of the others the weights are rounded for the activations."""
    net, plain_db, searched_match = search("nvfp4", 18.0, 44.0)
    counts, messages = [], re.compile("the floor: quantized alone it leaves .* dB in nvfp4, .* dB in fp8")
    for choice, notes, _ in searched_match:
        point, float_nodes = choice.point, [item for item in notes.float_nodes if item.node in choice.left]
        counts.append((len(notes.quantized), len(notes.eight_bits), len(float_nodes)))
        assert all(messages.match(item.reason) for item in (*notes.eight_bits, *float_nodes))
        assert f"in nvfp4{point.mix_text}: {point.sqnr_db:.1f} dB" in choice.summary
        assert sum(dict(point.mix).values()) == pytest.approx(1 - point.share)
    whole_count, mixed_count, count = counts
    assert whole_count == (7, 0, 0) and searched_match[0][2] > plain_db + 0.2
    assert sum(mixed_count) == 7 and mixed_count[0] >= 3 and mixed_count[1] and searched_match[1][2] > 17.5
    assert sum(count) == 7 and all(count[1:]) and searched_match[2][2] > 42, "int8 and fp8 alone do not reach that"
    exact_matrices, rounded_matrices = (
        matrices(part, find_groups(part, find_sites(part)[0])) for part in map(prepare_model, (net, choice.model))
    )
    same_nodes = {node for node in choice.left if np.array_equal(exact_matrices[node], rounded_matrices[node])}
    assert same_nodes == {node for node, precision in choice.formats.items() if precision == "fp16"}


@pytest.mark.parametrize("wider", ["mxfp8", "int8", "fp8"])
def test_a_graph_of_nvfp4_may_have_products_in_a_wider_format(wider: str) -> None:
    net, data = nets.wide_net(96), nets.wide_data()
    args = net, "nvfp4", nets.TENSORRT, nets.measured(net, data)
    mixed_path, notes = write(*args, formats={"MatMul_h": wider})
    assert (notes.quantized, notes.formats) == (("Gemm_y",), {"MatMul_h": wider})
    assert f"in {wider}: MatMul_h (MatMul): quantization.overrides says {wider}" in notes.lines()
    rounded_types = {to_array.dtype.name for to_array in map(onnx.numpy_helper.to_array, mixed_path.graph.initializer)}
    assert ("int8" in rounded_types) == (wider == "int8")
    assert nets.compiles(mixed_path, "SM120", nets.WIDE_SHAPES) == ""
    recipe = QuantizationRecipe(*args, (), {}, True, formats=notes.formats)
    assert recipe.write()[0] == mixed_path
    expected, graphs = nets.run(net, data), (write(*args)[0], mixed_path)
    plain_sqnr, better = (nets.sqnr_db(expected, nets.run(emulate_blocks(graph), data, False)) for graph in graphs)
    assert better > plain_sqnr + 1


def test_a_depth_of_80_goes_on_in_fp8() -> None:
    net, data = nets.wide_net(80), nets.wide_data()
    notes = write(net, "nvfp4", nets.TENSORRT, nets.measured(net, data), formats={"Gemm_y": "mxfp8"})[1]
    assert notes.formats == {"Gemm_y": "fp8"} and "not a multiple of the block, 32" in notes.eight_bits[0].reason


def test_generations_of_a_format_have_its_mixing_partners() -> None:
    for precision in BLOCK_FLOATS:
        assert max(LEAST.get(other, (7, 5)) for other in list_formats(precision)) == LEAST[precision]


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp8"])
def test_compensated_weights_lie_on_the_grid_and_lose_less_at_the_output(precision: str) -> None:
    rng, form = np.random.default_rng(3), FORMATS[precision]
    inputs = rng.normal(size=(512, 64)).astype(np.float32) @ rng.normal(size=(64, 64)).astype(np.float32)
    weight = rng.normal(size=(64, 24)).astype(np.float32)
    rounded_weight = compensate(weight, inputs.T @ inputs / np.float32(512), form)
    assert np.array_equal(form.decode(*form.encode(rounded_weight)), rounded_weight), (
        "writing the graph gives the same weights"
    )
    lost, plain = (np.square(inputs @ (other - weight)).sum() for other in (rounded_weight, nearest(weight, form)))
    assert lost < 0.7 * plain


def test_a_search_rounds_fp8_with_cancelling_errors_and_leaves_nodes_in_fp16() -> None:
    _, plain_db, ((_, whole_notes, whole_db), (_, notes, floored_db)) = search("fp8", 30.0)
    assert plain_db + 0.5 < whole_db < floored_db - 2
    floats = [[item for item in entry.float_nodes if "the floor" in item.reason] for entry in (whole_notes, notes)]
    assert not floats[0] and 0 < len(floats[1]) < 9
