from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import EnginesmithError
from validation.comparison.tasks import task_checks
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import at_most
from validation.metrics.tasks.classes_and_texts import classes_of, share
from validation.metrics.tasks.terms import (
    METRICS,
    AccuracyMetric,
    DetectionMetric,
    EmbeddingsMetric,
    PerplexityMetric,
    RegressionMetric,
    SegmentationMetric,
    SignalDistortion,
    TextMetric,
    TokensMetric,
    TopKMetric,
)
from validation.metrics.tasks.vectors_and_masks import MEASURES, score_of

# Terms, and the shape of an output that they take after the axis of samples.
KINDS = [
    (AccuracyMetric("y"), (5,)),
    (TopKMetric("y", 2), (5,)),
    (DetectionMetric("y"), (6, 4)),
    (DetectionMetric("y", "cxcywh", head=True, nms=0.9), (7, 6)),
    (TextMetric("y", space=1), (9, 5)),
    (EmbeddingsMetric("y", 2), (4,)),
    (EmbeddingsMetric("y", 2, "mean"), (3, 4)),
    (EmbeddingsMetric("y", 2, "first"), (3, 4)),
    (RegressionMetric("y"), (4, 2)),
    (SegmentationMetric("y"), (3, 4, 5)),
    (SegmentationMetric("y", threshold=0.0), (4, 5)),
    (SignalDistortion("y"), (2, 16)),
    (TokensMetric("y", until=1), (6, 5)),
    (PerplexityMetric("y"), (3, 5)),
]
# All texts may be empty, and perplexity is of labels.
UNDEFINED = (*TextMetric.values, "perplexity")
BEST = {"si_sdr_db": 100.0, "least_si_sdr_db": 100.0}


def measured(terms, *pairs):
    """Values by name, of (expected, actual) outputs of each case."""
    score = score_of(terms)
    for expected, actual in pairs:
        score.add(score.read_wanted({"y": expected}), score.read_answers({"y": actual}))
    return {item.name: item.value for item in score.values()}


def drawn(shape, samples, seed=0):
    value = np.random.default_rng(seed).standard_normal((samples, *shape)).astype(np.float32)
    if shape == (6, 4):  # boxes
        value = np.concatenate([value[..., :2], value[..., :2] + np.abs(value[..., 2:]) + 0.1], axis=-1)
    if shape == (7, 6):
        value[:, 2:4] = np.abs(value[:, 2:4]) + 0.1
        value[:, 4:] = np.abs(value[:, 4:])
    return value


def test_every_metric_has_its_own_measure_and_values():
    assert METRICS.keys() == MEASURES.keys() == {terms.name for terms, _ in KINDS}
    values = [name for metric in METRICS.values() for name in metric.values]
    assert len(values) == len(set(values))


@pytest.mark.parametrize(("terms", "shape"), KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), samples=st.integers(4, 9))
def test_equal_answers_have_the_best_values(terms, shape, seed, samples):
    value = drawn(shape, samples, seed)
    result = measured(terms, (value[:3], value[:3]), (value[3:], value[3:]))
    assert tuple(result) == terms.values
    for name, actual_value in result.items():
        if actual_value is not None or name not in UNDEFINED:
            assert actual_value == pytest.approx(BEST.get(name, 0.0 if at_most(name) else 1.0))


@pytest.mark.parametrize(("terms", "shape"), KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), parts=st.integers(1, 3))
def test_partitions_of_cases_change_nothing(terms, shape, seed, parts):
    draw, other_draw = drawn(shape, 8, seed), drawn(shape, 8, seed + 1)
    other_draw = draw + 0.3 * other_draw
    whole_measurement = measured(terms, (draw, other_draw))
    cut_measurement = measured(terms, *zip(np.array_split(draw, parts), np.array_split(other_draw, parts), strict=True))
    assert cut_measurement == pytest.approx(whole_measurement, nan_ok=True)


@pytest.mark.parametrize(("terms", "shape"), KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_non_finite_answers_are_never_right(terms, shape, bad):
    value = drawn(shape, 5)
    with np.errstate(all="ignore"):
        result = measured(terms, (value, np.full_like(value, bad)))
    first_value = result[terms.values[0]]
    isinf = terms.name in ("accuracy", "top_k", "segmentation", "tokens") and np.isinf(bad)  # a class, if a wrong one
    assert first_value is None or not first_value > (0.99 if isinf else 0.5)


@pytest.mark.parametrize(("terms", "shape"), KINDS)
@pytest.mark.parametrize("samples", [0, 1])
def test_samples_of_none_or_one_give_values_or_none(terms, shape, samples):
    value = drawn(shape, samples)
    result = measured(terms, (value, value))
    assert tuple(result) == terms.values
    assert samples or all(item is None for item in result.values())


class Answers:
    """A session that gives one output whatever it is asked."""

    inputs = outputs = ()

    def __init__(self, value):
        self.value = value

    def run(self, inputs):
        return {"y": self.value}


def golden_of(value, labels=None):
    case = Case("golden 0", "golden", {"x": np.zeros((len(value) if value.ndim else 1, 2))}, {"y": value})
    return GoldenSet((case,), labels)


OTHERS = [(), (3,), (3, 0), (0, 4), (2, 3, 4, 5, 6), (3, 7), (3, 2, 2)]


@pytest.mark.parametrize(("terms", "shape"), KINDS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_answers_of_other_shapes_fail_and_such_outputs_of_the_original_are_reported(terms, shape, other, dtype):
    value, wrong_array = drawn(shape, 3), np.ones(other, dtype)
    assert task_checks(Answers(wrong_array), golden_of(value), [terms])
    with suppress(EnginesmithError):
        assert task_checks(Answers(value), golden_of(wrong_array), [terms])
        assert task_checks(Answers(wrong_array), golden_of(wrong_array), [terms])


@pytest.mark.parametrize(("terms", "shape"), KINDS)
@pytest.mark.parametrize("labels", [np.full(shape, fill) for shape in [*OTHERS, (3, 2, 5)] for fill in (0, -1, np.nan)])
def test_labels_of_other_shapes_are_reported(terms, shape, labels):
    value = drawn(shape, 3)
    with suppress(EnginesmithError):
        assert task_checks(Answers(value), golden_of(value, labels), [replace(terms, against="labels")])


def test_a_row_with_nan_has_no_class_and_integers_are_classes():
    rows = np.array([[0.0, 2.0], [np.nan, 1.0]])
    assert classes_of(rows, -2).tolist() == [1, -2]
    assert classes_of(np.array([3, 4]), -2).tolist() == [3, 4]
    assert classes_of(np.zeros((2, 0)), -2).tolist() == [-2, -2]


def test_a_share_of_nothing_is_none():
    assert share("top_k", 0, 0).value is None
    assert share("top_k", 1, 4, True).total == 4
