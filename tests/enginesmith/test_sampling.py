"""The reference of samplers, and the numbers that tokens are drawn by."""

import numpy as np
import pytest

from enginesmith.core.sampling import SamplingSettings
from enginesmith.sampling import sample, uniforms

ALL, NONE = np.ones(4, bool), np.zeros(4, bool)


def test_the_numbers_of_a_seed_stay_what_they_are():
    np.testing.assert_array_equal(uniforms(7, 100)[:3], uniforms(7, 3))
    assert uniforms(7, 3).tolist() == [0.8720734119415283, 0.2953653335571289, 0.4200976490974426]
    assert uniforms(7, 5000).max() < 1
    assert uniforms(7, 5000).mean() == pytest.approx(0.5, abs=0.02)
    assert not np.array_equal(uniforms(7, 3), uniforms(8, 3))


def test_drawn_tokens_have_the_probabilities_of_the_temperature():
    logits = np.log(np.array([0.2, 0.8, 1e-9, 1e-9]))
    drawn = [sample(logits, SamplingSettings(0.5), u, NONE, ALL, 4) for u in uniforms(1, 4000)]
    assert np.mean(np.array(drawn) == 1) == pytest.approx(0.64 / 0.68, abs=0.02)  # squares of the probabilities


def test_the_penalty_makes_what_was_read_less_likely_on_both_sides_of_zero():
    read = np.array([True, False, False, False])
    for logits, wanted in (([2.0, 1.5, 0, 0], 1), ([-1.0, -1.5, -9, -9], 1), ([3.1, 1.5, 0, 0], 0)):
        assert sample(np.array(logits), SamplingSettings(repetition_penalty=2.0), 0, read, ALL, 4) == wanted


def test_the_mask_comes_before_top_k_and_no_token_is_an_answer():
    allowed = np.array([False, True, True, False])
    assert sample(np.arange(4.0), SamplingSettings(1.0, top_k=1), 0.99, NONE, allowed, 4) == 2
    assert sample(np.arange(4.0), SamplingSettings(), 0, NONE, NONE, 4) == -1
