"""Perplexity: the formula against labels, the original's part in it, and what does not fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import DataError
from tests.validation.metrics.tasks.test_classes_and_texts import Answers, golden_of, measured
from validation.comparison.tasks import task_checks
from validation.metrics.tasks.terms import PerplexityMetric

TERMS = PerplexityMetric("y")


def checks_of(original, answers, labels, against="labels", **limits):
    metric = PerplexityMetric("y", against=against, **limits)
    return {check.name: check for check in task_checks(Answers(answers), golden_of(original, labels), [metric])}


def probabilities(logits):
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(-1, keepdims=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), places=st.integers(1, 9), shift=st.floats(-50, 50))
def test_likelihood_equals_the_formula_for_shifted_logits(seed, places, shift):
    rng = np.random.default_rng(seed)
    one, other = rng.normal(size=(2, places, 2, 6), scale=2).astype(np.float32)
    labels = rng.integers(0, 6, (places, 2))
    axis, other_own = (np.take_along_axis(probabilities(side), labels[..., None], -1) for side in (one, other))
    result = checks_of(one, other + np.float32(shift), labels.reshape(-1))
    assert result["perplexity"].value == pytest.approx(np.prod(other_own) ** (-1 / other_own.size), rel=1e-4)
    assert result["kept_likelihood"].value == pytest.approx(np.prod(other_own / axis) ** (1 / other_own.size), rel=1e-4)
    unlabelled_values = np.exp(-(probabilities(one) * np.log(probabilities(one) / probabilities(other))).sum(-1).mean())
    assert measured(TERMS, (one, other))["kept_likelihood"] == pytest.approx(unlabelled_values)


def test_both_limits_count_and_the_note_has_the_originals_perplexity():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]))
    worse_log, limits = np.log(np.array([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3]])), {"floor": 0.79, "perplexity": 2.4}
    result = checks_of(logits, worse_log, np.array([0, 1]), **limits)
    assert result["kept_likelihood"].passed and result["kept_likelihood"].value == pytest.approx(0.8)
    assert not result["perplexity"].passed and result["perplexity"].value == pytest.approx(2.5)
    assert result["perplexity"].note == "the original model has 2.0000"


def test_negative_labels_do_not_count():
    logits = np.random.default_rng(0).normal(size=(4, 5))
    checks = checks_of(logits, 0.5 * logits, np.array([2, -1, -100, 3]))
    few = checks_of(logits[[0, 3]], 0.5 * logits[[0, 3]], np.array([2, 3]))
    assert {name: check.value for name, check in checks.items()} == {name: check.value for name, check in few.items()}
    none = checks_of(logits, logits, np.full(4, -1))
    assert all(check.value is None for check in none.values())


def test_an_impossible_label_has_infinite_perplexity():
    logits = np.array([[0.0, 1.0, -np.inf]])
    assert measured(TERMS, (logits, logits))["kept_likelihood"] == 1
    result = checks_of(np.zeros((1, 3)), logits, np.array([2]), floor=0.1)
    assert result["perplexity"].value == np.inf
    assert result["kept_likelihood"].value == 0 and not result["kept_likelihood"].passed


@pytest.mark.parametrize(
    ("labels", "message"),
    [(np.array([0, 3]), "label 3 is not a token id; the vocabulary has 3 tokens"), (np.zeros(2), "labels are float64")],
)
def test_labels_without_a_token_are_reported(labels, message):
    with pytest.raises(DataError, match=message):
        checks_of(np.zeros((2, 3)), np.zeros((2, 3)), labels)
