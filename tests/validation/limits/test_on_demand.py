import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.validation.test_variation import Fake, broken, frozen
from validation.comparison.sessions import drift_checks
from validation.limits.budget import OutputLimits, StagedLimits, budgets, strictest
from validation.limits.noise_floor import Noise, OutputFloor
from validation.limits.rounding import Honest
from validation.limits.terms import Budget
from validation.metrics.drift import measure

OFFSET = 3.0
ROWS = np.random.default_rng(5).normal(size=(32, 8)).astype(np.float32)


def detector(inputs: np.ndarray) -> np.ndarray:
    """Ten columns of very different size, one of them constant and one zero."""
    signal = inputs @ np.random.default_rng(2).normal(size=(8, 10)) * 10.0 ** np.arange(-4, 6) + OFFSET
    signal[:, 3], signal[:, 4] = 0.0, 7.0
    return signal.astype(np.float32)


def off(scale: float, seed: int, column: int | None):
    """The same answers, off by normal errors of this size; where a column is given, in that one alone."""

    def answer(inputs: np.ndarray) -> np.ndarray:
        result = detector(inputs)
        errors = scale * np.random.default_rng(seed).normal(size=result.shape) * np.abs(result).mean(axis=0)
        errors[:, [index for index in range(result.shape[1]) if column not in (None, index)]] = 0.0
        return (result + errors).astype(np.float32)

    return answer


@given(
    precision=st.sampled_from(["fp32", "fp16", "bf16", "fp8", "int8", "int8-dynamic", "int4"]),
    honest=st.floats(-9, -1),
    actual=st.floats(-9, -1),
    seed=st.integers(0, 50),
    column=st.none() | st.integers(0, 9),
    floor=st.none() | st.floats(60, 150),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_outputs_within_the_strictest_limits_are_within_measured_limits(precision, honest, actual, seed, column, floor):
    kinds = ("golden", "edge")
    expected = detector(ROWS)
    drift = measure(expected, off(10.0**honest, seed + 1, None)(ROWS), samples=len(ROWS))
    strictest_drifts = Honest({("y", kind): drift for kind in kinds})
    noise = None if floor is None else Noise({"y": {kind: OutputFloor(floor, 1e-6) for kind in kinds}})
    measured_limits = OutputLimits(budgets("engine", precision, noise, strictest_drifts), strictest_drifts.drifts)
    first_limits = OutputLimits(strictest("engine", precision, noise))
    golden = frozen(detector, ROWS)
    candidate = Fake(off(10.0**actual, seed, column))
    if broken(drift_checks("engine", Fake(detector), candidate, golden, measured_limits)):
        assert broken(drift_checks("engine", Fake(detector), candidate, golden, first_limits))


def test_looser_limits_are_computed_once_and_only_after_a_failed_check():
    requests = []

    def looser():
        for least_db in (60.0, 20.0, 5.0):
            requests.append(least_db)
            yield OutputLimits.of(Budget(sqnr_db=least_db))

    golden, exact_runner, rough = frozen(detector, ROWS), Fake(detector), Fake(off(3e-2, 0, None))
    limits = StagedLimits(OutputLimits.of(Budget(sqnr_db=100.0)), looser())
    assert not broken(drift_checks("engine", exact_runner, exact_runner, golden, limits)) and requests == []
    checks = drift_checks("engine", exact_runner, rough, golden, limits)
    assert not broken(checks) and requests == [60.0, 20.0]
    assert {check.limit for check in checks if check.name == "sqnr_db"} == {20.0}
    assert limits.loosest().budgets.default.sqnr_db == 5.0 and requests == [60.0, 20.0, 5.0]


def test_a_check_that_fails_every_limit_shows_the_loosest():
    caps = StagedLimits(OutputLimits.of(Budget(sqnr_db=100.0)), iter([OutputLimits.of(Budget(sqnr_db=90.0))]))
    (check, *_) = broken(drift_checks("engine", Fake(detector), Fake(off(0.1, 0, None)), frozen(detector, ROWS), caps))
    assert check.limit == 90.0
