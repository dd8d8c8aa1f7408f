import numpy as np
import pytest

from enginesmith.generation import SamplingSettings, sample, uniforms

NONE = np.zeros(4, bool)


def test_the_random_numbers_of_a_seed_never_change():
    np.testing.assert_array_equal(uniforms(7, 100)[:3], uniforms(7, 3))
    assert uniforms(7, 3).tolist() == [0.8720734119415283, 0.2953653335571289, 0.4200976490974426]
    assert uniforms(7, 5000).max() < 1
    assert uniforms(7, 5000).mean() == pytest.approx(0.5, abs=0.02)
    assert not np.array_equal(uniforms(7, 3), uniforms(8, 3))


def test_drawn_tokens_have_the_probabilities_of_the_temperature():
    logits = np.log(np.array([0.2, 0.8, 1e-9, 1e-9]))
    drawn_samples = [sample(logits, SamplingSettings(0.5), u, NONE) for u in uniforms(1, 4000)]
    assert np.mean(np.array(drawn_samples) == 1) == pytest.approx(0.64 / 0.68, abs=0.02)  # squares of the probabilities


def test_the_penalty_lowers_read_tokens_on_both_sides_of_zero():
    loaded_array = np.array([True, False, False, False])
    for logits, expected in (([2.0, 1.5, 0, 0], 1), ([-1.0, -1.5, -9, -9], 1), ([3.1, 1.5, 0, 0], 0)):
        assert sample(np.array(logits), SamplingSettings(repetition_penalty=2.0), 0, loaded_array) == expected


def test_top_k_and_top_p_keep_likely_tokens_and_nan_gives_no_token():
    logits = np.arange(4.0)
    assert {sample(logits, SamplingSettings(9.0, top_k=2), u, NONE) for u in uniforms(1, 200)} == {2, 3}
    assert {sample(logits, SamplingSettings(1.0, top_p=0.6), u, NONE) for u in uniforms(1, 200)} == {3}
    for wrong_values in ([0.0, np.nan, 1.0, 2.0], [-np.inf] * 4, [0.0, np.inf, 0.0, 0.0]):
        assert sample(np.array(wrong_values), SamplingSettings(1.0), 0.5, NONE) == -1
    assert sample(np.array([-np.inf, 0.0, -np.inf, -np.inf]), SamplingSettings(1.0), 0.99, NONE) == 1
