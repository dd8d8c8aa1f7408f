import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec
from pipeline.quantization.insertion_points import activations, prepare_model
from pipeline.quantization.statistics.histogram import LogHistogram, count_into, empty_counts
from pipeline.quantization.statistics.observations import Observations, TensorStatistics, in_units, join_spans
from pipeline.quantization.statistics.observe import observe, open_tapped
from tests.pipeline.quantization.small_nets import IMAGE, build, conv_net, images, values_of, x_net
from tests.pipeline.quantization.small_nets import samples as saved_samples
from validation.data.samples import Samples

QUICK = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BATCH24 = Dim("batch", 1, 4, 24)
X = TensorSpec("x", "float32", ("batch", 5))


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def conv(tmp_path: Path, order: list[int] | None = None, dim: Dim = BATCH24) -> tuple[Path, Samples]:
    arrays = images()
    arrays = {"image": arrays["image"][order]} if order else arrays
    return saved(conv_net(), tmp_path), saved_samples(tmp_path, arrays, (IMAGE,), dim)


def wide_net() -> onnx.ModelProto:
    """Enough channels for onnxruntime's blocked layout, 32 of them filling its blocks and 20 of them not."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (32, 3, 3, 3), "w2": (20, 32, 3, 3), "b": (20,), "w3": (32, 20, 1, 1)}
    weights = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    text = """
        a = Conv<kernel_shape=[3,3]>(x, w1)
        c = Conv<kernel_shape=[3,3]>(a, w2, b)
        s = Sigmoid(c)
        y = Conv<kernel_shape=[1,1]>(s, w3)
    """
    return build("float[batch,3,12,12] x", "float[batch,32,8,8] y", text, weights)


def test_extremes_and_histograms_cover_every_value(tmp_path: Path) -> None:
    model = wide_net()
    arrays = {"x": np.random.default_rng(1).normal(size=(6, 3, 12, 12)).astype(np.float32)}
    opened_samples = saved_samples(tmp_path, arrays, (TensorSpec("x", "float32", ("batch", 3, 12, 12)),))
    observations = observe(saved(model, tmp_path), opened_samples)
    assert set(observations.tensors) == {"x", "a", "c", "s", "y"}
    values = values_of(model, arrays, ("a", "c", "s", "y")) | arrays
    for name, tensor in observations.tensors.items():
        assert tensor.elements == tensor.histogram.total == values[name].size, name
        assert (tensor.low, tensor.high) == pytest.approx((values[name].min(), values[name].max()), rel=1e-5), name
        for share in (0.01, 0.5, 0.99):
            expected = np.quantile(values[name], share)
            assert tensor.histogram.quantile(share) == pytest.approx(expected, rel=0.02, abs=0.02), name


@QUICK
@given(st.integers(1, 24), st.permutations(range(24)))
def test_observations_depend_neither_on_batch_size_nor_on_order(tmp_path: Path, size: int, order: list[int]) -> None:
    observations = observe(*conv(tmp_path), threads=1)
    other_observations = observe(*conv(tmp_path, order, Dim("batch", 1, size, 24)), threads=1)
    assert observations.digest == other_observations.digest  # the very same numbers, averages and histograms included


@QUICK
@given(st.lists(st.integers(0, 24), max_size=3), st.randoms())
def test_parts_merge_to_the_whole_in_any_order(tmp_path: Path, cuts: list[int], shuffled: object) -> None:
    model, opened_model = conv(tmp_path)
    edges = sorted({0, 24, *cuts})
    parts = [observe(model, opened_model, span=span) for span in pairwise(edges)]
    shuffled.shuffle(parts)
    merge = parts[0]
    for part in parts[1:]:
        merge = merge.merge(part)
    assert merge == observe(model, opened_model) and merge.spans == ((0, 24),)


def test_parts_of_different_data_or_the_same_part_twice_do_not_merge(tmp_path: Path) -> None:
    model, opened_model = conv(tmp_path)
    part = observe(model, opened_model, span=(0, 8))
    with pytest.raises(DataError, match="sample 4 was observed twice"):
        part.merge(observe(model, opened_model, span=(4, 12)))
    with pytest.raises(DataError, match="only one of these observations has tensor"):
        part.merge(observe(model, opened_model, ["image"], span=(8, 12)))
    with pytest.raises(DataError, match="of another dataset"):
        part.merge(observe(*conv(tmp_path, list(range(23, -1, -1))), span=(8, 12)))


def test_a_file_survives_reading_and_equal_observations_give_equal_bytes(tmp_path: Path) -> None:
    text = "p = Greater(x, zero) m = Where(p, x, fill) y0 = Softmax(m) y = MatMul(y0, w) n = Where(p, y, missing)"
    weights = {"w": np.eye(5), "zero": np.float32(-1), "fill": np.float32(-np.inf), "missing": np.float32(np.nan)}
    model = build("float[batch,5] x", "float[batch,5] n", text, weights)
    arrays = {"x": np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)}
    opened_samples = saved_samples(tmp_path, arrays, (X,))
    seen = observe(saved(model, tmp_path), opened_samples, activations(model), histograms=["x", "y0"])
    second_observations = Observations.from_bytes(seen.to_bytes())
    assert second_observations == seen and second_observations.to_bytes() == seen.to_bytes()
    assert {name for name, item in seen.tensors.items() if item.histogram} == {"x", "y0"}
    assert [seen.tensors[name].finite for name in ("m", "y", "n")] == [False, True, False], "marks of what is missing"


@pytest.mark.parametrize("at", [0, 4, 30, -9])
def test_a_damaged_file_is_refused(tmp_path: Path, at: int) -> None:
    data = bytearray(observe(*conv(tmp_path)).to_bytes())
    data[at] ^= 0xFF
    with pytest.raises(DataError, match="not an observations file"):
        Observations.from_bytes(bytes(data))


CONV = "c = Conv<kernel_shape=[3,3]>(x, k)"
NHWC = "t = Transpose<perm=[0,2,3,1]>"
ONE, ROWS = "float[batch,32,6,6] y", "float[batch,6,6,10] y"
CASES = {
    "a transpose behind a convolution": (f"{CONV} d = Relu(c) {NHWC}(d) y = MatMul(t, w)", ROWS),
    "both are outputs": (f"{CONV} d = Relu(c) {NHWC}(d)", "float[batch,6,6,32] t, float[batch,32,6,6] d"),
    "two transposes": (f"{CONV} {NHWC}(c) u = Transpose<perm=[0,2,3,1]>(c) s = Add(t, u) y = MatMul(s, w)", ROWS),
    "a transpose there and back": (f"{CONV} {NHWC}(c) y = Transpose<perm=[0,3,1,2]>(t)", ONE),
    "copies": ("i = Identity(x) c = Conv<kernel_shape=[3,3]>(i, k) d = Identity(c) y = Identity(d)", ONE),
    "equal nodes": (f"{CONV} e = Conv<kernel_shape=[3,3]>(x, k) s = Add(c, e) y = Relu(s)", ONE),
    "a constant part": (f"{CONV} e = Conv<kernel_shape=[3,3]>(still, k) f = Relu(e) y = Add(c, f)", ONE),
    "what nothing reads": (f"{CONV} dead = Relu(c) y = Sigmoid(c)", ONE),
    "a norm that is folded": (f"{CONV} n = BatchNormalization(c, g, g, g, g) y = Relu(n)", ONE),
}


@pytest.mark.parametrize("text", CASES)
def test_every_tensor_is_measured_despite_optimization(tmp_path: Path, text: str) -> None:
    """Merged, moved, renamed, folded or removed: each has the values that the graph has as it is written."""
    body, outputs = CASES[text]
    rng = np.random.default_rng(0)
    weights = {"k": rng.normal(size=(32, 3, 3, 3)), "w": rng.normal(size=(32, 10)), "g": np.ones(32)}
    weights |= {"still": rng.normal(size=(1, 3, 8, 8))}
    loaded_values = {name: values for name, values in weights.items() if re.search(rf"\b{name}\b", body)}
    graph = prepare_model(build("float[batch,3,8,8] x", outputs, body, loaded_values))
    names, inputs = activations(graph), {"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)}
    expected = values_of(graph, inputs, [name for name in names if name != "x"], optimized=False)
    tensor_names = list(open_tapped(graph, names, tmp_path).run(inputs))
    assert [name for name, _ in tensor_names] == list(names)
    for name, values in tensor_names:
        assert np.allclose(np.sort(values, None), np.sort((expected | inputs)[name], None), rtol=1e-4, atol=1e-4), name


def test_slices_fused_to_a_split_are_measured(tmp_path: Path) -> None:
    """The 128 lengths of the Split are 1024 bytes, which shape inference reads from the model alone."""
    count = 128
    weights = {"w": np.eye(count), **{f"i{i}": np.array([i]) for i in range(count + 1)}}
    text = " ".join(f"s{i} = Slice(h, i{i}, i{i + 1}, i1)" for i in range(count))
    joined_text = f"h = Relu(x) {text} c = Concat<axis=1>({', '.join(f's{i}' for i in range(count))}) y = MatMul(c, w)"
    model = build(f"float[batch,{count}] x", f"float[batch,{count}] y", joined_text, weights)
    tapped_result = open_tapped(model, ["c"], tmp_path).run({"x": np.eye(count, dtype=np.float32)})
    assert [(name, values.min(), values.max()) for name, values in tapped_result] == [("c", 0.0, 1.0)]


def test_blocked_layout_is_measured_in_place_only_with_full_blocks(tmp_path: Path) -> None:
    places = open_tapped(prepare_model(wide_net()), ["a", "c", "y"], tmp_path).places
    optimized_model = onnx.load(tmp_path / "tapped.onnx", load_external_data=False)
    copies = [node.output[0] for node in optimized_model.graph.node if node.op_type == "ReorderOutput"]
    assert places["c"] == "c"  # 20 channels would bring padding with them
    assert "a" not in copies and "y" not in copies


def test_large_values_do_not_hide_nan_from_histograms(tmp_path: Path) -> None:
    model = saved(x_net("r = Sqrt(x) y = MatMul(r, w)", w=np.eye(5)), tmp_path)
    arrays = {"x": np.full((8, 5), 1e36, np.float32)}
    arrays["x"][6, 1] = -1
    for histograms in (True, False):
        with pytest.raises(DataError, match="sample 6 makes tensor 'r' NaN"):
            observe(model, saved_samples(tmp_path, arrays, (X,)), histograms=histograms)


@pytest.mark.parametrize("histograms", [True, False])
@pytest.mark.parametrize("at", [0, 1, 2**15 - 1, 2**15, 70_000])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001])
def test_a_nan_is_found_at_any_place_and_with_any_bits(bits, at, histograms):
    """In a tensor of several blocks; one whose payload is in the low bits is counted where an infinity is."""
    values = np.ones(70_001, np.float32)
    values[at] = np.array([bits], np.uint32).view(np.float32)[0]
    assert np.isnan(count_into(empty_counts() if histograms else None, values)).all()


def test_empty_tensors_and_negative_zeros_are_measured_equally_everywhere() -> None:
    assert count_into(None, np.empty((0, 3), np.float32)) == (np.inf, -np.inf)
    assert [str(end) for end in count_into(None, np.array([-0.0], np.float32))] == ["0.0", "0.0"]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20), st.randoms())
def test_averages_are_exact_in_any_order(values: list[float], shuffled: object) -> None:
    def total(items: list[float]) -> TensorStatistics:
        seen_statistics = TensorStatistics()
        for value in items:
            seen_statistics = seen_statistics.extend_with(value, value, 1)
        return seen_statistics

    other_values = list(values)
    shuffled.shuffle(other_values)
    assert total(values) == total(other_values)
    assert total(values).averages[0] == pytest.approx(float(np.mean(np.array(values, np.longdouble))), rel=1e-12)


def test_spans_are_joined() -> None:
    assert join_spans([(4, 8), (0, 4), (10, 12), (9, 9)]) == ((0, 8), (10, 12))
    assert in_units(2.0**-149) == 1


def test_a_measured_model_input_needs_no_tap(tmp_path: Path) -> None:
    observations = observe(*conv(tmp_path), tensors=["image"])
    assert observations.tensors["image"].histogram == LogHistogram.of(images()["image"])
