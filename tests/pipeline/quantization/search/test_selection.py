import json
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import ModelProto

from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.search.quality import GraphLimits, Quality, SearchFloor
from pipeline.quantization.search.selection import choose_each, refill_groups, swap_groups
from pipeline.quantization.search.sensitivity import Answers, quality
from pipeline.quantization.search.trial import FrontierPoint, MixedPrecisionChoice, SearchDocument, SearchTarget
from pipeline.quantization.settings.runs import RunLabels, group_runs
from tests.pipeline.quantization import small_nets as nets
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, noise, outlier_net, runs
from validation.reporting.quantization import BROKEN_DB, frontier_svg

NETS = {
    "outliers": (outlier_net, noise),
    "residual": (lambda: outlier_net(residual=True), noise),
    "attention": (nets.attention_net, nets.sentences),
    "convolutions": (nets.conv_net, nets.images),
}


@cache
def chosen_for(name: str, scheme=nets.TENSORRT_FP32, **options) -> tuple[MixedPrecisionChoice, float]:
    """The choice for a net, and the SQNR that its graph has on samples the search never saw."""
    net, data = NETS[name]
    model, samples, unseen_data = net(), data(128, 1), data(64, 2)
    choice = choose(model, all_ranges(model, samples), scheme, runs(samples), **options)
    written, _ = quantize_int8(choice.model, choice.ranges, nets.TENSORRT_FP32, dict.fromkeys(choice.left, "fp16"))
    return choice, nets.sqnr_db(nets.run(model, unseen_data), nets.run(written, unseen_data, optimized=False))


@pytest.mark.parametrize("name", ["outliers", "residual"])
def test_smoothing_wins_many_decibels_where_a_channel_is_loud(name):
    _, plain_value = chosen_for(name, smoothing="none")
    _, smooth_value = chosen_for(name)
    assert smooth_value > plain_value + 10


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("scheme", [nets.TENSORRT, nets.CPU], ids=["tensorrt", "cpu"])
def test_the_floor_holds_for_every_net_and_scheme(name, scheme):
    floor = SearchFloor(sqnr_db=30, cosine=0.99)
    choice, _ = chosen_for(name, scheme, floor=floor)
    assert choice.point.sqnr_db is None or choice.point.sqnr_db >= 30
    assert floor.holds(Quality(10 ** (-(choice.point.sqnr_db or 0) / 10), choice.point.cosine or 0))


def test_a_floor_costs_no_more_compute_than_necessary():
    lenient_choice, _ = chosen_for("attention", floor=SearchFloor(sqnr_db=1))
    strict_choice, _ = chosen_for("attention", floor=SearchFloor(sqnr_db=44))
    assert lenient_choice.point.share == 1 and lenient_choice.left == {}
    assert 0 < strict_choice.point.share < 1 and strict_choice.point.sqnr_db >= 44
    # Whatever was left in float, taking any of it back on top would break the floor or the order of damage.
    assert set(strict_choice.left) == {node for row in strict_choice.rows if not row.kept for node in row.nodes}


def test_the_choice_is_json_with_a_picture():
    choice, _ = chosen_for("attention", floor=SearchFloor(sqnr_db=44))
    document = choice.document(SearchFloor(sqnr_db=44))
    data = json.loads(json.dumps(encode(document), allow_nan=False))
    assert decode(data, SearchDocument) == document
    assert data["frontier"][0]["share"] == 1
    assert [point["share"] for point in data["frontier"]] == sorted(
        (p["share"] for p in data["frontier"]), reverse=True
    )
    assert all(point["cosine"] is not None or not point["left"] for point in data["frontier"])
    assert [point.left for point in document.recorded.frontier] == [*range(len(data["frontier"]))]
    picture = frontier_svg(document.recorded, document.precision)
    assert picture.startswith("<svg") and picture.count('class="run"') >= 2 and 'class="floor"' in picture


def test_predictions_are_near_the_runs():
    choice, _ = chosen_for("attention", floor=SearchFloor(sqnr_db=44))
    for point in [point for point in choice.frontier if point.sqnr_db is not None and point.left != ()]:
        if math.isfinite(point.sqnr_db):
            assert point.predicted_db == pytest.approx(point.sqnr_db, abs=3)


def test_single_samples_are_joined_up_to_the_batch_the_model_is_tuned_for():
    end_numbers = [(i + 1, {"image": np.full((1, 1, 8, 8), i, np.float32)}) for i in range(6)]
    groups = list(group_runs(end_numbers, (nets.IMAGE,), (nets.BATCH,)))
    assert [(count, len(inputs["image"])) for count, inputs in groups] == [(4, 4), (2, 2)]
    assert np.concatenate([inputs["image"] for _, inputs in groups])[:, 0, 0, 0].tolist() == list(range(6))


def test_runs_of_different_shapes_stay_separate():
    end_numbers = [(i + 1, {"tokens": np.zeros((1, 6), np.int64), "mask": np.ones((1, 5 + i // 2))}) for i in range(4)]
    assert [count for count, _ in group_runs(end_numbers, (nets.TOKENS, nets.MASK), (nets.BATCH,))] == [2, 2]


class Additive:
    """Groups whose damages add up exactly, in place of a model."""

    def __init__(self, macs: dict[str, float], noise: dict[str, float]) -> None:
        self.macs, self.noise = macs, noise
        self.steps = {name: SimpleNamespace(group=name.split()[0]) for name in macs}
        self.ranked = tuple(sorted(macs, key=lambda name: -noise[name] / macs[name]))
        self.qualities: dict[tuple[str, ...], Quality] = {}
        self.worse: dict[tuple[str, ...], float] = {}

    def predicted_db(self, steps: tuple[str, ...]) -> float:
        return Quality(sum(self.noise[name] for name in self.noise if name not in steps), 1.0).sqnr_db

    def point(self, steps: tuple[str, ...]) -> FrontierPoint:
        steps = tuple(name for name in steps if name.split()[0] in steps)
        predicted_db, share = self.predicted_db(steps), sum(self.macs[name] for name in steps) / sum(self.macs.values())
        self.qualities[steps] = Quality(10 ** (-predicted_db / 10) + self.worse.get(steps, 0.0), 1.0)
        return FrontierPoint(1 - share, steps, predicted_db, self.qualities[steps].sqnr_db)


def test_an_automatic_search_leaves_few_groups_in_float() -> None:
    names = [f"g{index}" for index in range(40)]
    trial = Additive({name: 1.0 + index for index, name in enumerate(names)}, dict.fromkeys(names, 1e-6))
    for graph, tried_number in ((None, 40), (GraphLimits(), 16)):
        trial.qualities.clear()
        point = refill_groups(trial, SearchFloor(sqnr_db=30, graph=graph), FrontierPoint(0.0, tuple(names), 200.0))
        assert len(trial.qualities) == tried_number and len(point.left) == 40 - tried_number
    assert "g39" not in point.left and "g0" in point.left, "those that compute most come first"
    both_costs = Additive({"g": 2.0, "g fp16": 1.0}, {"g": 0.01, "g fp16": 0.01})
    refill_groups(both_costs, SearchFloor(cosine=2), FrontierPoint(0.0, ("g", "g fp16"), 200.0))
    assert len(both_costs.qualities) == 1, "a group whose step cannot be taken back is not run for its next one"


def test_small_groups_are_left_in_float_instead_of_a_large_one_if_sufficient() -> None:
    trial = Additive({"large": 10.0, "mid": 3.0, "tiny": 2.0}, {"large": 2.9e-3, "mid": 8e-4, "tiny": 5e-4})
    assert trial.ranked[0] == "large"
    assert set(swap_groups(trial, SearchFloor(sqnr_db=25.3), trial.point(("large",))).left) == {"mid", "tiny"}
    macs = {"g": 9.0, "g fp16": 8.0, "low": 1.0, "more": 1.0}
    steps = Additive(macs, {"g": 1.5e-3, "g fp16": 5e-4, "low": 2e-3, "more": 1e-3})
    assert swap_groups(steps, SearchFloor(sqnr_db=25), steps.point(("g", "g fp16"))).left == ("low",), "g is gone"
    floors = {"they do not reach it": SearchFloor(sqnr_db=25.5), "it cannot be predicted": SearchFloor(cosine=0.9)}
    for reason, floor in floors.items():
        assert swap_groups(trial, floor, trial.point(("large",))).left == ("large",), reason


def test_interacting_groups_are_judged_by_the_run() -> None:
    trial = Additive({"large": 10.0, "mid": 3.0, "tiny": 2.0}, {"large": 2.9e-3, "mid": 8e-4, "tiny": 5e-4})
    for float_groups in (("mid",), ("mid", "tiny"), ("large",)):
        trial.worse[float_groups] = 3e-3
    assert swap_groups(trial, SearchFloor(sqnr_db=25.3), trial.point(("large",))).left == ("large",)
    both_point = trial.point(("large", "tiny"))
    assert refill_groups(trial, SearchFloor(sqnr_db=25.3), both_point) == both_point, (
        "nor is one taken back that was predicted to do"
    )


def rows(*values: float) -> dict[str, np.ndarray]:
    return {"y": np.array(values, np.float32).reshape(-1, 2)}


def test_decisions_and_correct_answers_are_counted():
    expected, actual = [rows(0, 1, 1, 0), rows(2, 1)], [rows(0, 2, 0, 1), rows(2, 0)]
    figures = quality(expected, actual, Answers("y", [np.array([1, 0]), np.array([1])]))
    assert (figures.argmax_agreement, figures.accuracy) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert quality(expected, actual).accuracy is None
    assert quality([rows(0, 1)], [rows(np.nan, 1)], Answers("y", [np.array([1])])).accuracy == 0
    with pytest.raises(DataError, match="'y' gives 1 answers for 2 labels"):
        quality([rows(0, 1)], [rows(0, 1)], Answers("y", [np.array([1, 0])]))


@pytest.mark.parametrize(("floor", "holds"), [
    (SearchFloor(argmax_agreement=0.9), True), (SearchFloor(argmax_agreement=0.96), False),
    (SearchFloor(accuracy=0.8), True),
    (SearchFloor(accuracy=0.81), False), (SearchFloor(sqnr_db=20, accuracy=0.5), True),
    (SearchFloor(sqnr_db=21, accuracy=0.5), False),
])  # fmt: skip
def test_every_part_of_a_floor_must_hold(floor, holds):
    assert floor.holds(Quality(0.01, 0.99, argmax_agreement=0.95, accuracy=0.8)) is holds
    assert floor.accuracy is None or not floor.holds(Quality(0.01, 0.99, argmax_agreement=0.95))


def test_nan_never_passes_and_graph_checks_count_for_a_floor():
    limits = SearchFloor(cosine=0.5, graph=GraphLimits())
    for floor, missed_holds in ((limits, False), (SearchFloor(cosine=0.5), True)):
        assert floor.holds(Quality(1e-3, 0.999)) and not floor.holds(Quality(1e-3, 0.999, finite=False))
        assert floor.holds(Quality(1e-3, 0.999, missed=1)) is missed_holds


def test_a_floor_of_accuracy_uses_labels_in_the_order_of_the_samples():
    model, samples = nets.conv_net(), nets.images(128, 1)
    labels = RunLabels("logits", nets.run(model, samples).argmax(axis=-1))
    ranges = all_ranges(model, samples)
    choice = choose(model, ranges, nets.TENSORRT_FP32, runs(samples), SearchFloor(accuracy=1.0), labels=labels)
    assert choice.point.accuracy == 1 and "accuracy 1.0000" in choice.summary
    wrong_labels = RunLabels("logits", np.where(np.arange(128) % 2, labels.values, labels.values + 1))
    with pytest.raises(DataError, match=r"accuracy 1 is out of reach: the float model itself has 0\.5000"):
        choose(model, ranges, nets.TENSORRT_FP32, runs(samples), SearchFloor(accuracy=1.0), labels=wrong_labels)


def positive(count: int, seed: int) -> dict[str, np.ndarray]:
    values = np.abs(np.random.default_rng(seed).normal(size=(count, 16))).astype(np.float32)
    values[::3] *= np.float32(1e-4)  # a step of int8 takes these to zero, where the logarithm ends
    return {"x": values}


def log_net() -> ModelProto:
    weights = {"w": np.abs(np.random.default_rng(0).normal(size=(16, 4)))}
    return nets.build("float[batch,16] x", "float[batch,4] z", "y = MatMul(x, w)\n z = Log(y)", weights)


def test_broken_outputs_do_not_count_as_exact():
    samples = positive(64, 1)
    choice = choose(log_net(), all_ranges(log_net(), samples), nets.CPU, runs(samples))
    document = choice.document(None)
    data = json.loads(json.dumps(encode(document), allow_nan=False))
    assert data["groups"][0]["sqnr_db"] == data["frontier"][0]["predicted_db"] == data["chosen"]["sqnr_db"] == BROKEN_DB
    assert data["frontier"][-1]["predicted_db"] is None, "float loses nothing"
    assert "broken" in choice.summary and "broken" in frontier_svg(document.recorded, document.precision)
    floored_choice = choose(log_net(), all_ranges(log_net(), samples), nets.CPU, runs(samples), SearchFloor(sqnr_db=20))
    assert floored_choice.point.share == 0 and "no loss" in floored_choice.summary
    assert "broken" in next(iter(floored_choice.left.values()))


def test_a_non_finite_float_model_meets_no_floor():
    samples = {"x": np.zeros((16, 16), np.float32)}
    ranges = all_ranges(log_net(), positive(64, 1))
    weights = {"w": np.ones((16, 4))}
    model = nets.build("float[batch,16] x", "float[batch,4] z", "y = MatMul(x, w)\n z = Div(y, y)", weights)
    with pytest.raises(DataError, match="float model itself gives NaN"):
        choose(model, ranges, nets.CPU, runs(samples), SearchFloor(sqnr_db=20))


@pytest.mark.parametrize(("precision", "smoothing"), [("int8", "none"), ("int8", "auto"), ("nvfp4", "auto")])
def test_a_model_without_quantizable_nodes_is_unchanged(precision, smoothing):
    samples = positive(16, 1)
    target = SearchTarget(all_ranges(log_net(), samples), nets.CPU, precision=precision)
    (choices,) = choose_each(log_net(), [target], runs(samples), None, smoothing, {"MatMul_y": "fp32"})
    assert choices.rows == () and choices.point.share == 0 and "no loss" in choices.summary


def test_with_only_decisions_as_outputs_changed_ones_are_the_noise():
    changed_quality = quality([{"y": np.array([1, 2, 3, 4])}], [{"y": np.array([1, 2, 3, 5])}])
    assert changed_quality.sqnr_db == pytest.approx(10 * math.log10(4)) and changed_quality.cosine == 0.75
    floats = {"z": np.ones(4, np.float32)}
    assert quality([{"y": np.array([1, 2]), **floats}], [{"y": np.array([1, 3]), **floats}]).sqnr_db == math.inf


def test_early_outputs_and_unread_nodes_do_not_stop_the_search():
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(16, 16)) for name in ("a", "b", "c", "dead")}
    text = "early = MatMul(x, a)\n r = Relu(early)\n m = MatMul(r, b)\n unread = MatMul(m, dead)\n"
    text += "s = Tanh(m)\n y = MatMul(s, c)"
    model = nets.build("float[batch,16] x", "float[batch,16] early, float[batch,16] y", text, weights)
    samples = positive(64, 1)
    choice = choose(model, all_ranges(model, samples), nets.CPU, runs(samples), SearchFloor(sqnr_db=25))
    damage = {row.nodes: row.sqnr_db for row in choice.rows}
    assert len(damage) == 4 and choice.point.sqnr_db >= 25
    assert [nodes for nodes, sqnr in damage.items() if sqnr == math.inf] == [("MatMul_unread",)]


def test_an_output_of_one_value_has_no_decision():
    model = nets.build("float[batch,16] x", "float[batch,1] y", "y = MatMul(x, w)", {"w": np.ones((16, 1))})
    samples = positive(16, 1)
    ranges = all_ranges(model, samples)
    with pytest.raises(DataError, match="argmax cannot change"):
        choose(model, ranges, nets.CPU, runs(samples), SearchFloor(argmax_agreement=0.9))
    labels = RunLabels("y", np.zeros(16, np.int64))
    with pytest.raises(DataError, match="shows no accuracy"):
        choose(model, ranges, nets.CPU, runs(samples), SearchFloor(accuracy=0.5), labels=labels)
    assert choose(model, ranges, nets.CPU, runs(samples), SearchFloor(cosine=0.9)).point.share == 1
