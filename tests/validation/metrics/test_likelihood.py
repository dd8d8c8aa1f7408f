"""KL divergence and agreement of the likeliest tokens, against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import rel_entr, softmax

from validation.metrics.likelihood import kl_divergence, top_k_agreement

LOGITS = arrays(np.float32, (3, 7), elements=st.floats(-30, 30, width=32))


@given(LOGITS, LOGITS)
def test_the_divergence_is_that_of_the_definition_and_never_negative(expected, actual):
    found = kl_divergence(expected, actual)
    wanted = rel_entr(softmax(expected.astype(float), -1), softmax(actual.astype(float), -1)).sum(-1)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert (found >= 0).all()


@given(LOGITS, st.floats(-100, 100))
def test_equal_probabilities_have_no_divergence_whatever_the_logits_offset(logits, offset):
    wide = logits.astype(np.float64)
    assert kl_divergence(wide, wide + offset) == pytest.approx(np.zeros(3), abs=1e-9)


def test_the_divergence_is_in_nats_and_of_the_second_from_the_first():
    half, quarter = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert kl_divergence(half, quarter) == pytest.approx([0.5 * np.log(2) + 0.5 * np.log(2 / 3)])
    assert kl_divergence(quarter, half) == pytest.approx([0.25 * np.log(0.5) + 0.75 * np.log(1.5)])


def test_tokens_that_never_come_and_what_is_no_number():
    never = np.array([[0.0, 0.0, -np.inf]])
    assert kl_divergence(never, np.log([[0.25, 0.25, 0.5]])) == pytest.approx([np.log(2)])
    assert kl_divergence(never, never) == pytest.approx([0])
    assert kl_divergence(np.zeros((1, 3)), never) == [np.inf]
    assert np.isnan(kl_divergence(np.zeros((1, 3)), np.array([[0.0, np.nan, 0.0]])))


@given(LOGITS, LOGITS, st.integers(1, 9))
def test_the_agreement_is_the_share_of_common_tokens(expected, actual, k):
    found = top_k_agreement(expected, actual, k)
    for row, share in enumerate(found):
        sides = [sorted(range(7), key=lambda at: (-side[row][at], at))[:k] for side in (expected, actual)]
        assert share == pytest.approx(len({*sides[0]} & {*sides[1]}) / min(k, 7))
    assert (top_k_agreement(expected, expected, k) == 1).all()


def test_a_row_that_is_no_number_agrees_in_nothing():
    assert top_k_agreement(np.zeros((1, 2)), np.array([[np.nan, 0.0]]), 2) == [0]
