import pytest

from pipeline.regressions.check import judge_coverage, judge_pair
from pipeline.regressions.findings import AnswerDrift, EnginePair, MetricPair
from pipeline.regressions.pairs import CheckOptions, drift_budget
from tests.pipeline.regressions.samples import UNIT, pair, times


def rules(engines: EnginePair, options: CheckOptions | None = None, judged_by_metric: bool = True) -> list[str]:
    return [f"{item.level} {item.rule}" for item in judge_pair(engines, options or CheckOptions(), judged_by_metric)]


@pytest.mark.parametrize(
    ("low", "ratio", "high", "expected"),
    [
        (1.031, 1.05, 1.07, ["error latency"]),
        (1.029, 1.05, 1.07, ["warning too-noisy"]),
        (0.95, 1.0, 1.05, ["warning too-noisy"]),
        (0.99, 1.0, 1.01, []),
        (0.5, 0.6, 0.7, []),
        (None, None, None, ["warning too-noisy"]),
    ],
)
def test_a_slowdown_must_be_significant(low: float, ratio: float, high: float, expected: list[str]) -> None:
    assert rules(pair(times=(times(low, ratio, high),))) == expected


def test_the_threshold_of_slowdowns_is_the_option() -> None:
    slow = pair(times=(times(1.05, 1.06, 1.07),))
    assert rules(slow, CheckOptions(slower=0.1)) == [] and rules(slow, CheckOptions(slower=0.0)) == ["error latency"]


@pytest.mark.parametrize(
    ("name", "new", "served", "lost"),
    [
        ("accuracy", 0.990, 0.996, True),
        ("accuracy", 0.992, 0.996, False),
        ("accuracy", 1.0, 0.9, False),
        ("accuracy", None, 0.9, True),
        ("accuracy", float("nan"), 0.9, True),
        ("accuracy", 0.1, None, False),
        ("character_error", 0.02, 0.01, True),
        ("character_error", 0.01, 0.02, False),
        ("perplexity", 10.2, 10.0, True),
        ("perplexity", 10.05, 10.0, False),
        ("si_sdr_db", 12.4, 13.0, True),
        ("si_sdr_db of out", 12.6, 13.0, False),
    ],
)
def test_a_task_metric_may_lose_its_allowed_amount(name: str, new: float, served: float, lost: bool) -> None:
    allowed_value = CheckOptions().allowed_loss(name, served or 0.0)
    assert rules(pair(metrics=(MetricPair(name, new, served, allowed_value),))) == (["error metric"] if lost else [])


def test_a_lost_metric_is_reported_with_both_values() -> None:
    worse_pair = pair(metrics=(MetricPair("accuracy", 0.90, 0.95, 0.01),))
    (result,) = judge_pair(worse_pair, CheckOptions(), judged_by_metric=True)
    assert "accuracy 0.9000, served version 0.9500" in result.text and result.text.endswith("the limit is 0.01 worse")


def test_a_metrics_own_allowed_loss_precedes_the_general_one() -> None:
    options = CheckOptions(worse={"accuracy": 0.1, "": 0.2})
    assert options.allowed_loss("accuracy of logits", 1.0) == 0.1 and options.allowed_loss("r2", 1.0) == 0.2


def test_other_answers_are_a_regression_without_another_judge() -> None:
    drifted_pair = pair(drift=(AnswerDrift("golden", "logits", "sqnr_db", 3.0, 15.0, False),))
    assert rules(drifted_pair, judged_by_metric=False) == ["error drift"]
    assert rules(drifted_pair, judged_by_metric=True) == ["note drift"]
    assert rules(drifted_pair, CheckOptions(drift="fail"), judged_by_metric=True) == ["error drift"]
    assert rules(drifted_pair, CheckOptions(drift="note"), judged_by_metric=False) == ["note drift"]


def test_other_inputs_are_a_regression_and_end_the_comparison() -> None:
    changed_pair = pair(remarks=("its inputs are x: float32 of 2 axes; the served engine's are y: float32 of 2 axes",))
    assert rules(changed_pair) == ["error interface"]
    assert rules(pair(remarks=("times could not be compared: a crash",))) == ["warning not-compared"]


def test_a_target_without_an_engine_is_a_regression_and_a_precision_a_note() -> None:
    class Entry:
        def __init__(self, target: str, precision: str) -> None:
            self.target, self.unit = target, f"{target} {precision} onnxruntime"

    served_entries = [Entry("cpu", "int8"), Entry("cpu", "fp32"), Entry("sm_89", "fp16")]
    result = list(judge_coverage(served_entries, [Entry("cpu", "fp32")], ["cpu", "sm_89"], "digits@3"))
    assert [(item.level, item.unit) for item in result] == [("note", UNIT), ("error", "sm_89")]
    assert not list(judge_coverage(served_entries[2:], [], ["cpu"], "digits@3"))


def test_two_precisions_use_the_limits_of_the_coarser_one() -> None:
    assert drift_budget(("fp32", "int8"), {}).sqnr_db == drift_budget(("int8", "fp32"), {}).sqnr_db == 15.0
    assert drift_budget(("fp32", "fp32"), {}).sqnr_db == 80.0
    assert drift_budget(("int8", "int8"), {"sqnr_db": 30.0}).sqnr_db == 30.0
