from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, Target, TensorSpec
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.search.costs import CostModel
from pipeline.quantization.search.pareto import error_of, find_front, find_knee, list_depths
from pipeline.quantization.search.quality import SearchFloor
from pipeline.quantization.search.rates import PEAKS, name_rates, peaks_of
from pipeline.quantization.search.selection import choose_each
from pipeline.quantization.search.trial import FrontierPoint, MixedPrecisionChoice, SearchTarget
from tests.pipeline.quantization.search.outlier_nets import all_ranges, runs
from tests.pipeline.quantization.small_nets import CPU, attention_net, build, sentences
from validation.reporting.quantization import point_rows


def point(ms: float, sqnr_db: float, share: float = 0.5) -> FrontierPoint:
    return FrontierPoint(share, (f"{ms}",), None, sqnr_db, ms=ms)


FAST, BEND, SLOW, EXACT, BEATEN = point(1, 20, 1.0), point(2, 40), point(5, 44), point(9, 130, 0.0), point(3, 30)
POINTS = [SLOW, BEATEN, EXACT, FAST, BEND]


def test_a_dominated_point_is_not_on_the_front() -> None:
    assert find_front(POINTS) == [FAST, BEND, SLOW, EXACT]
    assert find_front([*POINTS, point(2, 40)])[1] == BEND, "of equal ones, the first"


def test_the_knee_is_where_more_speed_begins_to_cost_much() -> None:
    assert find_knee(POINTS) == BEND
    even_points = [FrontierPoint(1 - n / 4, (), None, -10 * np.log10(1 - n / 4 + 1e-9), ms=1 + n) for n in range(5)]
    assert find_knee(even_points) == even_points[0], "groups that cost the same for what they save are all taken"


def test_steps_double_up_to_all() -> None:
    assert list_depths(11) == [0, 1, 2, 4, 8, 11] and list_depths(1) == [0, 1]


class Counted:
    """A race in which each MatMul in int8 takes 1 ms, or `narrow_ms`, and each in float 3 ms."""

    def __init__(self, narrow_ms: float = 1) -> None:
        self.narrow_ms = narrow_ms

    def __call__(self, first: ModelProto, second: ModelProto) -> Iterator[tuple[float, float]]:
        return ((self._ms(first), self._ms(second)) for _ in count())

    def _ms(self, model: ModelProto) -> float:
        products = [node for node in model.graph.node if node.op_type == "MatMul"]
        return sum(self.narrow_ms if "dequantized" in node.input[0] else 3 for node in products)


def chosen(
    budget_ms: float | None = None, floor: SearchFloor | None = None, race: Any = None, **more: Any
) -> MixedPrecisionChoice:
    model, samples = attention_net(), sentences(64)
    target = SearchTarget(all_ranges(model, samples), CPU, race, peaks=peaks_of(Target("cpu"), "fp32"))
    return choose_each(model, [target], runs(samples), floor, budget_ms=budget_ms, **more)[0]


@pytest.mark.parametrize("race", [None, Counted()], ids=["modelled", "measured"])
def test_the_chosen_point_is_on_the_front_of_the_runs(race: Counted | None) -> None:
    knee = chosen(race=race)
    times = [entry.ms for entry in knee.table]
    budget_ms = (times[1] + times[2]) / 2
    floored_chosen = chosen(floor=SearchFloor(sqnr_db=44), race=race)
    within = chosen(budget_ms, race=race)
    for result in (knee, floored_chosen, within):
        front_points = find_front(result.table)
        assert result.point in front_points and len(front_points) > 1, result.rule
        assert all(entry.weight_bytes > 0 for entry in result.table)
        (marks,) = [[row[-1] for row in point_rows(result.document(None).recorded)]]
        assert marks.count("chosen") == 1 and set(marks) <= {"chosen", "front", ""}
    assert floored_chosen.point.ms == min(entry.ms for entry in floored_chosen.table if entry.sqnr_db >= 44)
    assert within.point.ms <= budget_ms
    assert error_of(within.point) == min(error_of(entry) for entry in within.table if entry.ms <= budget_ms)
    assert all(reason.startswith("the budget of ") for reason in within.left.values())
    assert within.latency == ("measured in 20 rounds" if race else within.latency) and within.rule in within.summary


def test_an_unreachable_goal_names_the_nearest_point() -> None:
    with pytest.raises(DataError, match=r"quantization.budget_ms 1e-09 is out of reach: the fastest point takes"):
        chosen(1e-9)
    result = chosen(floor=SearchFloor(sqnr_db=139))
    assert result.point.share == 0 and "the floor, which nothing narrow reaches; the nearest takes" in result.summary


def test_where_int8_is_slower_a_budget_uses_the_float_models_time() -> None:
    with pytest.raises(DataError, match=r"budget_ms 5 is .* the fastest point takes \d\d ms.*measured"):
        chosen(5, race=Counted(4))
    result = chosen(floor=SearchFloor(sqnr_db=20), race=Counted(4))
    assert result.point.share == 0 and "nothing narrow reaches" not in result.summary


def test_nodes_that_a_person_wants_in_int8_ignore_the_budget() -> None:
    names = [node.name for node in prepare_model(attention_net()).graph.node if node.op_type == "MatMul"]
    for race in (None, Counted(4)):
        assert chosen(100, race=race).point.share == 0
        assert chosen(100, race=race, overrides=dict.fromkeys(names, "own")).point.share == 1


def test_costs_are_modelled_at_the_tuned_sizes() -> None:
    specs = [TensorSpec("tokens", "int64", ("batch", "n")), TensorSpec("mask", "float32", ("batch", "n"))]
    small, large = (chosen(100, shapes=(specs, [Dim("batch", 1, opt_number, 512)])).point.ms for opt_number in (1, 512))
    assert large > 9 * small


def test_few_points_are_timed_for_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.quantization.search.selection._MOST_TIMED", 2)
    assert len(chosen(floor=SearchFloor(sqnr_db=50), race=Counted()).table) == 2, "of three that were run"


def product(rows: int, width: int = 1536) -> CostModel:
    weights: dict[str, Any] = {"w": np.ones((width, width))}
    net = prepare_model(build(f"float[{rows},{width}] x", f"float[{rows},{width}] y", "y = MatMul(x, w)", weights))
    costs = CostModel.of(net, {"x": (rows, width)})
    assert costs
    return costs


@pytest.mark.parametrize(("precision", "many", "few"), [
    ("int8", 2.0, 2.0), ("int4", 1.0, 3.8), ("nvfp4", 4.0, 3.5), ("nvfp4-weights", 1.0, 3.5)
])  # fmt: skip
def test_many_rows_gain_by_products_and_few_by_weight_bytes(precision: str, many: float, few: float) -> None:
    for rows, speedup in ((8192, many), (1, few)):
        costs, peaks = product(rows), PEAKS["sm_80"].with_floats("fp16")
        narrow_ms = costs.estimate_ms({"MatMul_y": precision}, peaks)
        assert costs.estimate_ms({}, peaks) / narrow_ms == pytest.approx(speedup, rel=0.06)
    assert costs.weight_bytes({}, "fp16") == 2 * 1536**2 > 1.9 * costs.weight_bytes({"MatMul_y": precision}, "fp16")


def test_unknown_generations_have_no_rates() -> None:
    assert peaks_of(Target("sm_103", (10, 3)), "fp16") is None
    rates = [PEAKS[name_rates(Target(kind))].eight_bits for kind in ("x86-64", "x86-64-v4-vnni")]
    assert rates[0] < rates[1]
