import itertools
from typing import Any

import numpy as np
import pytest

from enginesmith.core.codec import decode
from enginesmith.core.errors import ModelError
from enginesmith.core.reports.proof import UNMEASURED, Check
from enginesmith.core.types import Dim
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, Fault, Linear
from validation.contracts.predicates import find_broken
from validation.contracts.terms import Contract, Structure
from validation.contracts.two_sample import contract_checks
from validation.golden.golden_set import GoldenSet, freeze
from validation.limits.budget import Budgets, default_budget

BUDGETS = Budgets(default_budget("engine", "fp32"))


@pytest.fixture(scope="module")
def golden() -> GoldenSet:
    return freeze(GOLDEN, SPECS, DIMS, Linear().run)


def checked(golden: GoldenSet, contract: dict[str, Any], fault: Fault, batch: Dim | None = DIMS[0]) -> dict[str, Check]:
    actual = contract_checks(decode(contract, Contract), Linear(), Linear(fault), golden, (SPECS, batch), BUDGETS)
    return {check.name.removeprefix("contract "): check for check in actual}


def failed(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if not check.passed]


STRICT = {"bitwise": {"runs": 3, "position": True, "size": True}}
LOOSE = {"bitwise": {"runs": 3}}


def tail(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The last position of a batch of two or more is off by a few units in the last place."""
    moved_values = y.copy()
    moved_values[1:][-1:] *= np.float32(1 + 4e-7)
    return moved_values


def test_a_deterministic_engine_passes_a_bitwise_contract(golden: GoldenSet) -> None:
    def by_element(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x[:, :3] * np.float32(0.1)

    checks = checked(golden, STRICT, by_element)
    assert (set(checks), failed(checks)) == ({"bitwise", "batch size", "batch position"}, [])
    assert checks["bitwise"].value == 1.0
    assert len(checks["bitwise"].note.split("; ")[1]) == 64


def test_a_nondeterministic_op_breaks_bitwise(golden: GoldenSet) -> None:
    calls = itertools.count()
    checks = checked(golden, LOOSE, lambda x, y: y * np.float32(1 + 3e-7 * (next(calls) % 2)))
    assert failed(checks) == ["bitwise"]
    assert checks["bitwise"].value == 2.0


def test_dependence_on_the_position_is_measured_and_fails_if_bits_must_be_equal(golden: GoldenSet) -> None:
    checks = checked(golden, LOOSE, tail)
    assert failed(checks) == []
    assert "other bits" in checks["batch position"].note and 100 < (checks["batch position"].value or 0) < 140
    assert failed(checked(golden, STRICT, tail)) == ["batch position"]


def test_dependence_on_the_position_beyond_the_budget_always_fails(golden: GoldenSet) -> None:
    def swapped(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.concatenate([y[:1], y[:0:-1]])

    assert failed(checked(golden, LOOSE, swapped)) == ["batch position"]


def test_dependence_on_size_and_on_position_are_distinguished(golden: GoldenSet) -> None:
    strict_checks = checked(golden, STRICT, lambda x, y: y * np.float32(1 + (4e-7 if len(x) > 8 else 0)))
    assert failed(strict_checks) == ["batch size"]
    assert strict_checks["batch size"].case == "first of 16"
    assert failed(checked(golden, LOOSE, lambda x, y: y + np.float32(len(x) > 8))) == ["batch size"]


def test_decisions_may_depend_on_the_size_within_the_limits(golden: GoldenSet) -> None:
    def decided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.rint(y).astype(np.int64) + int(len(x) > 8)

    assert failed(checked(golden, LOOSE, decided)) == ["batch size"]
    lifted_budgets = Budgets(default_budget("engine", "fp32").override({"argmax_agreement": 0.0}))
    promised_value = decode(LOOSE, Contract)
    actual = contract_checks(promised_value, Linear(), Linear(decided), golden, (SPECS, DIMS[0]), lifted_budgets)
    assert all(check.passed for check in actual)


def test_a_bitwise_contract_without_a_batch_fails(golden: GoldenSet) -> None:
    assert failed(checked(golden, STRICT, lambda x, y: y, None)) == ["batch"]
    assert failed(checked(golden, LOOSE, lambda x, y: y, None)) == []


def test_an_engine_that_raises_fails_its_contract(golden: GoldenSet) -> None:
    def raises(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        raise ModelError("a kernel failed")

    assert failed(checked(golden, LOOSE, raises)) == ["runs"]
    assert failed(checked(golden, {"structured": {"y": {"finite": True}}}, raises)) == ["runs"]


SOFT = np.array([[0.2, 0.3, 0.5], [1, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ("structure", "good", "bad", "value"),
    [
        ({"finite": True}, SOFT, np.array([np.nan, np.inf, 1]), 2),
        ({"range": [0, 1]}, SOFT, SOFT - 0.25, 0.25),
        ({"range": [None, 1]}, SOFT - 9, SOFT + 0.5, 0.5),
        ({"range": [None, 1]}, SOFT, np.array([0.5, np.nan]), np.nan),
        ({"sums_to_one": 1e-3}, SOFT, SOFT * 1.5, 0.5),
        ({"unit_norm": 1e-3}, np.array([[0.6, 0.8]]), np.array([[0.6, 0.8], [3, 4]]), 4),
        ({"sorted": "ascending"}, np.array([1, 1, 2]), np.array([1, 3, 2]), 1),
        ({"sorted": "strictly ascending"}, np.array([1, 2, 3]), np.array([1, 1, 2]), 1),
        ({"sorted": "descending"}, np.array([3, 3, 2]), np.array([1, 2, 3]), 2),
        ({"sorted": "strictly descending"}, np.array([3, 2]), np.array([np.nan, 2]), 1),
        ({"shape": ["batch", 3]}, SOFT, SOFT[:1], 1),
        ({"shape": ["batch", 3]}, SOFT, SOFT[0], 2),
        ({"equal_until": 9}, np.array([[1, 9, 5], [2, 9, 0]]), np.array([[1, 9, 7], [3, 9, 0]]), 0.5),
        ({"equal_until": 9}, np.array([[1, 9, 5], [2, 9, 0]]), np.array([[1, 9, 7], [2, 4, 9]]), 0.5),
    ],
)
def test_a_predicate_holds_on_what_it_describes_and_measures_what_breaks_it(structure, good, bad, value):
    decoded_value = decode(structure, Structure)
    ((_, number, limit),) = find_broken(decoded_value, good, good, {"batch": 2})
    assert number <= limit
    ((name, broken_value, limit),) = find_broken(decoded_value, good, bad, {"batch": 2})
    assert name == next(iter(structure))
    assert not broken_value <= limit
    assert broken_value == pytest.approx(value, nan_ok=True, rel=1e-6)


def test_the_case_that_breaks_a_predicate_most_is_reported(golden: GoldenSet) -> None:
    contract = {"structured": {"y": {"finite": True, "range": [-100, 100], "shape": ["batch", 3]}}}
    assert failed(checked(golden, contract, lambda x, y: y)) == []
    checks = checked(golden, contract, lambda x, y: y + np.float32(200 if len(x) == 16 else 0))
    assert failed(checks) == ["range"]
    assert checks["range"].case == "batch=16"
    nan = checked(golden, contract, lambda x, y: y * np.float32(np.nan if len(x) == 5 else 1))
    assert failed(nan) == ["finite", "range"]


def test_a_contract_on_an_unknown_output_is_refused(golden: GoldenSet) -> None:
    assert failed(checked(golden, {"structured": {"z": {"finite": True}}}, lambda x, y: y)) == ["output"]


def test_a_contract_on_boxes_without_boxes_in_any_case_is_not_measured(golden: GoldenSet) -> None:
    boxes = {"structured": {"y": {"boxes": {"scores": "s", "least_score": 2.0}}}}

    class Boxes(Linear):
        def run(self, inputs):
            rows = len(inputs["x"])
            return {"y": np.zeros((rows, 0, 4), np.float32), "s": np.zeros((rows, 0), np.float32)}

    actual = contract_checks(decode(boxes, Contract), Boxes(), Boxes(), golden, (SPECS, DIMS[0]), BUDGETS)
    assert [check.name for check in actual] == [UNMEASURED]
