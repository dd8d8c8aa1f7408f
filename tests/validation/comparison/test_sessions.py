import math

import numpy as np
import pytest

from enginesmith.core.errors import EnginesmithError
from tests.validation.comparison.fakes import SPECS, Fake, golden, original
from validation.comparison.sessions import drift_checks, edge_checks, expected_checks
from validation.golden.golden_set import freeze
from validation.limits.terms import Budget


def by_name(checks, case=None):
    return {check.name: check for check in checks if case is None or (check.case == "golden") is (case == "golden")}


def test_an_exact_candidate_passes_everything():
    checks = drift_checks("engine", Fake(original), Fake(original), golden(), Budget(max_abs=0, sqnr_db=100))
    assert checks and all(check.passed for check in checks)
    assert {check.stage for check in checks} == {"engine"}
    assert by_name(checks, "golden")["sqnr_db"].value == math.inf


@pytest.mark.parametrize("referred", [True, False])
def test_the_first_case_runs_twice_on_the_reference_if_there_is_one(referred):
    def answer(inputs, runs):
        runs.append(inputs["x"])
        return original(inputs)

    count_log, call_log = [], []
    twice, single = Fake(lambda i: answer(i, count_log)), Fake(lambda i: answer(i, call_log))
    cases = golden().cases
    drift_checks("engine", twice if referred else None, single if referred else twice, golden(), Budget(max_abs=0))
    assert len(count_log) == len(cases) + 1 and count_log[0] is count_log[1] and count_log[1] is not count_log[2]
    assert len(call_log) == (len(cases) if referred else 0)


def test_values_without_a_limit_are_reported():
    checks = expected_checks("export", Fake(lambda i: {"y": i["x"] * 2.5}), golden(), Budget())
    check = by_name(checks, "golden")["sqnr_db"]
    assert check.passed and check.limit is None and check.value == pytest.approx(20 * math.log10(4), rel=1e-4)


def test_golden_cases_are_merged_and_the_worst_index_is_named():
    def one_wrong(inputs):
        y = inputs["x"] * 2
        y[-1, 2] += 100 if len(y) == 4 else 0
        return {"y": y}

    check = by_name(expected_checks("engine", Fake(one_wrong), golden(), Budget(max_abs=1)), "golden")["max_abs"]
    assert not check.passed and check.value == pytest.approx(100, rel=1e-5) and check.note == "at index [3, 2]"


def test_an_error_at_one_edge_fails_and_names_it():
    def wrong_at_max(inputs):
        return {"y": inputs["x"] * (1 if len(inputs["x"]) == 8 else 2)}

    checks = expected_checks("engine", Fake(wrong_at_max), golden(), Budget(sqnr_db=40))
    assert by_name(checks, "golden")["sqnr_db"].passed
    edge = by_name(checks, "edge")["sqnr_db"]
    assert not edge.passed and edge.case == "batch=8"


def test_other_broken_edges_are_named():
    checks = expected_checks("engine", Fake(lambda i: {"y": i["x"] * 3}), golden(), Budget(sqnr_db=40))
    edge = by_name(checks, "edge")["sqnr_db"]
    assert {edge.case, *edge.note.removeprefix("also ").split(", ")} == {"batch=1", "batch=4", "batch=8"}


def test_decisions_at_an_edge_are_counted_too():
    expected = np.eye(4, 3, dtype=np.float32)
    pair = (expected, np.where(np.arange(4)[:, None], expected, [0, 0, 1]))
    limits = (Budget(argmax_agreement=0.9), None)
    result = by_name(edge_checks("engine", ("batch=4", [expected]), "y", pair, None, limits))["argmax_agreement"]
    assert (result.value, result.passed) == (0.75, False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_never_pass(bad):
    def broken(inputs):
        y = inputs["x"] * 2
        y[0, 0] = bad
        return {"y": y}

    checks = expected_checks("engine", Fake(broken), golden(), Budget())
    assert [check.passed for check in checks if check.name == "nonfinite"] == [False, False]


def test_a_nan_reference_never_passes():
    frozen_golden = freeze([{"x": np.ones((1, 3), np.float32)}], SPECS, [], lambda i: {"y": i["x"] * np.nan})
    nan = Fake(lambda i: {"y": i["x"] * np.float32(np.nan)})
    assert not by_name(expected_checks("engine", nan, frozen_golden, Budget()))["nonfinite"].passed


def test_a_reference_that_raises_raises():
    def raises(inputs):
        raise EnginesmithError("broken model")

    with pytest.raises(EnginesmithError, match="broken model"):
        drift_checks("engine", Fake(raises), Fake(original), golden(), Budget())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda i: {"z": i["x"]}, "missing"),
        (lambda i: {"y": i["x"][:, :2]}, "expected shape"),
        (lambda i: {"y": i["x"].astype(np.int64)}, "expected float32, got int64"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_other_outputs_fail(answer, message):
    checks = expected_checks("engine", Fake(answer), golden(), Budget())
    assert checks and not any(check.passed for check in checks) and message in checks[0].note


def classes(inputs):
    return {"y": np.argmax(inputs["x"], axis=1)}


@pytest.mark.parametrize(("limit", "passes"), [(None, False), (0.99, False), (0.5, True)])
def test_integer_outputs_must_be_equal_unless_a_share_is_allowed(limit, passes):
    frozen_golden = freeze([{"x": np.eye(3, dtype=np.float32)}], SPECS, [], classes)
    other_runner = Fake(lambda i: {"y": np.array([0, 1, 1])})
    check = by_name(expected_checks("engine", other_runner, frozen_golden, Budget(argmax_agreement=limit)))["agreement"]
    assert check.passed is passes and check.value == pytest.approx(2 / 3)
