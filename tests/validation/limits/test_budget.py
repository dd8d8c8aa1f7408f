import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.core.errors import InputError
from enginesmith.core.types import PRECISIONS
from validation.limits.budget import allow_near_ties, budgets, default_budget, within
from validation.limits.noise_floor import Noise, OutputFloor
from validation.limits.rounding import Honest
from validation.limits.terms import Budget
from validation.metrics.drift import Drift

DOCS = Path(__file__).parents[3] / "docs/concepts/validation.md"


@pytest.mark.parametrize("name", ["max_abs", "max_rel", "sqnr_db", "cosine", "argmax_agreement", "nonfinite"])
@pytest.mark.parametrize("limit", [0.0, 1e9, -1e9, math.inf, -math.inf])
def test_nan_exceeds_every_limit(name, limit):
    assert not within(name, math.nan, limit)


@pytest.mark.parametrize(("floor", "limit"), [(135, 105), (115, 85), (105, 80), (90, 70), (65, 45), (10, 3)])
def test_a_floor_tightens_by_one_margin_and_loosens_by_a_smaller(floor, limit):
    actual = budgets("engine", "fp32", Noise({"y": {"golden": OutputFloor(floor, 1e-6)}}))
    assert actual.of("y", "golden").sqnr_db == limit
    assert ("looser than 80" in actual.notes["y", "golden"]) == (limit < 80)
    noise = Noise({"y": {"edge": OutputFloor(floor, 1e-6)}})
    honest_drifts = Honest({("y", "batch=3"): Drift(count=8, expected_sq=1.0, error_sq=1e-12)})
    assert budgets("engine", "fp32", noise, honest_drifts).of("y", "batch=3").sqnr_db == limit, "an edge of its own"


def test_every_default_is_in_the_documentation():
    text = DOCS.read_text()
    rows = {name: row for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for name in row.split("|")[1].split(",")}
    rows = {name.strip(): row for name, row in rows.items()}
    for precision in PRECISIONS:
        for stage in ("quantization", "engine"):
            budget = default_budget(stage, precision)
            assert f"| {budget.sqnr_db:g} | {budget.max_rel:g} |" in rows[precision]
        assert default_budget("export", precision).sqnr_db == default_budget("engine", "fp32").sqnr_db


def test_the_task_has_no_default():
    assert default_budget("task", "int8") == Budget()


def test_override_replaces_and_lifts():
    budget = default_budget("quantization", "int8").override({"sqnr_db": 12, "max_rel": None, "cosine": 0.9})
    assert budget == replace(default_budget("quantization", "int8"), sqnr_db=12.0, max_rel=None, cosine=0.9)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"sqnr": 3}, "'sqnr' is not a metric; did you mean 'sqnr_db'"),
        ({"colour": 3}, "known: max_abs, max_rel"),
        ({"sqnr_db": "high"}, "'high' is not a number"),
        ({"sqnr_db": math.nan}, "nan is not a number"),
        ({"sqnr_db": True}, "True is not a number"),
    ],
)
def test_wrong_limits_are_named(limits, message):
    with pytest.raises(InputError, match=message):
        Budget().override(limits)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_limit_of_a_graphs_element_is_not_stricter_than_its_sqnr(precision):
    """A few saturated outputs of a classifier: rounding moves the honest ones by 5e-5 of the peak, others by 4e-4."""
    drift = Drift(count=32, max_abs=5e-5, peak=1.0, error_sq=1e-8, expected_sq=1.0)
    honest = Honest({("y", "golden"): drift})
    limits = {stage: budgets(stage, precision, None, honest).of("y", "golden") for stage in ("quantization", "engine")}
    assert limits["quantization"].max_rel == pytest.approx(4 * 10 ** (-limits["quantization"].sqnr_db / 20))
    assert limits["engine"].max_rel == pytest.approx(4 * 5e-5)


def test_one_percent_of_an_int8_state_may_be_one_step_off():
    drift = Drift(count=1000, expected_sq=1000.0, error_sq=1e-12, centered_sq=1000.0)
    actual = budgets("engine", "int8", None, Honest({("present", "golden"): drift, ("y", "golden"): drift}))
    allowed_budgets = allow_near_ties(actual, {"present": 0.1}, {("present", "golden"): drift, ("y", "golden"): drift})
    assert allowed_budgets.of("y", "golden") == actual.of("y", "golden")
    budget = allowed_budgets.of("present", "golden")
    assert budget.slice_sqnr_db is None and actual.of("present", "golden").slice_sqnr_db is not None
    off_drifts = [Drift(count=1000, expected_sq=1000.0, error_sq=steps * 0.1**2) for steps in (10, 11)]
    assert [within("sqnr_db", item.sqnr_db, budget.sqnr_db) for item in off_drifts] == [True, False]
    assert "one element in 100 may be a step of 0.1 off" in allowed_budgets.notes["present", "golden"]
