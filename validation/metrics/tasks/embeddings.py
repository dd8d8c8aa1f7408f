"""Vectors of a search: whether they order the golden samples as the original model's do."""

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.tasks.scores import Score, TaskValue, must_fit, output_of
from validation.metrics.tasks.terms import EmbeddingTerms

# Samples whose pairs are compared, from the first on: their similarities take 32 MiB a side.
MOST_SAMPLES = 2048
_FEW = "it takes 3 golden samples or more"


class Embeddings(Score[Array, Array]):
    """Cosine similarities of all pairs of golden samples.

    spearman: rank correlation of the similarities, equal ones with their mean rank (Spearman 1904).  neighbours: mean
    share of the k nearest samples of each that the answers have among their k nearest, too (recall@k).
    """

    def __init__(self, terms: EmbeddingTerms) -> None:
        self.terms = terms
        self._wanted: list[Array] = []
        self._answers: list[Array] = []

    def read_wanted(self, outputs: Tensors) -> Array:
        """Vectors [samples, size]."""
        value = output_of(outputs, self.terms.output, *((1, 2) if self.terms.pool == "none" else (3,)))
        value = np.atleast_2d(value.astype(np.float64))
        if self.terms.pool == "none":
            return value
        return value[:, 0] if self.terms.pool == "first" else value.mean(axis=1)

    def read_answers(self, outputs: Tensors) -> Array:
        """Vectors [samples, size]."""
        return self.read_wanted(outputs)

    def read_labels(self, labels: Array) -> Array:
        """Raises DataError: vectors are compared with the original model's."""
        raise DataError(f"labels {labels.shape} are no vectors; embeddings are compared with the original model's")

    def add(self, wanted: Array, answers: Array) -> None:
        """Keep the vectors of a case."""
        must_fit(wanted.shape, answers.shape)
        self._wanted.append(wanted)
        self._answers.append(answers)

    def values(self) -> list[TaskValue]:
        """Both, or why they are not defined."""
        try:
            sides = [np.concatenate(side)[:MOST_SAMPLES] for side in (self._wanted, self._answers)]
        except ValueError as error:
            raise DataError(f"vectors of several sizes, or none, cannot be compared: {error}") from error
        if len(sides[0]) < 3:
            return [TaskValue(name, None, _FEW) for name in ("spearman", "neighbours")]
        wanted, answers = (cosine_similarities(side) for side in sides)
        pairs = np.triu_indices(len(wanted), 1)
        order = rank_correlation(wanted[pairs], answers[pairs])
        note = "" if order is not None else "all similarities are equal"
        kept = neighbours_kept(wanted, answers, self.terms.k)
        return [TaskValue("spearman", order, note), TaskValue("neighbours", kept)]


def cosine_similarities(vectors: Array) -> Array:
    """The cosine of each pair of vectors [n, size] -> [n, n]; 0 for one of length 0, NaN for one that is not finite."""
    vectors = np.where(np.isfinite(vectors), vectors, np.nan)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths != 0)
    return np.asarray(unit @ unit.T)


def rank_correlation(one: Array, other: Array) -> float | None:
    """Spearman's rank correlation of two [n]; NaN with NaN in either, None where one has equal values alone."""
    if np.isnan(one).any() or np.isnan(other).any():
        return float("nan")
    ranks = [_ranks(values) for values in (one, other)]
    first, second = (values - values.mean() for values in ranks)
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else None


def _ranks(values: Array) -> Array:
    """Ranks from 1, equal values with the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse])


def neighbours_kept(wanted: Array, answers: Array, k: int) -> float:
    """The mean share of the k nearest others of each sample that both similarities [n, n] name."""
    count = len(wanted)
    k = min(k, count - 1)
    if np.isnan(answers).any() or np.isnan(wanted).any():
        return float("nan")
    near = []
    for similar in (wanted, answers):
        apart = similar.copy()
        np.fill_diagonal(apart, -np.inf)
        near.append(np.argsort(-apart, axis=1, kind="stable")[:, :k])
    return float(np.mean([len(np.intersect1d(*pair)) for pair in zip(*near, strict=True)])) / k
