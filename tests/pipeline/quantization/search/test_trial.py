from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.quantization.search import selection, trial
from pipeline.quantization.search.pareto import describe_point
from pipeline.quantization.search.quality import OutOfTimeError, SearchClock, SearchFloor
from pipeline.quantization.search.selection import choose_each
from pipeline.quantization.search.trial import SearchTarget, SearchTrial
from pipeline.quantization.settings import smooth
from pipeline.quantization.settings.groups import StatisticsWork
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, noise, outlier_net, runs
from tests.pipeline.quantization.search.test_selection import Additive
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, build, conv_net, images

NETS = {"outliers": (outlier_net, noise), "convolutions": (conv_net, images)}
FLOOR = SearchFloor(sqnr_db=30)


def targets(name: str, *schemes):
    net, data = NETS[name]
    model, samples = net(), data(64, 1)
    return model, [SearchTarget(all_ranges(model, samples), scheme) for scheme in schemes], runs(samples)


@pytest.mark.parametrize("name", NETS)
def test_a_kind_gets_the_same_result_beside_another(name):
    model, expected, samples = targets(name, CPU, TENSORRT_FP32)
    for target, result in zip(expected, choose_each(model, expected, samples, FLOOR), strict=True):
        choice = choose(model, target.ranges, target.scheme, samples, FLOOR)
        assert result.model.SerializeToString() == choice.model.SerializeToString()
        assert (result.ranges, result.point, dict(result.left)) == (choice.ranges, choice.point, dict(choice.left))


def test_graphs_that_no_scheme_changes_are_made_once(monkeypatch):
    calls = []

    def count(module, name):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments, **more: calls.append(name) or inner(*arguments, **more))

    count(trial, "gather")
    count(smooth, "moments_of")
    count(smooth, "compensate")
    model, expected, samples = targets("convolutions", CPU, TENSORRT_FP32)
    choose_each(model, expected, samples)
    layers = sum(node.op_type == "Conv" for node in model.graph.node)
    assert (calls.count("gather"), calls.count("moments_of"), calls.count("compensate")) == (1, 1, layers)


class Counting(SearchClock):
    """Is over at a question."""

    questions = 0
    last = 0

    def check(self, during: str, done: int | None = None) -> None:
        Counting.questions += 1
        if Counting.questions > Counting.last:
            raise OutOfTimeError(f"ended during {during}")


def test_a_search_without_time_leaves_all_in_float_and_is_reported():
    model, expected, samples = targets("outliers", CPU)
    (result,) = choose_each(model, expected, samples, FLOOR, clock=SearchClock(1.0, 0.0))
    assert result.point.share == 0 and len(result.left) == 3
    assert dict(result.formats) == dict.fromkeys(result.left, "fp16")
    assert "ended after its 1 s, during gathering statistics" in result.ended
    assert result.ended in result.summary and all(result.ended in reason for reason in result.left.values())


def test_a_search_out_of_time_gives_its_best_valid_point(monkeypatch):
    model, expected, samples = targets("outliers", CPU)
    floor = SearchFloor(sqnr_db=36)
    result = choose_each(model, expected, samples, floor)[0]
    seen_flags = set()
    monkeypatch.setattr(SearchClock, "part", lambda self, parts: self)
    for last_index in range(60):
        monkeypatch.setattr(Counting, "questions", 0)
        monkeypatch.setattr(Counting, "last", last_index)
        actual = choose_each(model, expected, samples, floor, clock=Counting())[0]
        assert actual.point.share == 0 or actual.point.sqnr_db >= 36
        assert not actual.ended or "the floor" not in actual.summary
        seen_flags.add((bool(actual.ended), actual.point.share == 0))
        if not actual.ended:
            break
    assert actual.point == result.point and {(True, True), (False, False)} <= seen_flags


def test_parts_of_a_time_are_equal():
    clock = SearchClock.start(1000)
    assert clock.part(2).end == pytest.approx(clock.end - 500, abs=5) and clock.part(1).end == clock.end
    assert SearchClock().part(3).end == np.inf


def test_steps_keep_their_order_and_a_slower_group_ends_in_float(monkeypatch) -> None:
    noises = {"nvfp4": {"g": 9.0}, "fp8": {"g": 1.0, "h": 0.5}, "mxfp8": {"g": 0.5}}
    groups = {name: SimpleNamespace(nodes=(name,)) for name in "gh"}
    side, work = SimpleNamespace(overrides={}), {"g": StatisticsWork(1, 4), "h": StatisticsWork(2, 4)}
    opened = SearchTrial(side, None, None, "nvfp4", groups, {}, work, noises, None)
    milliseconds = {"nvfp4": 4.0, "fp8": 3.0, "mxfp8": 2.0, "fp16": 1.0}
    opened.write = lambda steps, scheme: milliseconds[(form := opened.formats(steps))["g"]] + (form["h"] == "fp16")
    opened.point = opened.predict
    monkeypatch.setattr(selection, "with_weights_inside", lambda model: model)
    slow_point = selection._leave_slow_groups(opened, None, opened.point(()), lambda *pair: repeat(pair))
    assert opened.formats(slow_point.left) == {"g": "fp16", "h": "fp8"}
    reason = "mxfp8 is not faster here: the model takes 2 ms with it, 1 ms without"
    assert opened._reason("g", "", slow_point.left) == reason
    assert opened._reason("h", "rule", ()) == "rule: quantized alone it leaves 3.0 dB in fp8"
    assert (slow_point.float_groups, trial._record_point(slow_point).left, len(slow_point.left)) == (1, 1, 3)
    assert describe_point(slow_point).endswith("in the narrow format, 66.7 % in fp8, 33.3 % in fp16")
    lefts = ("g fp16",), ("g fp16", "g"), ("g",), ("g mxfp8", "g", "g fp16"), ()
    assert [opened.formats(float_nodes)["g"] for float_nodes in lefts] == ["nvfp4", "fp8", "fp8", "fp16", "nvfp4"]


def test_the_depth_is_found_if_damages_predict_it():
    names = [f"g{index:02}" for index in range(40)]
    ranking = Additive(dict.fromkeys(names, 1.0), {name: 1e-4 * (40 - position) for position, name in enumerate(names)})
    depth = selection._find_shallowest(ranking, SearchFloor(sqnr_db=15))
    assert ranking.predicted_db(ranking.ranked[:depth]) >= 15 > ranking.predicted_db(ranking.ranked[: depth - 1])
    assert len(ranking.qualities) == 3, "all in int8, the depth, and the one before"
    ranking.qualities.clear()
    ranking.worse.update({ranking.ranked[:position]: 0.05 for position in range(30)})
    assert selection._find_shallowest(ranking, SearchFloor(sqnr_db=15)) == 30
    assert len(ranking.qualities) < 12


def test_a_resize_to_computed_sizes_is_tried():
    """Half of its sizes come from before the convolution: onnxruntime loads no Resize that may have 0 of them."""
    text = """
        c = Conv<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(image, w)
        before = Shape<start=2>(image)
        behind = Shape<end=2>(c)
        sizes = Concat<axis=0>(behind, before)
        y = Resize<mode="linear">(c, , , sizes)
    """
    weights = {"w": np.random.default_rng(0).standard_normal((4, 1, 3, 3))}
    model, samples = build("float[batch,1,8,8] image", "float[batch,4,h,w] y", text, weights), images(16, 1)
    assert choose(model, all_ranges(model, samples), CPU, runs(samples), FLOOR).point.share == 1


def test_a_data_dependent_output_size_ends_no_search():
    """As of a detector that selects boxes itself: int8 selects others."""
    text = """
        m = MatMul(x, w)
        all = Reshape(m, flat)
        more = Greater(all, zero)
        y = Compress(all, more)
    """
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((5, 8)), "flat": np.array([-1]), "zero": np.float32(0)}
    model = build("float[batch,5] x", "float[n] y", text, weights)
    samples = {"x": rng.standard_normal((800, 5)).astype(np.float32)}
    result = choose(model, all_ranges(model, samples), CPU, runs(samples, 100), FLOOR)
    assert result.point.share == 0 and "leaves broken" in next(iter(result.left.values()))
