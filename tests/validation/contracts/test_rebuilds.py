import numpy as np
import pytest

from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, Fault, Linear
from validation.contracts.repeats import EngineRebuild, OutputSpread, reproducibility
from validation.golden.golden_set import freeze
from validation.limits.budget import Budgets, default_budget

BUDGETS = Budgets(default_budget("engine", "fp32"))


def rebuilt(engine: str, fault: Fault = lambda x, y: y) -> EngineRebuild:
    return EngineRebuild(engine, freeze(GOLDEN, SPECS, DIMS, Linear(fault).run))


def test_equal_rebuilds_are_reported_as_equal() -> None:
    message = reproducibility([rebuilt("a"), rebuilt("a"), rebuilt("a")], BUDGETS)
    assert (message.byte_equal, message.passed, message.engines) == (True, True, {"a": 3})
    assert message.outputs["y"] == OutputSpread(distinct=1, bit_equal=True, sqnr_db=None, max_abs=0.0)


def test_differences_in_bytes_and_last_bits_are_reported_and_pass() -> None:
    report = reproducibility([rebuilt("a"), rebuilt("b", lambda x, y: y * np.float32(1 + 3e-7)), rebuilt("a")], BUDGETS)
    assert (report.byte_equal, report.passed, report.engines) == (False, True, {"a": 2, "b": 1})
    output = report.outputs["y"]
    assert (output.distinct, output.bit_equal) == (2, False)
    assert 120 < output.sqnr_db < 135
    assert 0 < output.max_abs < 1e-5


def test_rebuilds_that_differ_beyond_the_limits_fail_by_output() -> None:
    message = reproducibility([rebuilt("a"), rebuilt("b", lambda x, y: y + np.float32(len(x) == 5))], BUDGETS)
    assert message.passed is False
    assert {check.case for check in message.failed} == {"batch=5"}
    assert message.outputs["y"].max_abs == pytest.approx(1, rel=1e-5)


def test_an_output_that_is_missing_or_has_another_shape_in_a_rebuild_fails() -> None:
    message = reproducibility([rebuilt("a"), rebuilt("b", lambda x, y: y[:, :2])], BUDGETS)
    assert message.passed is False
