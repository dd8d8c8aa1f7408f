import copy
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.search.sensitivity import _within
from pipeline.quantization.settings import moments as moments_module
from pipeline.quantization.settings.groups import compensate, find_groups, nearest, steps_of
from pipeline.quantization.settings.moments import (
    Moments,
    StartedRuns,
    Window,
    as_matrices,
    as_weight,
    batches,
    find_layers,
    moments_of,
    patches,
)
from pipeline.quantization.settings.smooth import FittedKind, apply_plans, fit_convolutions
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, runs
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, build, constant, of_type, run, sqnr_db

# attributes, shape of the weight, spatial sizes of the activation, channels of the activation
KINDS = {
    "padded": ("pads=[1,1,1,1]", (6, 4, 3, 3), (9, 8), 4),
    "pointwise": ("strides=[2,2]", (6, 4, 1, 1), (9, 8), 4),
    "strided": ("strides=[2,1], pads=[0,1,2,0]", (6, 4, 3, 2), (9, 8), 4),
    "dilated": ("dilations=[2,3], pads=[2,2,2,2]", (6, 4, 3, 3), (9, 8), 4),
    "grouped": ("group=2, pads=[1,1,1,1]", (6, 2, 3, 3), (9, 8), 4),
    "depthwise": ("group=4, strides=[2,2]", (8, 1, 3, 3), (9, 8), 4),
    "1-d": ("strides=[2], dilations=[2], pads=[1,3]", (6, 4, 5), (20,), 4),
    "same upper": ('auto_pad="SAME_UPPER", strides=[2,2]', (6, 4, 3, 4), (9, 8), 4),
    "same lower": ('auto_pad="SAME_LOWER", strides=[2,3]', (6, 4, 2, 4), (9, 8), 4),
    "valid": ('auto_pad="VALID"', (6, 4, 3, 3), (9, 8), 4),
}


def net(kind: str, bias: bool = True) -> ModelProto:
    attributes, shape, sizes, channels = KINDS[kind]
    rng, spatial = np.random.default_rng(3), ",".join(map(str, sizes))
    weights = {"w": rng.normal(size=shape) / 4, "b": rng.normal(size=shape[0])}
    text = f"y = Conv<{attributes}>(x, w{', b' if bias else ''})"
    sizes_out = ",".join("?" * len(sizes))
    return build(f"float[batch,{channels},{spatial}] x", f"float[batch,{shape[0]},{sizes_out}] y", text, weights)


def data(kind: str, count: int, seed: int = 5) -> dict[str, np.ndarray]:
    """Smooth images with a mean far from zero: neighbours are correlated, as in photographs."""
    _, _, sizes, channels = KINDS[kind]
    values = np.random.default_rng(seed).normal(size=(count, channels, *sizes))
    for axis in range(2, values.ndim):
        values = values.cumsum(axis=axis) / 3
    mixed_product = np.einsum("oc,nc...->no...", np.random.default_rng(0).normal(size=(channels, channels)), values)
    return {"x": np.maximum(mixed_product + 1, 0).astype(np.float32)}


def window_of(model: ModelProto) -> tuple[Window, np.ndarray]:
    weight = constant(model, "w")
    return Window.of(of_type(model, "Conv")[0], weight.shape), weight


@pytest.mark.parametrize("kind", KINDS)
def test_patches_times_weights_equal_the_convolution(kind):
    model, inputs = net(kind, bias=False), data(kind, 3)
    window, weight = window_of(model)
    expected = run(model, inputs)
    places = window.places(inputs["x"].shape)
    rows = patches(inputs["x"], window, np.arange(np.prod(places)))
    result = np.einsum("rgk,gkn->rgn", rows, as_matrices(weight, window.groups)).reshape(*places, -1)
    assert places == (expected.shape[0], *expected.shape[2:])
    assert np.allclose(np.moveaxis(result, -1, 1), expected, atol=1e-4)
    assert np.array_equal(as_weight(as_matrices(weight, window.groups), weight.shape), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_equal_those_of_all_patches(kind):
    model, inputs = net(kind), data(kind, 12)
    window, _ = window_of(model)
    graph = prepare_model(model)
    batch = find_layers(graph, find_sites(graph)[0], {})
    result = moments_of(graph, batch, StartedRuns(runs(inputs, 4)))[0][batch[0].site.node]
    rows = patches(inputs["x"], window, np.arange(np.prod(window.places(inputs["x"].shape)))).astype(np.float64)
    assert result.count == len(rows)
    assert np.allclose(result.mean, rows.mean(axis=0), atol=1e-5)
    second_moments = moments_of(graph, batch, StartedRuns(runs(inputs, 4)))[0][batch[0].site.node]
    covariance, about_zero_values = result.take_covariance(), second_moments.take_covariance(about_zero=True)
    for group in range(window.groups):
        assert np.allclose(covariance[group], np.cov(rows[:, group].T, bias=True), atol=1e-3)
        assert np.allclose(about_zero_values[group], rows[:, group].T @ rows[:, group] / len(rows), atol=1e-3)


def test_at_most_the_wanted_patches_are_drawn_from_every_run(monkeypatch):
    monkeypatch.setattr("pipeline.quantization.settings.moments.LEAST_PATCHES", 130)
    model, inputs = net("padded"), data("padded", 24)
    graph = prepare_model(model)
    batch = find_layers(graph, find_sites(graph)[0], {})
    assert moments_of(graph, batch, StartedRuns(runs(inputs, 4)))[0][batch[0].site.node].count == 130


@pytest.mark.parametrize(("most", "taken"), [(20, 4), (10, 8)])
def test_patches_come_evenly_from_few_runs(monkeypatch, most, taken):
    for name, value in (("LEAST_PATCHES", 80), ("PATCHES_PER_VALUE", 1), ("PATCHES_PER_SAMPLE", most)):
        monkeypatch.setattr(f"pipeline.quantization.settings.moments.{name}", value)
    model, inputs = net("padded"), data("padded", 16)
    graph = prepare_model(model)
    batch, seen = find_layers(graph, find_sites(graph)[0], {}), []
    monkeypatch.setattr("pipeline.quantization.settings.moments._draw", lambda values, *_: seen.append(values) or ())
    moments_of(graph, batch, StartedRuns(runs(inputs, 1)))
    first_input = inputs["x"][:: 16 // taken]
    assert len(seen) == taken and np.array_equal(np.concatenate(seen), first_input), "16 samples, 80 patches"


def test_sums_keep_their_digits_far_from_zero():
    rows = (1000 + np.random.default_rng(0).normal(size=(4096, 1, 3))).astype(np.float32)
    moments = Moments()
    for part in np.split(rows, 8):
        moments.add(part)
    assert np.allclose(moments.take_covariance()[0], np.cov(rows[:, 0].T.astype(np.float64), bias=True), atol=1e-3)


def test_layers_are_processed_together_within_memory():
    model = build(
        "float[batch,4,9,8] x", "float[batch,4,9,8] y",
        "a = Conv(x, w)\n b = Conv(a, w)\n c = Conv(b, w)\n y = Conv(c, w)",
        {"w": np.ones((4, 4, 1, 1))},
    )  # fmt: skip
    graph = prepare_model(model)
    layers = find_layers(graph, find_sites(graph)[0], {})
    assert [len(batch) for batch in batches(layers, max_bytes=3 * layers[0].bytes)] == [3, 1]
    assert [len(batch) for batch in batches(layers, max_bytes=1)] == [1, 1, 1, 1]
    assert [len(batch) for batch in batches(layers * 5)] == [8, 8, 4]


def test_a_silent_group_is_rounded_beside_a_loud_one():
    matrix = np.random.default_rng(0).normal(size=(2, 6, 5)).astype(np.float32)
    moments = np.stack([np.zeros((6, 6)), np.eye(6) + 0.5]).astype(np.float32)
    pair = compensate(matrix, moments)
    assert np.array_equal(pair[0], nearest(matrix[0])) and np.array_equal(pair[1], compensate(matrix[1], moments[1]))


@pytest.mark.parametrize("scheme", [TENSORRT_FP32, CPU], ids=["tensorrt", "cpu"])
@pytest.mark.parametrize("kind", ["padded", "grouped", "depthwise", "1-d"])
def test_weights_are_rounded_better_than_to_nearest(kind, scheme):
    model, fitted_data, unseen_data = net(kind), data(kind, 128, 1), data(kind, 64, 2)
    ranges, expected = all_ranges(model, fitted_data), run(model, unseen_data)
    result = choose(model, ranges, scheme, runs(fitted_data))

    def error(weights: np.ndarray) -> float:
        window, weight = window_of(model)
        rows = patches(unseen_data["x"], window, np.arange(np.prod(window.places(unseen_data["x"].shape))))
        lost_product = np.einsum("rgk,gkn->rgn", rows, weights - as_matrices(weight, window.groups))
        return float(lost_product.var(axis=0).sum())

    window, weight = window_of(model)
    plain_values = nearest(as_matrices(weight, window.groups))
    chosen = constant(result.model, of_type(result.model, "Conv")[0].input[1])
    assert error(as_matrices(chosen, window.groups)) < 0.75 * error(plain_values)
    sqnr_before, after = (
        sqnr_db(expected, run(quantize_int8(graph, inputs, scheme)[0], unseen_data, optimized=False))
        for graph, inputs in ((model, ranges), (result.model, result.ranges))
    )
    assert after > sqnr_before - 0.1


@pytest.mark.parametrize("bias", [True, False])
def test_bias_correction_removes_a_shift_of_the_mean(bias):
    model, inputs = net("padded", bias), data("padded", 100)
    graph, reach = prepare_model(model), float(inputs["x"].max())
    # Clipping at a tenth of the reach takes away from everything that is large.
    ranges = replace(all_ranges(model, inputs), tensors={"x": (0.0, reach / 10), "y": (-reach, reach)})
    kind = FittedKind(find_groups(graph, find_sites(graph)[0]), ranges, "int8")
    (plans,) = fit_convolutions(graph, [kind], runs(inputs))
    changed_model, narrowed_model = apply_plans(graph, list(plans.values()), ranges)

    def shift(model: ModelProto) -> float:
        written, _ = quantize_int8(model, narrowed_model, TENSORRT_FP32)
        return float(np.abs((run(written, inputs, optimized=False) - run(graph, inputs)).mean(axis=(0, 2, 3))).max())

    assert shift(graph) > 0.2 and shift(changed_model) < shift(graph) / 100


def test_a_bias_that_is_computed_stays():
    text = "s = ReduceMean<keepdims=0>(x, axes)\n y = Conv<pads=[1,1,1,1]>(x, w, s)"
    weights = {"w": np.random.default_rng(0).normal(size=(4, 4, 3, 3)), "axes": np.array([0, 2, 3])}
    model = build("float[batch,4,9,8] x", "float[batch,4,9,8] y", text, weights)
    result = choose(model, all_ranges(model, data("padded", 16)), TENSORRT_FP32, runs(data("padded", 16)))
    assert of_type(result.model, "Conv")[0].input[2] == "s"
    assert sqnr_db(run(model, data("padded", 8)), run(result.model, data("padded", 8))) > 30


def test_the_written_graph_has_the_same_levels():
    model, inputs = net("grouped"), data("grouped", 64)
    result = choose(model, all_ranges(model, inputs), CPU, runs(inputs))
    rounded_values = as_matrices(constant(result.model, of_type(result.model, "Conv")[0].input[1]), 2)
    levels = as_weight(np.rint(rounded_values / steps_of(rounded_values)[:, None]), KINDS["grouped"][1])
    written, _ = quantize_int8(result.model, result.ranges, CPU)
    stored = next(numpy_helper.to_array(item) for item in written.graph.initializer if list(item.dims) == [6, 2, 3, 3])
    values = as_matrices(constant(model, "w"), 2)
    assert stored.dtype == np.int8 and np.array_equal(stored, levels)
    assert not np.array_equal(levels, as_weight(np.rint(values / steps_of(values)[:, None]), KINDS["grouped"][1]))


def test_the_sweep_keeps_a_bounded_amount_of_activations():
    assert len(_within(({"x": np.zeros(10, np.int8)} for _ in range(8)), 35)) == 3
    assert len(_within(({"x": np.zeros(10, np.int8)} for _ in range(8)), 1)) == 1


def test_errors_in_the_direction_of_the_mean_are_left_to_the_bias():
    model, inputs = net("padded"), {"x": data("padded", 64)["x"] + 30}
    graph = prepare_model(model)
    ranges, groups = all_ranges(model, inputs), find_groups(graph, find_sites(graph)[0])
    plan = fit_convolutions(graph, [FittedKind(groups, ranges, "int8")], runs(inputs))[0]["x"]
    window, weight = window_of(model)
    moments = moments_of(graph, find_layers(graph, groups[0].sites, {}), StartedRuns(runs(inputs)))[0][
        groups[0].nodes[0]
    ]
    matrix = as_matrices(weight, window.groups)
    about_zero_values = copy.deepcopy(moments).take_covariance(about_zero=True)
    result, other = as_matrices(plan.weights[groups[0].nodes[0]], window.groups), compensate(matrix, about_zero_values)
    covariance = moments.take_covariance()
    error, of_other = (float(np.sum(d * (covariance @ d))) for d in (result - matrix, other - matrix))
    assert error < 0.8 * of_other


def test_a_later_pass_starts_from_a_kept_activation(monkeypatch):
    lines = ["c0 = Conv(x, w)"] + [f"c{i} = Conv(r{i - 1}, w)\n r{i} = Relu(c{i})" for i in range(1, 4)]
    lines.insert(1, "r0 = Relu(c0)")
    weights = {"w": np.random.default_rng(0).normal(size=(4, 4, 1, 1))}
    model = build("float[batch,4,6,6] x", "float[batch,4,6,6] r3", "\n".join(lines), weights)
    graph, inputs = prepare_model(model), {"x": np.random.default_rng(1).normal(size=(16, 4, 6, 6)).astype(np.float32)}
    ranges, groups, sizes = all_ranges(model, inputs), find_groups(graph, find_sites(graph)[0]), []
    tail = moments_module.tail
    monkeypatch.setattr(moments_module, "MOST_LAYERS", 1)
    monkeypatch.setattr(moments_module, "tail", lambda *a: sizes.append(len((proto := tail(*a)).graph.node)) or proto)

    def fitted() -> list[np.ndarray]:
        sizes.clear()
        plans = fit_convolutions(graph, [FittedKind(groups, ranges, "int8")], runs(inputs))[0]
        return [array for plan in plans.values() for array in (*plan.weights.values(), *plan.biases.values())]

    fitted_weights = fitted()
    assert sizes == [2, 2, 2, 0], "to the next convolution's activation, from this one's"
    monkeypatch.setattr(moments_module, "MOST_HELD", 0)
    second_arrays = fitted()
    assert sizes == [2, 4, 6, 6] and all(map(np.array_equal, fitted_weights, second_arrays))
