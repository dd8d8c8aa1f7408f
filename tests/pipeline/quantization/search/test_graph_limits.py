from collections.abc import Iterator

import numpy as np
import pytest

from enginesmith.core.types import Dim, TensorSpec
from pipeline.quantization.search.graph_limits import (
    MARGIN_DB,
    PARTS,
    GraphJudge,
    budget_of,
    deal,
    make_edges,
    with_margin,
)
from pipeline.quantization.search.quality import GraphLimits, SearchFloor
from pipeline.quantization.search.sensitivity import quality
from pipeline.quantization.settings.runs import JUDGED, divide_runs
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, noise, outlier_net, runs
from tests.pipeline.quantization.small_nets import TENSORRT_FP32, build
from validation.metrics.tasks.terms import AccuracyMetric

SIZE = 8


def judged(errors: list[float], limits: GraphLimits | None = None, count: int = 12) -> int:
    """Checks that fail where run i has an error of errors[i] times the signal, which is 1 on average."""
    rng = np.random.default_rng(0)
    inputs = [{"x": np.ones((SIZE, 1), np.float32)} for _ in range(count)]
    judge = GraphJudge(limits or GraphLimits(), inputs)
    for index in range(count):
        expected = rng.choice([-1.0, 1.0], (SIZE, 4)).astype(np.float32)
        judge.add(index, {"y": expected}, {"y": (expected * np.float32(1 + errors[index % len(errors)]))})
    return judge.missed()


def amplitude(sqnr_db: float) -> float:
    return float(10 ** (-sqnr_db / 20))


def test_limits_equal_the_graph_checks_with_a_margin() -> None:
    result = budget_of(GraphLimits())
    assert (result.sqnr_db, result.centered_sqnr_db, result.slice_sqnr_db) == (20, 15, 13)
    assert result.max_rel == pytest.approx(0.6 / 10 ** (MARGIN_DB / 20)) and result.argmax_agreement is None
    budget = budget_of(GraphLimits({"sqnr_db": 30.0, "cosine": 0.99, "argmax_agreement": 0.95, "max_rel": None}))
    assert (budget.sqnr_db, budget.argmax_agreement, budget.max_rel) == (35, 0.95, None)
    assert budget.cosine == pytest.approx(1 - 0.01 / 10 ** (MARGIN_DB / 10))
    floor = SearchFloor(graph=GraphLimits({"sqnr_db": 30.0}))
    assert with_margin(floor).sqnr_db == 35 and with_margin(SearchFloor(cosine=0.9)) == SearchFloor(cosine=0.9)


@pytest.mark.parametrize(("sqnr_db", "missed"), [(20.1, False), (19.9, True)])
def test_a_trial_keeps_the_limits_with_the_margin(sqnr_db: float, missed: bool) -> None:
    assert bool(judged([amplitude(sqnr_db)])) is missed


def test_the_limits_hold_on_each_part_of_the_samples() -> None:
    one_bad_values = [amplitude(15.5)] + [amplitude(60)] * 11
    whole_number = -10 * np.log10(np.mean(np.square(one_bad_values)))
    part = -10 * np.log10(np.mean(np.square(one_bad_values[: 12 // PARTS])))
    assert whole_number > 20 and part > 20, "as a whole and in its part it would be good enough"
    assert not judged(one_bad_values)
    few_values = [amplitude(15.5)] * 4 + [amplitude(60)] * 8  # in one part alone
    assert -10 * np.log10(np.mean(np.square(few_values))) > 20 and judged(few_values)


def test_a_trial_ends_with_the_first_part_that_fails() -> None:
    assert deal([*range(7)]) == [0, 3, 6, 1, 4, 2, 5]
    expected = [{"y": np.eye(SIZE, dtype=np.float32)} for _ in range(7)]

    def answered(bad: int) -> Iterator[dict[str, np.ndarray]]:
        for index, values in enumerate(expected):
            actual_indices.append(index)
            yield {"y": values["y"] * (-1 if index == bad else 1)}

    for bad_number, count in ((1, 3), (4, 5), (6, 7), (-1, 7)):
        actual_indices = list[int]()
        result = quality(expected, answered(bad_number), None, GraphJudge(GraphLimits(), expected))
        assert bool(result.missed) is (bad_number >= 0) and len(actual_indices) == count


def test_decisions_may_change_once_or_in_a_hundred() -> None:
    def missed(flips: int, output: str | None) -> int:
        inputs = [{"x": np.ones((SIZE, 1), np.float32)} for _ in range(12)]
        judge = GraphJudge(GraphLimits(metrics=((AccuracyMetric(output),) if output else ())), inputs)
        for index in range(12):
            expected = np.random.default_rng(index).normal(size=(SIZE, 4)).astype(np.float32)
            expected[0, :2] = 1.0, 0.999
            expected[0, 2:] = 0
            actual = expected.copy()
            if index < flips:
                actual[0, 0] = 0.998
            judge.add(index, {"y": expected}, {"y": actual})
        return judge.missed()

    assert [missed(flips, "y") for flips in (0, 1, 2)] == [0, 0, 1] and missed(2, None) == missed(2, "other") == 0


def test_more_than_one_changed_integer_in_a_hundred_is_too_many() -> None:
    def missed(changed: int, changed_at_edges: int) -> int:
        inputs = [{"x": np.ones((100, 1), np.float32)} for _ in range(3)]
        judge, right = GraphJudge(GraphLimits(), inputs, inputs), np.arange(100).reshape(100, 1)
        for index in range(6):
            judge.add(index, {"y": right}, {"y": np.where(right < (changed, changed_at_edges)[index // 3], -1, right)})
        return judge.missed()

    assert [missed(*counts) for counts in ((1, 0), (2, 0), (1, 1))] == [0, 1, 1]


def test_a_trial_is_judged_at_the_edges_too() -> None:
    """The sum over a longer `n` is beyond what calibration showed: its product must stay in float."""
    inputs, dims = (TensorSpec("x", "float32", ("batch", "n")),), (Dim("batch", 1, 1, 8), Dim("n", 4, 4, 64))
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(1, 32)), "v": rng.normal(size=(32, 32)) / 6, "axis": [1]}
    text = "s = ReduceSum<keepdims=1>(x, axis) t = MatMul(s, w) u = Tanh(t) y = MatMul(u, v)"
    model = build("float[batch,n] x", "float[batch,32] t, float[batch,32] y", text, weights)
    samples = {"x": rng.exponential(size=(96, 4)).astype(np.float32)}
    edges = make_edges([samples], inputs, dims)
    assert [values["x"].shape for values in edges] == [(1, 4), (1, 64)] and not make_edges([samples], inputs, dims[:1])
    assert len(make_edges([samples] * 9, inputs, dims)) == 8
    heavy = [{"y": np.broadcast_to(np.int8(0), (5 << 20, 96, 4))}]  # 5 MiB for each value of a sample
    assert [values["x"].shape for values in make_edges([samples], inputs, dims, heavy)] == [(1, 4)]
    args = model, all_ranges(model, samples), TENSORRT_FP32, runs(samples), SearchFloor(graph=GraphLimits())
    usual_choice, wide_choice = choose(*args), choose(*args, shapes=(inputs, dims))
    assert not usual_choice.left and [reason[:18] for reason in wide_choice.left.values()] == ["the graph's limits"]
    assert wide_choice.point.share > 0.9


def test_few_judging_samples_are_completed_with_fitted_ones() -> None:
    def sizes(count: int, filled: bool) -> tuple[int, int]:
        fitted_runs, runs = divide_runs([(1, {"x": np.full((1, 1), index)}) for index in range(count)], filled)
        values = [run.inputs["x"].item() for run in runs]
        assert values == sorted(set(values), key=values.index), "no run twice"
        assert all(run.stop - 1 == run.start == run.inputs["x"].item() for run in runs), "where their labels are"
        assert filled or not {*values} & {inputs["x"].item() for _, inputs in fitted_runs}
        return len(fitted_runs), len(runs)

    assert sizes(48, filled=False) == (36, 12) and sizes(48, filled=True) == (36, 48)
    assert sizes(200, filled=True) == (150, JUDGED) and sizes(3, filled=True) == (3, 3)
    assert sizes(480, filled=True)[1] == sizes(480, filled=False)[1] == JUDGED


def test_a_search_for_limits_leaves_the_fewest_groups_in_float() -> None:
    model, samples = outlier_net(), noise(128, 1)
    ranges = all_ranges(model, samples)
    usual_choice = choose(model, ranges, TENSORRT_FP32, runs(samples), SearchFloor(graph=GraphLimits()))
    assert usual_choice.point.share == 1 and usual_choice.point.sqnr_db >= 20
    choice = choose(model, ranges, TENSORRT_FP32, runs(samples), SearchFloor(graph=GraphLimits({"sqnr_db": 33.0})))
    assert 0 < choice.point.share < 1 and choice.point.sqnr_db >= 38
    assert all(reason.startswith("the graph's limits: quantized alone") for reason in choice.left.values())
