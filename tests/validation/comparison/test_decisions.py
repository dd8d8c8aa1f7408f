import numpy as np
import pytest

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import Check, judge
from validation.comparison.decisions import decision_checks
from validation.comparison.sessions import StageComparison
from validation.golden.golden_set import Case
from validation.limits.rounding import NearTies, lost_classes
from validation.metrics.drift import measure
from validation.metrics.tasks.terms import AccuracyMetric, EmbeddingsMetric

METRICS = [AccuracyMetric("y", against="labels")]
RNG = np.random.default_rng(0)


def logits(classes: Array, count: int = 10, lead: float = 4.0) -> Array:
    """Rows that name their class by `lead`, with an offset that all samples share."""
    return (
        lead * np.eye(count)[classes] + 0.1 * np.random.default_rng(1).normal(size=(len(classes), count)) - 8
    ).astype(np.float32)


def checks_of(expected: Array, actual: Array, metrics=(), limits=None) -> dict[str, Check]:
    drift = measure(expected, actual, decisions=True, samples=len(expected))
    return {check.name: check for check in decision_checks({"y": drift}, metrics, limits or {})}


def near_ties(changed: int, rows: int) -> tuple[Array, Array]:
    expected = logits(np.arange(rows) % 10)
    expected[:changed] = -8
    expected[np.arange(changed), np.arange(changed) % 10] = -7.99
    actual = expected.copy()
    actual[np.arange(changed), (np.arange(changed) + 1) % 10] = -7.98
    return expected, actual


@pytest.mark.parametrize("metrics", [(), METRICS])
@pytest.mark.parametrize(
    ("changed", "rows", "passes"),
    [(0, 48, True), (1, 48, True), (3, 48, True), (4, 48, False), (17, 1000, True), (31, 1000, False)],
)
def test_more_than_one_percent_must_be_significant_with_and_without_labels(changed, rows, passes, metrics) -> None:
    check = checks_of(*near_ties(changed, rows), metrics)["max_decisions_changed"]
    assert check.passed is passes and check.limit == 0.01
    assert f"{changed} of {rows} decisions" in check.note


def test_a_class_that_is_never_chosen_fails() -> None:
    classes = np.concatenate([np.arange(2000) % 9, [9, 9, 9, 9]])
    expected = logits(classes)
    actual = expected + 0.1 * RNG.normal(size=expected.shape).astype(np.float32)
    actual[classes == 9, 9] = -20
    result = checks_of(expected, actual)
    assert result["max_decisions_changed"].passed, "4 of 2004 are few"
    assert not result["max_classes_lost"].passed and "9" in result["max_classes_lost"].note
    assert not result["max_clear_decisions_changed"].passed and result["max_clear_decisions_changed"].value == 4
    assert all(check.passed for check in checks_of(expected, expected).values())


def test_near_ties_of_rare_classes_are_allowed() -> None:
    lost_counts, count = lost_classes(dict.fromkeys(range(100), 1), {3: 1, 50: 1})
    assert lost_counts == [3, 50] and 10 < count < 25
    assert lost_classes({1: 6, 2: 400}, {1: 6}) == ([1], 0)
    assert lost_classes({1: 40, 2: 400}, {1: 19})[0] == []


def test_vectors_without_a_class_are_not_judged_and_the_verdict_says_so() -> None:
    expected = RNG.normal(size=(200, 64)).astype(np.float32)
    result = checks_of(expected, expected + 0.1 * RNG.normal(size=expected.shape).astype(np.float32))
    assert [*result] == ["max_decisions_changed"] and result["max_decisions_changed"].limit is None
    assert judge([*result.values()]) == ("proven", "1 check passed; not judged: decisions of y")
    assert not checks_of(expected, expected, [EmbeddingsMetric("y")])


def test_classes_without_a_golden_sample_are_in_the_verdict() -> None:
    expected = logits(np.arange(60) % 7)
    verdict, reason = judge([*checks_of(expected, expected).values()])
    assert verdict == "proven" and reason.endswith("; not judged: 3 classes of y without a golden sample")


def test_a_limit_in_the_spec_replaces_all() -> None:
    assert checks_of(*near_ties(20, 48), METRICS, {"argmax_agreement": 0.5}) == {}


def test_ids_of_near_ties_may_change_and_lost_ones_may_not() -> None:
    ids = np.arange(200) % 5
    assert NearTies().limit("golden", 48) == pytest.approx(1 - 3 / 48, abs=1e-4) and NearTies().limit("golden", 0) == 1
    near_array = np.where(np.arange(200) < 2, 4, ids)
    (check,) = checks_of(ids, near_array).values()
    assert check.passed and check.name == "max_classes_lost"
    (check,) = checks_of(ids, np.where(ids == 3, 4, ids)).values()
    assert not check.passed


def test_a_label_without_a_token_fails_and_padding_does_not_count() -> None:
    mask = (np.arange(12) < RNG.integers(3, 12, size=(48, 1))).astype(np.int64)
    expected = logits(np.random.default_rng(2).integers(9, size=48 * 12), 9).reshape(48, 12, 9)
    inputs = {"token_type_ids": 0 * mask, "attention_mask": mask}
    for actual, is_right in (
        (np.where(np.arange(9) == 8, -20, expected), False),
        (np.where(mask[..., None], expected, 0), True),
    ):
        comparison, case = StageComparison("quantization", None, {}), Case("0", "golden", inputs, {})
        comparison.add(case, {"y": expected}, {"y": actual.astype(np.float32)})
        classes, changed_check, *_ = decision_checks(comparison.usual(), (), {})
        assert f"of {mask.sum()} decisions" in changed_check.note
        assert classes.passed == changed_check.passed == is_right and (": 8;" in classes.note) != is_right


def test_boxes_and_features_with_large_columns_are_no_tokens() -> None:
    rows = RNG.normal(size=(48, 30, 85)).astype(np.float32)
    rows[..., :2] = RNG.uniform(0, 640, (48, 30, 2))
    (check,) = checks_of(rows, rows + 2 * RNG.normal(size=rows.shape).astype(np.float32)).values()
    assert check.limit is None


def single(rows: int, tokens: int) -> tuple[Array, Array]:
    """The logit of each token, of which one in six is of the class, and the mask of tokens."""
    rng = np.random.default_rng(5)
    sides = np.where(rng.random((rows, tokens)) < 1 / 6, 3.0, -5.0) + rng.normal(size=(rows, tokens))
    return sides, (np.arange(tokens) < rng.integers(3, tokens + 1, size=(rows, 1))).astype(np.int64)


def compared(expected: Array, actual: Array, inputs: dict[str, Array], batch: int) -> dict[str, Check]:
    """The checks of decisions over golden cases of so many samples each."""
    comparison = StageComparison("quantization", None, {})
    for start in range(0, len(expected), batch):
        part = slice(start, start + batch)
        case = Case(str(start), "golden", {name: array[part] for name, array in inputs.items()}, {})
        comparison.add(case, {"y": expected[part].astype(np.float32)}, {"y": actual[part].astype(np.float32)})
    return {check.name: check for check in decision_checks(comparison.usual(), (), {})}


FORMS = {
    "a logit": lambda logit: logit,
    "a logit in a column": lambda logit: logit[..., None],
    "a probability": lambda logit: 1 / (1 + np.exp(-logit)),
    "two logits": lambda logit: np.stack([-logit / 2, logit / 2], -1),
}


@pytest.mark.parametrize("batch", [1, 48])
@pytest.mark.parametrize("form", FORMS)
def test_a_class_of_two_without_a_token_fails(form, batch: int) -> None:
    logit, mask = single(48, 12)
    near_logit = logit + 0.05 * np.random.default_rng(6).normal(size=logit.shape)
    lost_array = np.where(mask, np.minimum(logit, -0.5), 9)
    for actual, is_right in ((near_logit, True), (lost_array, False)):
        result = compared(FORMS[form](logit), FORMS[form](actual), {"ids": 7 * mask, "attention_mask": mask}, batch)
        assert f"of {mask.sum()} decisions" in result["max_decisions_changed"].note
        assert result["max_classes_lost"].passed == result["max_decisions_changed"].passed == is_right


@pytest.mark.parametrize("batch", [1, 48])
@pytest.mark.parametrize("form", ["a logit", "a logit in a column", "a probability"])
def test_a_class_of_two_without_a_sample_fails(form, batch: int) -> None:
    logit = single(48, 12)[0][:, 0]
    expected, actual = FORMS[form](logit), FORMS[form](np.minimum(logit, -0.5))
    result = compared(expected, actual, {"x": np.zeros((48, 8))}, batch)
    assert not result["max_classes_lost"].passed and "of 48 decisions" in result["max_decisions_changed"].note


@pytest.mark.parametrize("batch", [1, 48])
@pytest.mark.parametrize("mean", [0.0, 1.0, 1.5, 1.7, 2.0, 3.0])
def test_numbers_around_zero_without_a_gap_are_no_decisions(mean: float, batch: int) -> None:
    rng, mask = np.random.default_rng(7), np.ones((48, 12), np.int64)
    for rows in (
        rng.normal(mean, size=(48, 12, 1)),
        rng.uniform(-1, 1 + mean, size=(48, 12)),
        mean + rng.normal(size=48),
    ):
        inputs = {"ids": mask} if rows.ndim > 1 else {"x": np.zeros((48, 8))}
        result = compared(rows, rows + 0.3 * rng.normal(size=rows.shape), inputs, batch)
        assert all(check.limit is None for check in result.values())
