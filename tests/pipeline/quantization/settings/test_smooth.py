from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.block_floats import FORMATS
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.settings import groups
from pipeline.quantization.settings.fit import fit
from pipeline.quantization.settings.groups import (
    Statistics,
    compensate,
    find_biases,
    find_groups,
    matrices,
    nearest,
    rounded_activation,
    steps_of,
)
from pipeline.quantization.settings.smooth import (
    STRENGTHS,
    SmoothingPlan,
    _projection,
    apply_plans,
    factors_of,
    find_folds,
)
from tests.pipeline.quantization.search.outlier_nets import all_ranges, noise, outlier_net
from tests.pipeline.quantization.small_nets import TENSORRT_FP32, build, of_type, run


def smoothed(model, activation="n"):
    graph = prepare_model(model)
    group = next(group for group in find_groups(graph, find_sites(graph)[0]) if group.activation == activation)
    weights = matrices(graph, [group])
    reach = np.max([np.abs(weight).max(axis=1) for weight in weights.values()], axis=0)
    factors = factors_of(np.linspace(1, 50, 32, dtype=np.float32), reach, 0.7)
    scaled_weights = {node: weight * factors[:, None] for node, weight in weights.items()}
    plan = SmoothingPlan(group, 0.7, 1.0, factors, scaled_weights, -3.0, 3.0)
    return graph, group, apply_plans(graph, [plan], all_ranges(model, noise(16)))


@pytest.mark.parametrize("residual", [False, True])
def test_smoothing_alone_changes_nothing_in_float(residual):
    model = outlier_net(residual)
    _, _, (changed_model, _) = smoothed(model)
    expected, result = run(model, noise(40)), run(changed_model, noise(40))
    assert np.abs(expected - result).max() < 1e-4 * np.abs(expected).max()


def test_factors_go_into_the_normalization_when_only_the_group_reads_it():
    graph, group, (changed_model, ranges) = smoothed(outlier_net())
    assert find_folds(graph, [group])
    assert len(changed_model.graph.node) == len(graph.graph.node)
    assert ranges.tensors["n"] == (-3.0, 3.0)


@pytest.mark.parametrize(("bias", "folds"), [("", True), ("b", True), ("one", False), ("computed", False)])
def test_factors_pass_into_a_gemm_whose_bias_is_a_constant_of_each_channel(bias, folds):
    data = {"w": np.ones((4, 8), "f4"), "b": np.ones(8, "f4"), "one": np.ones(1, "f4")}
    walk = SimpleNamespace(initializers={name: numpy_helper.from_array(value, name) for name, value in data.items()})
    node = helper.make_node("Gemm", ["x", "w", *([bias] if bias else [])], ["y"], name="g")
    expected = (("g", 1, 1), ("g", 2, 0)) if bias else (("g", 1, 1),)
    assert _projection(node, walk, 8) == (expected if folds else None)


def test_a_residual_connection_keeps_the_exact_tensor():
    graph, group, (changed, ranges) = smoothed(outlier_net(residual=True))
    assert not find_folds(graph, [group])
    assert len(of_type(changed, "Mul")) == 1
    assert ranges.tensors["n"] != (-3.0, 3.0) and ranges.tensors[of_type(changed, "Mul")[0].output[0]] == (-3.0, 3.0)


@given(st.integers(0, 1000), st.integers(2, 40), st.integers(1, 9), st.sampled_from([127, 64]))
def test_rounded_weights_lie_on_the_resulting_levels(seed, rows, columns, last):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, columns)).astype(np.float32)
    x = rng.normal(size=(200, rows)).astype(np.float32)
    for rounded_values in (nearest(matrix, last), compensate(matrix, x.T @ x / 200, last)):
        levels = rounded_values / steps_of(rounded_values, last)
        assert np.abs(levels - np.rint(levels)).max() < 1e-3 and np.abs(levels).max() < last + 0.5
        assert np.allclose(steps_of(rounded_values, last), steps_of(matrix, last), rtol=1e-4)


def test_degenerate_moments_fall_back_to_the_nearest():
    matrix = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    assert np.array_equal(compensate(matrix, np.zeros((8, 8), np.float32)), nearest(matrix))
    assert np.array_equal(nearest(np.zeros((8, 4), np.float32)), np.zeros((8, 4), np.float32))


def test_insertion_finds_the_rounded_levels():
    model = outlier_net()
    graph = prepare_model(model)
    group = find_groups(graph, find_sites(graph)[0])[0]
    (node, weight), *_ = matrices(graph, [group]).items()
    rounded_weight = compensate(weight, np.eye(32, dtype=np.float32) + 0.5)
    ranges = all_ranges(model, noise(16))
    changed_model, narrowed_model = apply_plans(
        graph, [SmoothingPlan(group, None, 1.0, None, {node: rounded_weight}, *ranges.tensors["n"])], ranges
    )
    written_model, _ = quantize_int8(changed_model, narrowed_model, TENSORRT_FP32)
    scales = [numpy_helper.to_array(item) for item in written_model.graph.initializer if item.dims == [64]]
    assert any(np.allclose(scale, steps_of(rounded_weight), rtol=1e-5) for scale in scales)


def test_kept_rows_stay_few_however_many_runs_there_are():
    stats = Statistics()
    for run_index in range(600):
        stats.add(np.full((4, 50, 8), run_index, np.float32))
    assert 512 <= len(stats.rows) <= 2048 and stats.rows[:, 0].max() >= 590 and stats.rows[:, 0].min() <= 10
    assert {*np.unique(stats.rows[:, 0], return_counts=True)[1]} == {2}, "all runs weigh alike: one row in each half"
    assert stats.count == 600 * 200


def test_second_moments_wait_for_a_sixteenth_as_many_rows_as_channels():
    few_statistics, rows = Statistics(), np.random.default_rng(0).standard_normal((40, 320)).astype(np.float32)
    for row in rows[:19]:
        few_statistics.add(row)
    assert few_statistics.moments is None and few_statistics.count == 19
    few_statistics.add(rows[19])
    assert few_statistics.moments is not None
    for row in rows[20:]:
        few_statistics.add(row)
    np.testing.assert_allclose(few_statistics.moments, rows.T @ rows / 40, rtol=1e-4, atol=1e-5)


def sparse(rows: int, seed: int) -> np.ndarray:
    """As pooled features are: mostly small, each channel large now and then."""
    return np.random.default_rng(seed).gamma(0.3, size=(rows, 512)).astype(np.float32)


@pytest.mark.parametrize("activation", ["int8", "uint8"])
def test_settings_that_fit_only_a_few_rows_do_not_win(activation):
    weight = np.random.default_rng(0).normal(size=(512, 40)).astype(np.float32)
    statistics = Statistics()
    for start in range(0, 32, 8):
        statistics.add(sparse(32, 1)[start : start + 8])
    graph = prepare_model(outlier_net())
    group = replace(find_groups(graph, find_sites(graph)[0])[0], sites=find_sites(graph)[0][:1])
    plans = [fit(group, statistics, {group.nodes[0]: weight}, activation, grid) for grid in (STRENGTHS, (None,))]
    fresh_array = sparse(2000, 2)
    searched_value, plain_value = (error_of(plan, fresh_array, weight, activation) for plan in plans)
    assert searched_value < 1.1 * plain_value


def error_of(plan: SmoothingPlan, rows: np.ndarray, weight: np.ndarray, activation: str) -> float:
    smooth_rows = rows if plan.factors is None else rows / plan.factors
    result = rounded_activation(smooth_rows, plan.low, plan.high, activation) @ next(iter(plan.weights.values()))
    return float(np.mean((result - rows @ weight) ** 2))


def test_a_channel_that_lost_its_last_level_gets_it_back():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        # The loudest row is nearly a copy of the ones before it, and so takes all that they lost.
        x = rng.normal(size=(400, 1)) @ np.ones((1, 12)) + rng.normal(size=(400, 12)) / 50
        matrix = rng.normal(size=(12, 30)).astype(np.float32)
        moments = (x.T @ x / 400).astype(np.float32)
        assert np.allclose(steps_of(compensate(matrix, moments)), steps_of(matrix), rtol=1e-4)


def test_nodes_that_share_an_activation_are_rounded_separately():
    rng = np.random.default_rng(0)
    statistics, weights = Statistics(), [rng.normal(size=(24, width)).astype(np.float32) for width in (5, 40)]
    for _ in range(8):
        statistics.add(rng.normal(size=(32, 24)).astype(np.float32) @ rng.normal(size=(24, 24)).astype(np.float32))
    graph = prepare_model(outlier_net())
    site = find_sites(graph)[0][0]
    sites = tuple(replace(site, node=name) for name in ("q", "k"))
    group = replace(find_groups(graph, [site])[0], sites=sites)
    plan = fit(group, statistics, dict(zip(("q", "k"), weights, strict=True)), "int8", (None,))
    for name, weight in zip(("q", "k"), weights, strict=True):
        np.testing.assert_allclose(plan.weights[name], compensate(weight, statistics.moments), atol=1e-6)


@pytest.mark.parametrize("size", [5, 64, 200])
def test_moments_are_decomposed_in_place(monkeypatch, size):
    monkeypatch.setattr(groups, "DECOMPOSED", 64)
    x = np.random.default_rng(size).normal(size=(2 * size, size))
    moments, order = x.T @ x / size, np.random.default_rng(0).permutation(size)
    result = moments.copy()
    groups._reorder(result, order)
    assert np.array_equal(result, moments[np.ix_(order, order)])
    groups._decompose(result)
    assert np.allclose(np.tril(result), np.linalg.cholesky(moments[np.ix_(order, order)]))


def test_wide_moments_are_rounded_in_their_own_memory(monkeypatch):
    x = np.random.default_rng(1).normal(size=(200, 48)).astype(np.float32).cumsum(axis=1)
    matrix, moments = np.random.default_rng(2).normal(size=(48, 8)).astype(np.float32), x.T @ x / 200
    narrow_weights, moments_before = compensate(matrix, moments), moments.copy()
    assert np.array_equal(moments, moments_before)
    monkeypatch.setattr(groups, "WIDEST_IN_DOUBLE", 16)
    wide_weights = compensate(matrix, moments)
    assert not np.array_equal(moments, moments_before)
    lost_means = [np.square(x @ (result - matrix)).mean() for result in (nearest(matrix), narrow_weights, wide_weights)]
    assert lost_means[2] < 1.1 * lost_means[1] < 0.8 * lost_means[0]


def biased_groups(text: str, **weights) -> tuple:
    graph = prepare_model(build("float[batch,32] x", "float[batch,16] y", text, weights))
    groups = find_groups(graph, find_sites(graph)[0])
    return graph, groups, find_biases(graph, groups)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p = MatMul(x, w)\n y = Add(b, p)", True),
        ("y = Gemm(x, w, b)", True),
        ("y = Gemm<alpha=0.5>(x, w, b)", False),
        ("p = MatMul(x, w)\n y = Add(p, one)", False),
        ("p = MatMul(x, w)\n y = Add(p, p)", False),
        ("p = MatMul(x, w)\n a = Add(p, b)\n y = Mul(a, p)", False),
        ("y = MatMul(x, w)", False),
    ],
)
def test_a_bias_is_a_constant_of_each_channel_that_only_the_product_is_added_to(text, expected):
    weights = {"w": np.ones((32, 16), "f4"), "b": np.ones(16, "f4"), "one": np.ones(1, "f4")}
    _, (group,), places = biased_groups(text, **weights)
    assert [*places] == ([*group.nodes] if expected else [])


@pytest.mark.parametrize("text", ["p = MatMul(x, w)\n y = Add(p, b)", "y = Gemm(x, w, b)"])
@pytest.mark.parametrize("levels", [127, FORMATS["nvfp4-weights"]])
def test_biases_compensate_the_average_rounding_error(text, levels):
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(32, 16)).astype("f4"), "b": rng.normal(size=16).astype("f4")}
    graph, (group,), places = biased_groups(text, **weights)
    rows = (3 + rng.normal(size=(4000, 32))).astype(np.float32)
    statistics = Statistics()
    statistics.add(rows)
    plan = fit(group, statistics, matrices(graph, [group]), "int8", (None,), levels, places.keys())
    ranges = Ranges({"x": (-8.0, 8.0)}, "minmax", "", 1)
    changed_model, _ = apply_plans(graph, [plan], ranges)
    activations = rounded_activation(rows, plan.low, plan.high, "int8") if levels == 127 else rows
    added_result = run(changed_model, {"x": activations}) - run(graph, {"x": rows})
    assert np.abs(added_result.mean(axis=0)).max() < 0.02 * np.abs(added_result).max()


def test_descent_lowers_what_compensation_leaves_and_stays_on_the_grid(monkeypatch):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(160, 16)).astype(np.float32)
    x = (rng.normal(size=(2000, 40)) @ rng.normal(size=(40, 160)) + rng.normal(size=(2000, 160)) / 3).astype(np.float32)
    form, lost_means = FORMATS["nvfp4-weights"], []
    for sweeps in (0, 2):
        monkeypatch.setattr(groups, "SWEEPS", sweeps)
        rounded_weight = compensate(matrix, x.T @ x / 2000, form)
        assert np.array_equal(form.decode(*form.encode(rounded_weight)), rounded_weight)
        lost_means.append(np.square(x @ (rounded_weight - matrix)).mean())
    assert lost_means[1] < 0.95 * lost_means[0]


def test_factors_of_block_formats_are_powers_of_two():
    graph = prepare_model(outlier_net())
    group = find_groups(graph, find_sites(graph)[0])[0]
    statistics = Statistics()
    statistics.add(np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32) * np.geomspace(1, 50, 32))
    factors = fit(group, statistics, matrices(graph, [group]), "int8", (0.7,), FORMATS["nvfp4"]).factors
    assert np.array_equal(np.frexp(factors)[0], np.full(32, 0.5)) and factors.max() > 4 * factors.min()
