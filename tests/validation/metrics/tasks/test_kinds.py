"""Each task metric against known values: straight-line implementations, scikit-learn, scipy, or by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.validation.metrics.tasks.test_classes_and_texts import drawn, measured
from validation.metrics.tasks import vectors_and_masks
from validation.metrics.tasks.classes_and_texts import decode, edit_distance, number_words
from validation.metrics.tasks.terms import (
    AccuracyMetric,
    EmbeddingsMetric,
    RegressionMetric,
    SegmentationMetric,
    SignalDistortion,
    TextMetric,
    TokensMetric,
    TopKMetric,
)
from validation.metrics.tasks.vectors_and_masks import rank_correlation, score_of, si_sdr_db


def by_labels(terms, labels, value):
    score = score_of(terms)
    score.add(score.read_labels(np.asarray(labels)), score.read_answers({"y": np.asarray(value)}))
    return {item.name: item.value for item in score.values()}


def test_top_k_takes_the_first_of_equal_values_like_argmax():
    rows = [[0.1, 0.5, 0.4], [0.2, 0.2, 0.2], [0.9, 0.0, 0.1]]
    assert by_labels(TopKMetric("y", 1), [1, 0, 2], rows)["top_k"] == 2 / 3
    assert by_labels(TopKMetric("y", 2), [2, 2, 2], rows)["top_k"] == 2 / 3
    assert by_labels(TopKMetric("y", 3), [0, 1, 2], rows)["top_k"] == 1.0
    assert by_labels(TopKMetric("y", 3), [3, -1, 2], rows)["top_k"] == 1 / 3  # no such class


@given(seed=st.integers(0, 1000), k=st.integers(1, 6))
def test_top_k_equals_scikit_learns(seed, k):
    from sklearn.metrics import top_k_accuracy_score

    rows, labels = drawn((6,), 20, seed), np.random.default_rng(seed).integers(0, 6, 20)
    expected = top_k_accuracy_score(labels, rows, k=k, labels=range(6)) if k < 6 else 1.0
    assert by_labels(TopKMetric("y", k), labels, rows)["top_k"] == pytest.approx(expected)
    assert by_labels(AccuracyMetric("y"), labels, rows)["accuracy"] == np.mean(rows.argmax(1) == labels)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), noise=st.floats(0, 3))
def test_regression_equals_scikit_learns_in_any_parts(seed, noise):
    from sklearn.metrics import r2_score

    expected, separate_noise = drawn((3,), 9, seed).astype(np.float64) + 5, noise * drawn((3,), 9, seed + 1)
    pairs = [(expected[:2], (expected + separate_noise)[:2]), (expected[2:], (expected + separate_noise)[2:])]
    result = measured(RegressionMetric("y"), *pairs)
    assert result["r2"] == pytest.approx(r2_score(expected.ravel(), (expected + separate_noise).ravel()))
    assert result["relative_error"] == pytest.approx(np.abs(separate_noise).sum() / np.abs(expected).sum())
    assert result["largest_error"] == pytest.approx(np.abs(separate_noise).max() / np.abs(expected).max())


def test_regression_handles_zeros_and_equal_numbers():
    zero, array = np.zeros((4, 1)), np.ones((4, 1))
    assert measured(RegressionMetric("y"), (zero, array)) == {"r2": None, "relative_error": None, "largest_error": None}
    assert measured(RegressionMetric("y"), (zero, zero)) == {"r2": 1.0, "relative_error": 0.0, "largest_error": 0.0}
    assert measured(RegressionMetric("y"), (array, array + 1))["relative_error"] == 1.0
    assert by_labels(RegressionMetric("y"), [1.0, 2.0], [[1.0], [2.5]])["relative_error"] == pytest.approx(0.5 / 3)


@settings(deadline=None)
@given(seed=st.integers(0, 1000))
def test_segmentation_equals_scikit_learns(seed):
    from sklearn.metrics import jaccard_score

    rng = np.random.default_rng(seed)
    expected, result = rng.integers(0, 4, (3, 5, 6)), rng.integers(0, 4, (3, 5, 6))
    measurement = measured(SegmentationMetric("y"), (expected[:1], result[:1]), (expected[1:], result[1:]))
    assert measurement["mean_iou"] == pytest.approx(jaccard_score(expected.ravel(), result.ravel(), average="macro"))
    assert measurement["equal_pixels"] == np.mean(expected == result)


def test_segmentation_supports_threshold_axis_and_ignored_labels():
    one = np.array([[[0.2, 0.9], [0.8, 0.1]]])
    assert by_labels(SegmentationMetric("y", threshold=0.5), [[[0, 1], [1, 1]]], one)["mean_iou"] == (1 / 2 + 2 / 3) / 2
    assert by_labels(SegmentationMetric("y", threshold=0.5, ignore=255), [[[0, 1], [1, 255]]], one)["mean_iou"] == 1.0
    logits = np.moveaxis(np.eye(3)[[[0, 1, 2]]], -1, 2)
    assert by_labels(SegmentationMetric("y", axis=2), [[0, 1, 2]], logits)["equal_pixels"] == 1.0


@given(seed=st.integers(0, 1000))
def test_si_sdr_equals_the_formula_at_any_scale(seed):
    rng = np.random.default_rng(seed)
    expected, answer = rng.standard_normal(64), rng.standard_normal(64)
    scale = np.dot(answer, expected) / np.dot(expected, expected)
    formula = 10 * np.log10(np.sum((scale * expected) ** 2) / np.sum((scale * expected - answer) ** 2))
    assert si_sdr_db(expected, answer) == pytest.approx(formula)
    assert si_sdr_db(expected, 7.5 * answer) == pytest.approx(formula)


def test_si_sdr_handles_known_noise_silence_and_the_worst_signal():
    expected = np.tile([1.0, -1.0], 50)[None]
    noise = 0.1 * np.tile([1.0, 1.0, -1.0, -1.0], 25)[None]  # at right angles to it
    assert measured(SignalDistortion("y"), (expected, expected + noise))["si_sdr_db"] == pytest.approx(20)
    silent_values = np.zeros_like(expected)
    assert measured(SignalDistortion("y"), (silent_values, silent_values))["si_sdr_db"] is None
    assert measured(SignalDistortion("y"), (silent_values, expected))["si_sdr_db"] == -100
    assert measured(SignalDistortion("y"), (expected, silent_values))["si_sdr_db"] == -100
    both = measured(SignalDistortion("y"), (np.stack([expected, expected]), np.stack([expected, expected + noise])))
    assert both == pytest.approx({"si_sdr_db": 60, "least_si_sdr_db": 20})


def straight_distance(one, other):
    rows = [[i + j for j in range(len(other) + 1)] for i in range(len(one) + 1)]
    for i, a in enumerate(one, 1):
        for j, b in enumerate(other, 1):
            rows[i][j] = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (a != b))
    return rows[-1][-1]


SYMBOLS = st.lists(st.integers(0, 3), max_size=9)


@given(SYMBOLS, SYMBOLS)
def test_edits_equal_those_of_the_full_table(one, other):
    assert edit_distance(one, other) == straight_distance(one, other)


def test_ctc_merges_repeats_before_it_drops_blanks():
    assert decode([0, 3, 3, 0, 3, 2, 2, 0], 0) == [3, 3, 2]
    assert number_words([5, 6, 1, 5, 1, 1, 6], [5, 6, 1, 6], 1) == ([0, 1, 2], [0, 2])


def test_text_errors_and_words_are_counted_against_labels():
    frames = np.array([[2, 2, 0, 3, 1, 4], [2, 0, 0, 3, 3, 4]])
    labels = [[2, 3, 1, 4, -1], [2, 3, 3, 4, -1]]
    actual = by_labels(TextMetric("y", space=1), labels, frames)
    assert actual == {"equal_texts": 0.5, "character_error": 1 / 8, "word_error": 1 / 3}
    assert "word_error" not in by_labels(TextMetric("y"), labels, frames)
    logits = np.eye(5)[frames]
    assert by_labels(TextMetric("y", space=1), labels, logits) == actual
    assert by_labels(TextMetric("y", space=1, time_first=True), labels, logits.swapaxes(0, 1)) == actual


@settings(deadline=None)
@given(seed=st.integers(0, 1000), noise=st.floats(0.01, 2))
def test_the_rank_correlation_equals_scipys(seed, noise):
    from scipy.spatial.distance import pdist
    from scipy.stats import spearmanr

    draw = drawn((4,), 9, seed).astype(np.float64)
    other_draw = draw + noise * drawn((4,), 9, seed + 1)
    expected = spearmanr(1 - pdist(draw, "cosine"), 1 - pdist(other_draw, "cosine")).statistic
    assert measured(EmbeddingsMetric("y"), (draw, other_draw))["spearman"] == pytest.approx(expected)


def test_equal_similarities_have_the_mean_rank_and_neighbours_are_counted():
    from scipy.stats import spearmanr

    first_array, second_array = np.array([1.0, 2, 2, 3, 5, 5]), np.array([2.0, 1, 4, 4, 4, 9])
    assert rank_correlation(first_array, second_array) == pytest.approx(spearmanr(first_array, second_array).statistic)
    angles = np.radians([0.0, 10.0, 30.0, 60.0])
    array, other_array = (np.stack([np.cos(a), np.sin(a)], 1) for a in (angles, np.radians([0.0, 10.0, 50.0, 60.0])))
    result = measured(EmbeddingsMetric("y", 1), (array, other_array))
    assert result["neighbours"] == 0.75  # the nearest of 30 degrees was 10, and is 60
    assert measured(EmbeddingsMetric("y", 1), (array, np.ones((4, 2))))["spearman"] is None


def test_the_number_of_compared_samples_is_limited(monkeypatch):
    monkeypatch.setattr(vectors_and_masks, "MOST_SAMPLES", 50)
    value = drawn((2,), 55)
    other_value = value.copy()
    other_value[50:] = -7
    assert measured(EmbeddingsMetric("y"), (value, other_value))["spearman"] == pytest.approx(1)


def test_tokens_count_up_to_the_end_without_pads():
    expected, result = np.array([[5, 6, 1, 9], [5, 7, 8, 1]]), np.array([[5, 6, 1, 4], [5, 6, 8, 1]])
    assert measured(TokensMetric("y"), (expected, result)) == {"equal_tokens": 6 / 8, "equal_sequences": 0.0}
    assert measured(TokensMetric("y", until=1), (expected, result)) == {"equal_tokens": 6 / 7, "equal_sequences": 0.5}
    assert measured(TokensMetric("y", pad=9), (expected, result)) == {"equal_tokens": 6 / 7, "equal_sequences": 0.5}
    shorter_measurement = measured(TokensMetric("y"), (expected, result[:, :3]))
    longer_measurement = measured(TokensMetric("y"), (expected[:, :3], result))
    assert shorter_measurement["equal_tokens"] == 5 / 8 and longer_measurement["equal_tokens"] == 5 / 8
