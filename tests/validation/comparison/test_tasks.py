"""Task metrics over a golden set: against labels and the original model, and in the place of limits on drift."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from enginesmith.core.errors import DataError, EnginesmithError, InputError
from enginesmith.core.reports.proof import Check, judge
from tests.validation.comparison.fakes import DIMS, SPECS, Fake, golden, original
from validation.comparison.sessions import drift_checks
from validation.comparison.tasks import lift_limits, limits_at_other_sizes, task_checks
from validation.golden.golden_set import freeze
from validation.limits.budget import HONEST_DB, LEAST_DB
from validation.limits.terms import Budget
from validation.metrics.tally import Spreads
from validation.metrics.tasks.terms import (
    AccuracyMetric,
    DetectionMetric,
    RegressionMetric,
    SignalDistortion,
    TokensMetric,
    TopKMetric,
)


def classes(inputs):
    return {"y": np.argmax(inputs["x"], axis=1)}


def accuracy(floor=None, output="y", decides=False):
    return AccuracyMetric(output, floor=floor, against="labels", decides=("int8",) if decides else ())


def decisions(floor=0.9, decides=False):
    return TopKMetric("y", 1, floor=floor, decides=("int8",) if decides else ())


def only(session, frozen, metric) -> Check:
    (check,) = task_checks(session, frozen, [metric])
    return check


def right_labels():
    x = np.concatenate([case.inputs["x"] for case in golden().of_kind("golden")])
    return np.argmax(x, axis=1)


def test_accuracy_is_over_all_golden_cases_in_order():
    labels = right_labels()
    labels[0] = (labels[0] + 1) % 3
    check = only(Fake(original), golden(labels), accuracy(0.9))
    assert check.value == 7 / 8 and not check.passed and check.limit == 0.9
    assert check.note.startswith(
        "the original model has 0.8750; 7 of 8: the true share is at least 0.53, with 95 % confidence"
    )
    assert only(Fake(original), golden(labels), accuracy()).passed
    assert only(Fake(classes), golden(labels), accuracy(0.8)).passed


def test_a_pass_on_few_samples_gives_the_sufficient_number():
    check = only(Fake(original), golden(), decisions(0.95))
    assert check.passed and check.value == 1.0
    needed_text = "59 samples without an error would be needed to show 0.95"
    assert check.note == f"8 of 8: the true share is at least 0.69, with 95 % confidence; {needed_text}"
    assert "needed to show" not in only(Fake(original), golden(), decisions(0.6)).note


def raises(inputs):
    raise EnginesmithError("out of memory")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raises, "out of memory"),
        (lambda i: {"z": i["x"]}, "'y' is not an output"),
        (lambda i: {"y": i["x"][:1]}, "1 answers"),
        (lambda i: {"y": i["x"][:, :0]}, ""),
    ],
    ids=["raises", "missing", "shape", "empty"],
)
@pytest.mark.parametrize("metric", [accuracy(0.1), accuracy(), decisions(0.1)])
def test_a_candidate_that_does_not_answer_fails_the_task(answer, message, metric):
    check = only(Fake(answer), golden(np.zeros(8)), metric)
    assert message in check.note
    assert (not check.passed and check.value is None) if message else not check.value


def test_an_output_of_nan_has_no_accuracy():
    nan = Fake(lambda i: {"y": i["x"] * np.float32(np.nan)})
    assert only(nan, golden(np.zeros(8, np.int64)), accuracy(0.1)).value == 0
    assert only(nan, golden(), decisions()).value == 0


@pytest.mark.parametrize(
    ("labels", "metric", "error", "message"),
    [
        (None, accuracy(0.5), DataError, "no labels"),
        (np.arange(7) % 3, accuracy(0.5), DataError, "8 answers, but there are 7 labels"),
        (np.arange(9) % 3, accuracy(0.5), DataError, "8 answers, but there are 9 labels"),
        (np.arange(8), accuracy(0.5, "z"), InputError, "'z' is not an output; known: y"),
        (np.arange(8), TokensMetric("y"), DataError, r"has the shape \(4, 3\); .* 3 axes"),
        (np.ones((8, 2)), RegressionMetric("y", against="labels"), DataError, "labels do not fit"),
    ],
)
def test_an_unmeasurable_task_is_an_error(labels, metric, error, message):
    with pytest.raises(error, match=message):
        task_checks(Fake(original), golden(labels), [metric])


def test_several_metrics_use_one_run_of_each_case():
    calls = []

    def counted(inputs):
        calls.append(len(inputs["x"]))
        return original(inputs)

    actual = task_checks(Fake(counted), golden(), [decisions(), RegressionMetric("y", relative_error=0)])
    assert calls == [4, 4]
    assert [check.name for check in actual] == ["top_k", "r2", "relative_error", "largest_error"]
    assert [check.limit for check in actual] == [0.9, None, 0, None] and all(check.passed for check in actual)


def scaled(inputs):
    return {"y": inputs["x"] * 2.5}


def test_a_deciding_metric_replaces_drift_limits():
    frozen_golden, metrics = golden(), [decisions(decides=True)]
    drift = drift_checks("engine", None, Fake(scaled), frozen_golden, Budget(sqnr_db=40.0, max_rel=1e-3, cosine=0.999))
    broken_limits = {(check.name, check.case): check.limit for check in drift if not check.passed}
    assert {name for name, _ in broken_limits} == {"sqnr_db", "max_rel"}
    assert lift_limits(drift, [decisions()]) == list(drift)
    lifted_checks = lift_limits(drift, metrics)
    assert {(check.name, check.case): check.waived for check in lifted_checks if check.waived} == broken_limits
    assert [check.value for check in lifted_checks] == [check.value for check in drift]
    assert all(check.limit == 0.999 for check in lifted_checks if check.name == "cosine")
    verdict, reason = judge([*lifted_checks, *task_checks(Fake(scaled), frozen_golden, metrics)])
    assert verdict == "proven"
    assert "judged by top_k 1 (golden.metric decides), not by engine max_rel of y 0.25 (limit 0.001)" in reason
    wrong_runner = Fake(lambda i: {"y": -i["x"]})
    assert judge([*lifted_checks, *task_checks(wrong_runner, frozen_golden, metrics)])[0] == "failed"


@pytest.mark.parametrize(
    "answer",
    [
        raises,
        lambda i: {"y": i["x"] * np.float32(np.nan)},
        lambda i: {"y": i["x"][:, :2]},
        lambda i: {"y": i["x"].astype(np.float64)},
        lambda i: {"y": np.full_like(i["x"], 2)},
    ],
    ids=["raises", "nan", "shape", "dtype", "constant"],
)
def test_checks_other_than_drift_always_count(answer):
    drift = drift_checks("engine", None, Fake(answer), golden(), Budget(sqnr_db=40.0))
    assert any(not check.passed for check in lift_limits(drift, [decisions(decides=True)]))


BOXES = Check("quantization", "shape", "boxes", "golden 1", 11.0, 10.0, False, "expected shape (10, 4), got (11, 4)")
DETECTION = DetectionMetric("boxes", scores="scores")


@pytest.mark.parametrize(
    ("metric", "check", "lifted"),
    [
        (DETECTION, BOXES, True),
        (DETECTION, replace(BOXES, output="scores"), True),
        (DETECTION, replace(BOXES, output="masks"), False),
        (DETECTION, replace(BOXES, output="scores", value=9.0), False),
        (DETECTION, replace(BOXES, output="scores", case="golden 2"), False),
        (DETECTION, replace(BOXES, stage="export"), False),
        (DETECTION, replace(BOXES, name="outputs", value=None, limit=None), False),
        (replace(DETECTION, head=True), BOXES, False),
        (RegressionMetric("boxes"), BOXES, False),
    ],
)
def test_with_deciding_detection_a_graph_may_select_other_numbers_of_boxes(metric, check, lifted):
    result = lift_limits([BOXES, check], [replace(metric, decides=("int8",))])[1]
    assert result.passed is lifted and (result.waived == check.limit) is (lifted or check.limit is None)


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_limit_without_a_number_is_not_lifted(value):
    check = Check("engine", "sqnr_db", "y", "golden", value, 40.0, False)
    assert lift_limits([check], [decisions(decides=True)]) == [check]
    assert lift_limits([replace(check, value=39.0)], [decisions(decides=True)])[0].passed


def test_other_sizes_may_drift_twice_as_far_as_the_worst_golden_sample():
    spreads = Spreads()
    drift_checks("engine", None, Fake(lambda i: {"y": i["x"] * 2 + np.float32(0.01)}), golden(), Budget(), spreads)
    (spread,) = spreads.at("engine")
    assert limits_at_other_sizes([spread], [decisions()]) is None
    budgets = limits_at_other_sizes([spread], [decisions(), decisions(decides=True)]).current.budgets
    assert budgets.of("y", "edge") == Budget(sqnr_db=min(spread.sqnr_db) - HONEST_DB, argmax_agreement=0.0)
    assert budgets.of("z", "edge") == Budget(argmax_agreement=0.0)
    lost = replace(spread, sqnr_db=(-math.inf, 40.0))
    assert limits_at_other_sizes([lost], [decisions(decides=True)]).current.budgets.of("y", "edge").sqnr_db == LEAST_DB


def test_drift_of_the_export_always_counts():
    drift = drift_checks("export", None, Fake(scaled), golden(), Budget(sqnr_db=40.0))
    assert lift_limits(drift, [decisions(decides=True)]) == list(drift)


def test_a_deciding_metric_checks_the_edges_too():
    def large_is_wrong(inputs):
        return {"y": inputs["x"] * (-2 if len(inputs["x"]) == 8 else 2)}

    assert only(Fake(large_is_wrong), golden(), decisions()).passed
    check, edges = task_checks(Fake(large_is_wrong), golden(right_labels()), [accuracy(0.9, decides=True)])
    assert check.passed and (edges.case, edges.passed, edges.limit) == ("edges", False, pytest.approx(0.8))


def shifted(inputs):
    """One sample of the edges has another class than it should."""
    value = inputs["x"] * 2
    if len(value) == 1:
        value = np.roll(value, 1, axis=1)
    return {"y": value}


@pytest.mark.parametrize(
    ("metric", "loosened"),
    [
        (TopKMetric("y", 1, floor=0.8), 0.6),
        (TopKMetric("y", 1, floor=0.999), 12 / 13),  # of 1, 4 and 8 samples
        (RegressionMetric("y", relative_error=0.02), 0.04),
        (RegressionMetric("y", floor=0.99), 0.98),
        (SignalDistortion("y", least_si_sdr_db=30.0), 30 - HONEST_DB),
    ],
)
def test_limits_at_the_edges_are_doubled_and_allow_one_wrong_answer(metric, loosened):
    checks = task_checks(Fake(shifted), golden(), [replace(metric, decides=("int8",))])
    (result,) = [check for check in checks if check.case == "edges" and check.limit is not None]
    assert result.limit == pytest.approx(loosened)
    assert result.passed is (metric.name == "top_k")


@pytest.mark.parametrize(("first", "have"), [(10, "10..17"), (-7, "-7..0")])
@pytest.mark.parametrize("metric", [AccuracyMetric("y"), TopKMetric("y", k=2)], ids=["accuracy", "top_k"])
def test_labels_without_a_class_in_the_output_are_reported(metric, first, have):
    def scores(inputs):
        return {"y": inputs["x"]}

    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    labelled_golden = freeze([{"x": x}], SPECS, DIMS, scores, first + np.arange(8))
    with pytest.raises(DataError, match=re.escape(f"labels are {have}, the output has 3 classes, which are 0..2")):
        task_checks(Fake(scores), labelled_golden, [replace(metric, against="labels")])


def test_a_floor_by_labels_applies_per_class():
    x = np.eye(10, dtype=np.float32)[np.array([*(np.arange(144) % 9), 9, 9, 9, 9])]
    specs = [replace(SPECS[0], shape=("batch", 10))]
    labels = x.argmax(1)
    frozen_golden = freeze([{"x": x}], specs, (), lambda inputs: {"y": inputs["x"]}, labels)

    def loses(rows):
        return Fake(lambda inputs: {"y": np.where(np.isin(np.arange(len(x)), rows)[:, None], 1 - x, x)})

    lost = only(loses([144, 145, 146, 147]), frozen_golden, accuracy(0.9))
    assert lost.value > 0.95 and not lost.passed and "lose over half of their right answers: 9" in lost.note
    assert only(loses([0, 1, 2, 3]), frozen_golden, accuracy(0.9)).passed, "one of sixteen each"
