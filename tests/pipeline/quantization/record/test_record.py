import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from enginesmith.core.codec import encode
from pipeline.quantization.insertion_points import activations, prepare_model
from pipeline.quantization.record import BINS, PICTURES, Evidence, record
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.schemes.write import write
from pipeline.quantization.search.selection import SearchFloor
from pipeline.quantization.settings.runs import divide_runs
from pipeline.quantization.shares import narrow_share
from pipeline.quantization.statistics.histogram import LogHistogram
from pipeline.quantization.statistics.methods import MINMAX, MSE, ranges
from pipeline.quantization.statistics.observations import Observations, TensorStatistics
from tests.pipeline.quantization import small_nets as nets
from tests.pipeline.quantization.search.outlier_nets import choose, noise, outlier_net, runs


def values_of(model: ModelProto, arrays: dict) -> dict[str, np.ndarray]:
    """Every float activation, copied out."""
    return nets.values_of(prepare_model(model), arrays, activations(model))


def observed(model: ModelProto, arrays: dict) -> Observations:
    tensors = {
        name: TensorStatistics(float(v.min()), float(v.max()), v.size, 1, histogram=LogHistogram.of(v))
        for name, v in values_of(model, arrays).items()
    }
    return Observations("0" * 64, "0" * 64, ((0, len(next(iter(arrays.values())))),), tensors)


def recorded(model, arrays, scheme=nets.TENSORRT_FP32, precision="int8", method=None, overrides=()):
    seen_observations = observed(model, arrays)
    chosen = ranges(seen_observations, method or MINMAX, scheme.activation)
    written_path, notes = write(model, precision, scheme, chosen, overrides)
    shapes = {name: array.shape for name, array in arrays.items()}
    elements = {name: float(item.elements) for name, item in seen_observations.tensors.items()}
    share = narrow_share(prepare_model(model), notes.quantized, shapes, elements)
    evidence = Evidence(model, chosen, seen_observations, weight_levels=scheme.weight_levels, share=share)
    return encode(record(written_path, notes, evidence)), written_path


def by_name(document: dict) -> dict:
    return {tensor["name"]: tensor for tensor in document["tensors"]}


@pytest.mark.parametrize("scheme", sorted(nets.SCHEMES))
def test_every_quantized_tensor_is_there_with_its_readers(scheme):
    result, written_recording = recorded(nets.conv_net(), nets.images(), nets.SCHEMES[scheme])
    tensors = by_name(result)
    assert {"image", "r1", "w1", "w2", "w3"} <= tensors.keys()
    assert "flat" in tensors or "pooled" in tensors
    assert tensors["w2"]["role"] == "weight"
    assert tensors["w2"]["readers"] == [
        next(n.name for n in written_recording.graph.node if n.output[0].startswith("c2") or n.name == "Conv_c2")
    ]
    assert tensors["image"]["readers"] and tensors["image"]["format"] == nets.SCHEMES[scheme].activation
    assert all(item["sqnr_db"] is None or 20 < item["sqnr_db"] < 80 for item in tensors.values())
    assert result["macs_share"] == 1.0 and result["left"] == [] and result["choice"] is None
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("levels", [127, 64])
def test_a_weight_has_the_range_that_its_scheme_uses(levels):
    result = by_name(recorded(nets.conv_net(), nets.images(), replace(nets.SCHEMES["cpu"], weight_levels=levels))[0])
    for item in (result["w1"], result["w2"]):
        assert item["range"] == [-levels * item["scale"], levels * item["scale"]]
        assert item["range"][1] >= max(map(abs, item["seen"])) * (1 - 1e-6)


def test_an_activation_has_the_sqnr_and_clipping_of_its_own_values():
    model, arrays = nets.conv_net(), nets.images()
    result = by_name(recorded(model, arrays, method=MSE)[0])
    for name in ("image", "r1"):
        values, item = values_of(model, arrays)[name].astype(np.float64), result[name]
        step = item["scale"]
        rounded_array = np.clip(np.rint(values / step), -128, 127) * step
        assert item["sqnr_db"] == pytest.approx(nets.sqnr_db(values, rounded_array), abs=0.3)
        assert item["seen"] == [values.min(), values.max()] and item["range"] == [-128 * step, 127 * step]
        clipped_mean = np.mean((values > 127.5 * step) | (values < -128.5 * step))
        assert item["clipped"] == pytest.approx(clipped_mean, abs=2e-3) and item["measured"] == "histogram"
    assert result["image"]["clipped"] > 0


@pytest.mark.parametrize(
    ("precision", "scheme"), [("int8", nets.CPU), ("int8", nets.TENSORRT_FP32), ("fp8", nets.TENSORRT_FP32)]
)
def test_a_weight_has_the_sqnr_of_the_multiplied_values(precision, scheme):
    result, written_recording = recorded(nets.conv_net(), nets.images(), scheme, precision)
    node = next(n for n in written_recording.graph.node if n.op_type == "Gemm")
    (multiplied_value,) = nets.values_of(written_recording, nets.images(), node.input[1:2], optimized=False).values()
    exact_array = onnx.numpy_helper.to_array(next(i for i in nets.conv_net().graph.initializer if i.name == "w3"))
    assert by_name(result)["w3"]["sqnr_db"] == pytest.approx(nets.sqnr_db(exact_array, multiplied_value), abs=0.02)


def test_the_share_of_work_counts_multiplications():
    result, _ = recorded(nets.conv_net(), nets.images(), overrides=[Override("Conv", "fp16")])
    first_number, second_number, last_number = 8 * 64 * 9, 8 * 64 * 8 * 9, 80
    assert result["macs_share"] == pytest.approx(last_number / (first_number + second_number + last_number))
    assert [item["op_type"] for item in result["left"]] == ["Conv", "Conv"]
    assert result["left"][0]["reason"] == "quantization.overrides says fp16" and result["quantized"] == 1


def test_an_original_8_bit_weight_is_not_quantized():
    net = nets.x_net(
        "f = DequantizeLinear(v, s) g = Mul(f, half) a = MatMul(x, w) y = Mul(a, g)",
        v=np.full(5, 3, np.int8), s=np.float64(0.5), half=np.float64(0.5),
    )  # fmt: skip
    result, _ = recorded(net, nets.x_values())
    assert [item["name"] for item in result["tensors"] if item["role"] == "weight"] == ["w"]


def test_the_worst_activations_come_first_and_have_histograms():
    chain = [f"h{i + 1} = MatMul({f'h{i}' if i else 'x'}, w{i})" for i in range(8)]
    matrices = {f"w{i}": np.random.default_rng(i).normal(size=(5, 5)) for i in range(8)}
    result, _ = recorded(nets.x_net("\n".join([*chain, "y = Relu(h8)"]), **matrices), nets.x_values())
    decibels = [item["sqnr_db"] for item in result["tensors"] if item["sqnr_db"] is not None]
    assert decibels == sorted(decibels)
    drawn_items = [item for item in result["tensors"] if item["histogram"]]
    rest = [i for i in result["tensors"] if i["role"] == "activation" and not i["histogram"]]
    assert len(drawn_items) == PICTURES and len(rest) == 2
    assert max(item["sqnr_db"] for item in drawn_items) <= min(item["sqnr_db"] for item in rest)
    for item in drawn_items:
        assert len(item["histogram"]["counts"]) == BINS
        assert item["histogram"]["span"][0] <= item["range"][0] <= item["range"][1] <= item["histogram"]["span"][1]


def test_a_rewritten_stem_is_recorded_in_its_original_form():
    weights = {"w": np.random.default_rng(0).normal(size=(4, 3, 3, 3))}
    text = "y = Conv<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x, w)"
    model = nets.build("float[batch,3,8,8] x", "float[batch,4,4,4] y", text, weights)
    arrays = {"x": np.random.default_rng(1).normal(size=(8, 3, 8, 8)).astype(np.float32)}
    result, written_recording = recorded(model, arrays, nets.CPU)
    assert [node for node in written_recording.graph.node if node.op_type == "SpaceToDepth"]
    tensors = by_name(result)
    assert {"x", "w", "y"} == tensors.keys()
    assert all(40 < item["sqnr_db"] < 60 for item in tensors.values())
    assert result["macs_share"] == 1.0


def test_equal_input_gives_an_equal_record():
    assert recorded(nets.conv_net(), nets.images())[0] == recorded(nets.conv_net(), nets.images())[0]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("scheme", [nets.TENSORRT, nets.CPU])
def test_a_search_is_recorded_with_smoothed_activations_and_rounded_weights(residual, scheme):
    model, arrays = outlier_net(residual), noise(96)
    seen = observed(model, arrays)
    measured_ranges = ranges(seen, MINMAX, scheme.activation)
    chosen = choose(model, measured_ranges, scheme, runs(arrays), SearchFloor(sqnr_db=5))
    written_path, notes = write(chosen.model, "int8", scheme, chosen.ranges, float_nodes=chosen.left)
    document = chosen.document(SearchFloor(sqnr_db=25))
    choice = document.recorded, document.weight_db
    doc = encode(record(written_path, notes, Evidence(chosen.model, chosen.ranges, seen, chosen.smoothed, *choice)))
    tensors = [item for item in doc["tensors"] if item["measured"] == "rows"]
    assert tensors
    loud = by_name(recorded(model, arrays, scheme)[0])["n"]["sqnr_db"]
    fitted_array = np.concatenate([inputs["x"] for _, inputs in divide_runs(runs(arrays))[0]])
    values = values_of(chosen.model, {"x": fitted_array})
    for item in tensors:
        exact_value, step = values[item["name"]].astype(np.float64), item["scale"]
        low = item["range"][0]
        rounded = np.clip(np.rint((exact_value - low) / step), 0, 255) * step + low
        assert item["sqnr_db"] == pytest.approx(nets.sqnr_db(exact_value, rounded), abs=0.5) and item["sqnr_db"] != loud
    assert all(20 < item["sqnr_db"] < 60 for item in doc["tensors"] if item["role"] == "weight")
    assert doc["choice"]["floor_db"] == 25 and doc["choice"]["chosen"]["share"] == pytest.approx(chosen.point.share)
    json.dumps(doc, allow_nan=False)
