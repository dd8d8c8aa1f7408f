"""Decisions that quantization changes: judged by what the data shows, and not by one near tie."""

import numpy as np
import pytest

from enginesmith.core.reports.proof import Check
from validation.comparison.sessions import decision_checks
from validation.golden.golden_set import GoldenSet
from validation.metrics.tasks.terms import AccuracyMetric

METRICS = [AccuracyMetric("y", against="labels")]


def checks_of(changed: int, rows: int) -> list[Check]:
    return [Check("quantization", "argmax_agreement", "y", "golden", 1 - changed / rows, None, True)]


@pytest.mark.parametrize(
    ("changed", "rows", "passes"),
    [
        (0, 48, True),
        (1, 48, True),
        (3, 48, True),
        (4, 48, False),
        (10, 1000, True),
        (17, 1000, True),
        (31, 1000, False),
    ],
)
def test_more_than_one_percent_must_be_shown(changed: int, rows: int, passes: bool) -> None:
    golden = GoldenSet((), np.zeros(rows, np.int64))
    (check,) = decision_checks(checks_of(changed, rows), golden, METRICS, {})
    assert check.passed is passes and check.limit == 0.01
    assert (check.value <= check.limit) is passes and f"{changed} of {rows} decisions" in check.note


def test_without_a_metric_or_with_a_limit_of_the_spec_there_is_nothing_to_judge() -> None:
    golden, found = GoldenSet((), np.zeros(48, np.int64)), checks_of(20, 48)
    assert decision_checks(found, golden, [], {}) == []
    assert decision_checks(found, golden, METRICS, {"argmax_agreement": 0.5}) == []
    assert decision_checks(found, GoldenSet(()), METRICS, {}) == []
