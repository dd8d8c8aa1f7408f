"""Decisions and distributions along the last axis, against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.metrics.drift import RowSums, measure, measure_rows

SHAPES = st.sampled_from([(4,), (1, 1), (3, 7), (2, 3, 5), (2, 1, 2, 9)])


def logits(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 3


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@given(SHAPES, st.integers(0, 99), st.sampled_from([0.0, 0.01, 1.0]))
def test_divergences_match_their_definitions(shape, seed, noise):
    e, a = logits(shape, seed), logits(shape, seed) + np.float32(noise) * logits(shape, seed + 1)
    p, q = softmax(e), softmax(a)
    m = (p + q) / 2
    kl = (p * np.log(p / q)).sum(axis=-1)
    js = ((p * np.log(p / m)).sum(axis=-1) + (q * np.log(q / m)).sum(axis=-1)) / 2
    rows = measure_rows(e, a)
    assert rows.count == kl.size
    assert rows.kl == pytest.approx(kl.mean(), abs=1e-9) and rows.kl_max == pytest.approx(kl.max(), abs=1e-9)
    assert rows.js_max == pytest.approx(js.max(), abs=1e-9) and 0 <= rows.js_max <= math.log(2) and rows.kl >= 0
    assert js[rows.worst] == pytest.approx(js.max(), abs=1e-9)


@given(st.integers(0, 99), st.integers(1, 8), st.integers(1, 9))
def test_top_k_is_the_share_of_the_k_likeliest_classes(seed, k, length):
    e, a = logits((6, length), seed), logits((6, length), seed + 1)
    k = min(k, length)
    shared_counts = [len(set(np.argsort(x)[-k:]) & set(np.argsort(y)[-k:])) / k for x, y in zip(e, a, strict=True)]
    rows = measure_rows(e, a, k)
    assert rows.top_k_agreement == pytest.approx(np.mean(shared_counts))
    assert rows.flips == np.count_nonzero(e.argmax(1) != a.argmax(1))
    assert rows.argmax_agreement == pytest.approx(1 - rows.flips / 6)


def test_many_small_blocks_equal_one(monkeypatch):
    e, a = logits((3, 4, 5, 6), 0), logits((3, 4, 5, 6), 1)
    whole_sums = measure_rows(e, a)
    monkeypatch.setattr("validation.metrics.drift.CHUNK", 13)
    parts = measure_rows(e, a)
    assert (parts.count, parts.agreeing, parts.worst) == (whole_sums.count, whole_sums.agreeing, whole_sums.worst)
    assert parts.js_max == pytest.approx(whole_sums.js_max) and parts.kl == pytest.approx(whole_sums.kl)


def test_a_non_finite_row_has_no_divergence_and_passes_nothing():
    e = np.array([[0.0, 1.0], [0.0, 1.0]])
    rows = measure_rows(e, np.array([[0.0, 1.0], [0.0, np.nan]]))
    assert math.isnan(rows.kl)
    assert rows.argmax_agreement == 0.5 and rows.top_k_agreement == 0.5


def test_scalars_and_empty_arrays_have_no_rows():
    assert measure_rows(np.float32(1).reshape(()), np.float32(2).reshape(())) == RowSums()
    assert measure_rows(np.zeros((0, 4)), np.zeros((0, 4))).kl == 0
    assert measure_rows(np.zeros((3, 0)), np.zeros((3, 0))).count == 0
    few_sums = measure_rows(np.zeros((2, 3)), np.zeros((2, 3)))
    assert RowSums().merge(few_sums).k == few_sums.merge(RowSums()).k == 3, "they do not say of how many classes"


def test_an_unmeasured_decision_passes_no_limit():
    assert not measure(np.ones((2, 2)), np.ones((2, 2))).argmax_agreement >= 0
    assert measure(np.ones((2, 2)), np.ones((2, 2)), decisions=True).argmax_agreement == 1
