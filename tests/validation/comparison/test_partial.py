import numpy as np
import pytest

from enginesmith.core.reports.proof import Check
from enginesmith.core.types import TensorSpec
from validation.comparison.sessions import golden_drifts
from validation.comparison.tasks import find_broken, list_limits
from validation.golden.golden_set import Case, GoldenSet


class Noisy:
    """Answers x with an error of `error` on the calls that `calls` names."""

    inputs = outputs = (TensorSpec("x", "float32", ("n", 4)),)

    def __init__(self, error, calls):
        self.error, self.calls, self.called = error, calls, 0

    def run(self, inputs):
        self.called += 1
        return {"y": inputs["x"] + np.float32(self.error * (self.called in self.calls))}


@pytest.fixture
def golden():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 4)).astype("f") for _ in range(8)]
    return GoldenSet(tuple(Case(f"{i}", "golden", {"x": x}, {"y": x}) for i, x in enumerate(arrays)))


def failed(golden, session, metric, limit):
    return find_broken(session, golden.cases, golden_drifts(golden), [("y", metric, limit)])


def test_the_comparison_ends_at_the_first_case_over_the_total_limit(golden):
    session = Noisy(3.0, {1, 2, 3, 4, 5, 6, 7, 8})
    result = failed(golden, session, "sqnr_db", 10.0)
    assert not result.passed and result.value < 10.0
    assert session.called == 1


@pytest.mark.parametrize("metric", ["sqnr_db", "centered_sqnr_db"])
def test_an_error_that_other_cases_compensate_passes(golden, metric):
    whole_drifts = golden_drifts(golden)["y"]
    energy = {"sqnr_db": whole_drifts.expected_sq, "centered_sqnr_db": whole_drifts.centered_sq}[metric]
    error = 0.5
    at_best = 10 * np.log10(energy / (4 * error**2))
    assert failed(golden, Noisy(error, {1}), metric, at_best - 0.01) is None
    assert not failed(golden, Noisy(error, {1}), metric, at_best + 0.01).passed


def test_the_largest_error_counts_against_the_peak_of_all(golden):
    peak = golden_drifts(golden)["y"].peak
    assert failed(golden, Noisy(1.0, {2}), "max_rel", 1.01 / peak) is None
    assert not failed(golden, Noisy(1.0, {2}), "max_rel", 0.99 / peak).passed


def test_incomparable_cases_are_left_to_the_total_checks(golden):
    session = Noisy(0.0, ())
    session.run = lambda inputs: {}
    assert failed(golden, session, "sqnr_db", 1e9) is None


def test_only_additive_limits_of_golden_cases_count():
    def check(name, case, limit):
        return Check("quantization", name, "y", case, 1.0, limit, True)

    checks = [
        check("sqnr_db", "golden", 15.0),
        check("cosine", "golden", 0.9),
        check("max_rel", "golden", None),
        check("max_rel", "edge 1", 0.1),
    ]
    assert list_limits(checks) == [("y", "sqnr_db", 15.0)]
