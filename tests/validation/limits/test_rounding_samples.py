"""The quartile of samples: a fault that moves most samples shows where rounding moves a few by more."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.faults.campaign import Subject
from tests.faults.families import FAMILIES
from tests.faults.plants import PLANTS
from validation.comparison.sessions import expected_checks
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import LEAST_DB, budgets, strictest
from validation.limits.rounding import FEWEST_SAMPLES, Honest, sqnr_of_most
from validation.metrics.drift import STEPS, Drift, SampleErrors, measure

NEAR = 10 * math.log10(2) / STEPS


def noisy(count: int = 48, width: int = 6, offset: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    expected = offset + rng.normal(size=(count, width))
    return expected, expected + 1e-4 * rng.normal(size=(count, width))


def quartile(expected: np.ndarray, actual: np.ndarray) -> float:
    errors = np.square(actual - expected).reshape(len(expected), -1).mean(1)
    variation = np.square(expected - expected.mean(0)).mean()
    return float(10 * np.log10(variation / np.sort(errors)[math.ceil(0.75 * len(errors)) - 1]))


@pytest.mark.parametrize("offset", [0.0, 288.0])
@pytest.mark.parametrize("shape", [(48, 6), (1000, 1), (30, 4, 5), (7, 3, 20000)])
def test_three_of_four_samples_are_that_near_or_nearer(shape: tuple[int, ...], offset: float) -> None:
    rng = np.random.default_rng(0)
    expected = offset + rng.normal(size=shape)
    actual = expected + 1e-4 * rng.normal(size=shape) * rng.uniform(0.1, 10, (shape[0], *(1,) * (len(shape) - 1)))
    drift = measure(expected, actual, samples=shape[0])
    assert drift.quartile_sqnr_db == pytest.approx(quartile(expected, actual), abs=1.01 * NEAR)
    cut = shape[0] // 3
    parts = [measure(expected[at], actual[at], samples=len(expected[at])) for at in (slice(cut), slice(cut, None))]
    assert parts[0].merge(parts[1]).quartile_sqnr_db == pytest.approx(drift.quartile_sqnr_db, abs=1e-6)


def test_few_samples_with_great_errors_do_not_hide_what_all_have() -> None:
    expected, actual = noisy()
    flipped = actual.copy()
    flipped[:10] += 0.5
    assert measure(expected, flipped, samples=48).sqnr_db < 15
    assert measure(expected, flipped, samples=48).quartile_sqnr_db > 75
    flipped[:13] += 0.5
    assert measure(expected, flipped, samples=48).quartile_sqnr_db < 15


def test_equal_samples_and_those_that_are_not_finite() -> None:
    expected, actual = noisy()
    assert measure(expected, expected, samples=48).quartile_sqnr_db == math.inf
    actual[12:] = expected[12:]
    assert measure(expected, actual, samples=48).quartile_sqnr_db == math.inf
    actual[0] = np.nan
    assert measure(expected, actual, samples=48).nonfinite == 6
    assert measure(np.full((4, 2), 1e200), np.full((4, 2), 2e200), samples=4).quartile_sqnr_db == -math.inf
    assert measure(expected, actual).quartile_sqnr_db == math.inf, "samples that are not known"


def test_however_many_samples_there_are_a_few_hundred_counts_are_kept() -> None:
    rng = np.random.default_rng(0)
    found = SampleErrors()
    for _ in range(50):
        found = found.merge(SampleErrors.of(10 ** rng.normal(-6, 0.3, 2000), 0))
    assert found.samples == 100_000 and len(found.counts) < 400


def golden(expected: np.ndarray) -> GoldenSet:
    x = np.arange(len(expected), dtype=np.float32)
    parts = np.split(np.arange(len(expected)), 12)
    return GoldenSet(tuple(Case(f"golden {at[0]}", "golden", {"x": x[at]}, {"y": expected[at]}) for at in parts))


class Answers:
    inputs = outputs = ()

    def __init__(self, actual: np.ndarray) -> None:
        self.actual = actual

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": self.actual[inputs["x"].astype(int)]}


def test_the_quartile_has_a_limit_where_honest_rounding_was_measured_and_by_a_person() -> None:
    expected, actual = noisy()
    for limits, limit in (
        (budgets("engine", "int8", None, Honest(most_samples={"y": 90.0})), 84.0),
        (budgets("engine", "int8", None), None),
        (budgets("engine", "int8", None, Honest(most_samples={"y": 90.0})).override({"quartile_sqnr_db": 70.0}), 70.0),
        (budgets("engine", "int8", None, Honest(most_samples={"y": 90.0})).override({"sqnr_db": 30.0}), None),
        (budgets("quantization", "fp16", None, Honest(most_samples={"y": 90.0})), None),
    ):
        checks = expected_checks("engine", Answers(actual), golden(expected), limits)
        (check,) = [check for check in checks if check.name == "quartile_sqnr_db"]
        assert check.value == pytest.approx(80, abs=3) and check.limit == limit
        assert check.passed is (limit is None or limit < check.value)


@pytest.mark.parametrize("honest_db", [math.inf, 140.0, 60.0, 1.0, -math.inf])
def test_no_measurement_is_stricter_than_the_strictest_limit(honest_db: float) -> None:
    held = budgets("engine", "int8", None, Honest(most_samples={"y": honest_db})).of("y", "golden").quartile_sqnr_db
    assert held is not None and LEAST_DB <= held <= 104.0 == strictest("engine", "int8", None).default.quartile_sqnr_db


def drift_of(errors: np.ndarray) -> Drift:
    return Drift(count=len(errors), centered_sq=float(len(errors)), samples=SampleErrors.of(errors, 0))


def test_few_samples_set_no_limit_and_more_of_them_more_than_their_worst() -> None:
    assert sqnr_of_most(drift_of(np.full(FEWEST_SAMPLES - 1, 1e-9))) is None
    assert sqnr_of_most(Drift(count=48)) is None
    for count, more in ((16, 0), (24, 1), (48, 4)):
        errors = np.where(np.arange(count) < more, 1e-4, 1e-9)
        assert sqnr_of_most(drift_of(errors)) == pytest.approx(90, abs=NEAR)
        errors[more] = 1e-4
        assert sqnr_of_most(drift_of(errors)) == pytest.approx(40, abs=NEAR)


@pytest.mark.parametrize("count", [16, 24, 48, 384])
def test_a_net_in_which_many_samples_move_raises_no_alarm(count: int) -> None:
    """Whatever share moves: another kernel moves others, and seldom a quarter where an honest run moved few."""
    rng = np.random.default_rng(0)
    for share in np.linspace(0.02, 0.6, 30):
        honest, engine = (rng.random((2000, count)) < share for _ in range(2))
        strict = honest.sum(1) <= count // 8 - 2
        off = engine.sum(1) > count - math.ceil(0.75 * count)
        assert np.mean(strict & off) <= 0.012


def test_edges_are_not_judged_by_a_quartile() -> None:
    expected, actual = noisy()
    cases = tuple(replace(case, kind="edge") for case in golden(expected).cases)
    limits = budgets("engine", "int8", None).override({"quartile_sqnr_db": 100.0})
    checks = expected_checks("engine", Answers(actual), GoldenSet(cases), limits)
    assert checks and not [check for check in checks if check.name == "quartile_sqnr_db"]


@pytest.mark.parametrize(
    ("fault", "precision"), [("epsilon 1e-3 for 1e-5", "int8-dynamic"), ("tanh for erf in GELU", "int8")]
)
def test_faults_as_small_as_one_element_on_the_other_side_of_a_step(fault: str, precision, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    subject = Subject(tmp_path / "encoder", FAMILIES["encoder"], 2)
    found = subject.plant(next(plant for plant in PLANTS if plant.name == fault), precision)
    assert found is not None and "quartile_sqnr_db" in found.by and found.right
