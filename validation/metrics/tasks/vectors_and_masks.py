"""Task metrics of vectors, numbers, masks, signals and tokens."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.drift import count_by_class, is_exact
from validation.metrics.tasks.boxes import Detection
from validation.metrics.tasks.classes_and_texts import (
    NO_ANSWER,
    NO_WANTED,
    NOTHING,
    Accuracy,
    Perplexity,
    Score,
    TaskValue,
    Texts,
    TopK,
    align,
    classes_of,
    must_fit,
    output_of,
    share,
)
from validation.metrics.tasks.terms import (
    EmbeddingsMetric,
    RegressionMetric,
    SegmentationMetric,
    SignalDistortion,
    TaskMetric,
    TokensMetric,
)
from validation.statistics.rates import mean_ranks

# Pairs of at most this many samples, the first ones, are compared: their similarities take 32 MiB per side.
MOST_SAMPLES = 2048
_FEW = "it takes 3 golden samples or more"


class Embeddings(Score[Array, Array]):
    """Cosine similarities of all pairs of golden samples.

    spearman: rank correlation of the similarities, with mean ranks for equal ones (Spearman 1904).  neighbours: mean
    share of each sample's k nearest samples that are also among its k nearest in the answers (recall@k).
    """

    def __init__(self, terms: EmbeddingsMetric) -> None:
        self.terms = terms
        self._wanted: list[Array] = []
        self._answers: list[Array] = []

    def read(self, outputs: Tensors, none: int) -> Array:  # noqa: ARG002 - NaN is an answer
        """Vectors [samples, size]."""
        value = output_of(outputs, self.terms.output, *((1, 2) if self.terms.pool == "none" else (3,)))
        value = np.atleast_2d(value.astype(np.float64))
        if self.terms.pool == "none":
            return value
        return value[:, 0] if self.terms.pool == "first" else value.mean(axis=1)

    def read_labels(self, labels: Array) -> Array:
        """Raise DataError, because vectors are compared only with the original model's."""
        raise DataError(f"labels {labels.shape}: embeddings are compared with the original model's, not with labels")

    def add(self, targets: Array, answers: Array) -> None:
        """Add the vectors of a case."""
        must_fit(targets.shape, answers.shape)
        self._wanted.append(targets)
        self._answers.append(answers)

    def values(self) -> list[TaskValue]:
        """Both values; the note says why one is undefined. Raises DataError for vectors of several sizes, or none."""
        try:
            vector_pair = [np.concatenate(vectors)[:MOST_SAMPLES] for vectors in (self._wanted, self._answers)]
        except ValueError as error:
            raise DataError(f"vectors of several sizes, or none, cannot be compared: {error}") from error
        if len(vector_pair[0]) < 3:
            return [TaskValue(name, None, _FEW) for name in ("spearman", "neighbours")]
        expected_cosines, answers = (cosine_similarities(vectors) for vectors in vector_pair)
        pairs = np.triu_indices(len(expected_cosines), 1)
        order = rank_correlation(expected_cosines[pairs], answers[pairs])
        note = "" if order is not None else "all similarities are equal"
        neighbour_share = neighbours_kept(expected_cosines, answers, self.terms.k)
        return [TaskValue("spearman", order, note), TaskValue("neighbours", neighbour_share)]


def cosine_similarities(vectors: Array) -> Array:
    """The cosine of each pair of vectors [n, size] -> [n, n]; 0 for zero vectors, NaN for non-finite ones."""
    vectors = np.where(np.isfinite(vectors), vectors, np.nan)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms != 0)
    return np.asarray(unit @ unit.T)


def rank_correlation(one: Array, other_values: Array) -> float | None:
    """Spearman's rank correlation of two arrays [n]; NaN if either has NaN, None if all values of one are equal."""
    if np.isnan(one).any() or np.isnan(other_values).any():
        return float("nan")
    ranks = [mean_ranks(values)[0] for values in (one, other_values)]
    one_ranks, other_ranks = (values - values.mean() for values in ranks)
    scale = float(np.sqrt((one_ranks @ one_ranks) * (other_ranks @ other_ranks)))
    return float(one_ranks @ other_ranks) / scale if scale else None


def neighbours_kept(targets: Array, answers: Array, k: int) -> float:
    """The mean share of each sample's k nearest neighbours that are the same in both similarities [n, n]."""
    count = len(targets)
    k = min(k, count - 1)
    if np.isnan(answers).any() or np.isnan(targets).any():
        return float("nan")
    neighbour_lists = []
    for matrix in (targets, answers):
        scores = matrix.copy()
        np.fill_diagonal(scores, -np.inf)
        neighbour_lists.append(np.argsort(-scores, axis=1, kind="stable")[:, :k])
    return float(np.mean([len(np.intersect1d(*pair)) for pair in zip(*neighbour_lists, strict=True)])) / k


class Regression(Score[Array, Array]):
    """Errors e = answer - expected, summed in float64 over all elements.

    r2: 1 - sum(e^2) / sum((expected - mean)^2), the coefficient of determination.  relative_error: sum |e| over
    sum |expected| (WAPE: Kolassa and Schuetz, "Advantages of the MAD/Mean Ratio over the MAPE", 2007), which also works
    with zeros.  largest_error: max |e| / max |expected|.
    """

    def __init__(self, terms: RegressionMetric) -> None:
        self.terms, self._count, self._mean, self._spread = terms, 0, 0.0, 0.0
        self._sums, self._squares, self._most = np.zeros(2), 0.0, np.zeros(2)

    def read(self, outputs: Tensors, none: int) -> Array:  # noqa: ARG002 - NaN is an answer
        """Numbers [samples, ..]."""
        return np.atleast_1d(output_of(outputs, self.terms.output)).astype(np.float64)

    def read_labels(self, labels: Array) -> Array:
        """Numbers [samples, ..]."""
        return labels.astype(np.float64)

    def add(self, targets: Array, answers: Array) -> None:
        """Add the errors of a case."""
        targets = align(targets, answers)
        if not targets.size:
            return
        errors = answers - targets
        self._sums += [np.abs(errors).sum(), np.abs(targets).sum()]
        self._squares += float(np.square(errors).sum())
        self._most = np.maximum(self._most, [np.abs(errors).max(), np.abs(targets).max()])
        total, mean_shift = self._count + targets.size, float(targets.mean()) - self._mean
        case_spread = float(np.square(targets - targets.mean()).sum())
        self._spread += case_spread + mean_shift * mean_shift * self._count * targets.size / total
        self._mean += mean_shift * targets.size / total
        self._count = total

    def values(self) -> list[TaskValue]:
        """The three values; undefined if the denominator is 0 and the numerator is not."""
        (errors, numbers), (worst_error, peak) = self._sums.tolist(), self._most.tolist()
        residual = _over("r2", self._squares, self._spread, "the expected numbers are all equal")
        r2 = TaskValue("r2", None if residual.value is None else 1 - residual.value, residual.note)
        relative_error = _over("relative_error", errors, numbers, "the expected numbers are all 0")
        task_values = [r2, relative_error, _over("largest_error", worst_error, peak, "the expected numbers are all 0")]
        return task_values if self._count else [TaskValue(value.name, None, NOTHING) for value in task_values]


def _over(name: str, part: float, total: float, note: str) -> TaskValue:
    if not total and part:
        return TaskValue(name, None, note)
    return TaskValue(name, float(part / total) if total else 0.0)


class Segmentation(Score[Array, Array]):
    """mean_iou: intersection over union of each class over the whole set, averaged over the classes of either side
    (Everingham et al., "The PASCAL Visual Object Classes Challenge", 2010, section 4.2).  equal_pixels: their share.
    """

    def __init__(self, terms: SegmentationMetric) -> None:
        self.terms = terms
        self._wanted, self._found, self._both = Counter[int](), Counter[int](), Counter[int]()

    def add(self, targets: Array, answers: Array) -> None:
        """Count the pixels of a case by class. Labels may have another shape with as many elements."""
        targets = align(targets, answers)
        if self.terms.ignore is not None:
            valid_mask = targets != self.terms.ignore
            targets, answers = targets[valid_mask], answers[valid_mask]
        self._wanted.update(count_by_class(targets))
        self._found.update(count_by_class(answers))
        self._both.update(count_by_class(targets[targets == answers]))

    def values(self) -> list[TaskValue]:
        """Mean of intersection over union, and the share of equal pixels."""
        classes = (self._wanted.keys() | self._found.keys()) - {NO_WANTED, NO_ANSWER}
        union_counts = {name: self._wanted[name] + self._found[name] - self._both[name] for name in classes}
        overlaps = [self._both[name] / union_counts[name] for name in sorted(classes)]
        mean = TaskValue("mean_iou", float(np.mean(overlaps))) if overlaps else TaskValue("mean_iou", None, NOTHING)
        return [mean, share("equal_pixels", self._both.total(), self._wanted.total())]

    def read(self, outputs: Tensors, none: int) -> Array:
        """Class indices [samples, ..]. Raises DataError for floats without classes along the axis."""
        value, name = np.atleast_1d(output_of(outputs, self.terms.output)), self.terms.output
        if self.terms.threshold is not None:
            return np.where(np.isnan(value), none, (value > self.terms.threshold).astype(np.int64))
        if is_exact(value):
            return value.astype(np.int64)
        if not -value.ndim <= self.terms.axis < value.ndim or value.shape[self.terms.axis] == 1:
            raise DataError(
                f"metric output {name!r} has the shape {value.shape}, which has no classes along axis "
                f"{self.terms.axis}; give the axis, or the threshold of one value per pixel"
            )
        return classes_of(value, none, self.terms.axis)


# The greatest value, also of equal signals: above the range of 16 bits (98 dB), these would dominate a mean.
MOST_DB = 100.0


class Signals(Score[Array, Array]):
    """Scale-invariant signal-to-distortion ratio of each signal along the last axis, in decibels, -100 to 100.

    10 log10(|a s|^2 / |a s - x|^2) for the answer x and the expected s, with a = <x, s> / |s|^2 (Le Roux et al.,
    "SDR - half-baked or well done?", 2019, equation 5). Means are not removed. si_sdr_db: mean over the signals.
    least_si_sdr_db: of the worst signal. A silent s counts only if x is not silent, and is then the worst.
    """

    def __init__(self, terms: SignalDistortion) -> None:
        self.terms = terms
        self._ratios: list[float] = []

    def read(self, outputs: Tensors, none: int) -> Array:  # noqa: ARG002 - NaN is an answer
        """Signals [samples, .., time]. Raises DataError for a single number."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim:
            raise DataError(f"metric output {self.terms.output!r} is a single number; si_sdr takes signals")
        return value.reshape(1, -1) if value.ndim == 1 else value

    def add(self, targets: Array, answers: Array) -> None:
        """Measure each signal of a case. Labels may have another shape with as many elements."""
        targets = align(targets, answers)
        length = targets.shape[-1]
        for target, answer in zip(
            *(signals.reshape(-1, max(length, 1)) for signals in (targets, answers)), strict=True
        ):
            if target.any() or answer.any():
                self._ratios.append(si_sdr_db(target.astype(np.float64), answer.astype(np.float64)))

    def values(self) -> list[TaskValue]:
        """The mean and the least ratio."""
        names = "si_sdr_db", "least_si_sdr_db"
        if not self._ratios:
            return [TaskValue(name, None, NOTHING) for name in names]
        ratios = float(np.mean(self._ratios)), float(np.min(self._ratios))
        return [TaskValue(name, value) for name, value in zip(names, ratios, strict=True)]


def si_sdr_db(expected: Array, answer: Array) -> float:
    """The ratio of two signals [time], in decibels; NaN if one of them has NaN."""
    energy = float(expected @ expected)
    target = expected * (float(answer @ expected) / energy) if energy else expected
    target_energy, error_energy = float(target @ target), float(np.square(target - answer).sum())
    if math.isnan(error_energy) or math.isinf(error_energy):
        return math.nan
    if not error_energy or not target_energy:
        return MOST_DB if target_energy else -MOST_DB
    return max(min(10 * math.log10(target_energy / error_energy), MOST_DB), -MOST_DB)


class Tokens(Score[Array, Array]):
    """Tokens place by place: argmax over the vocabulary, or ids unchanged.

    equal_tokens: share of equal places, among the places that count.  equal_sequences: share of samples in which all
    these places are equal. A place that one side lacks is unequal.
    """

    has_classes = True

    def __init__(self, terms: TokensMetric) -> None:
        self.terms, self._equal, self._places, self._same, self._samples = terms, 0, 0, 0, 0

    def read_labels(self, labels: Array) -> Array:
        """Token ids [samples, places]. Raises DataError for labels of another rank."""
        if labels.ndim != 2:
            raise DataError(f"labels have the shape {labels.shape}; tokens takes ids [samples, places]")
        return labels

    def add(self, targets: Array, answers: Array) -> None:
        """Count the equal places and sequences of each sample."""
        for target, answer in zip(targets, answers, strict=True):
            # Places up to and including the first `until`; all if there is none.
            end_indices = () if self.terms.until is None else tuple(np.flatnonzero(target == self.terms.until))
            length = int(end_indices[0]) + 1 if end_indices else len(target)
            guess = np.full(len(target), NO_ANSWER)
            guess[: len(answer)] = answer[: len(target)]
            mask = np.arange(len(target)) < length
            if self.terms.pad is not None:
                mask &= target != self.terms.pad
            excess = max(len(answer) - len(target), 0) if self.terms.until is None and self.terms.pad is None else 0
            hits, total = int(np.count_nonzero(mask & (target == guess))), int(mask.sum()) + excess
            self._equal, self._places = self._equal + hits, self._places + total
            self._same, self._samples = self._same + (hits == total), self._samples + 1

    def values(self) -> list[TaskValue]:
        """The shares of equal tokens and of equal sequences."""
        sequence_share = share("equal_sequences", self._same, self._samples, True)
        return [share("equal_tokens", self._equal, self._places), sequence_share]

    def read(self, outputs: Tensors, none: int) -> Array:
        """Token ids [samples, places]."""
        value = output_of(outputs, self.terms.output)
        ranks = (2,) if is_exact(value) else (3,)
        return classes_of(output_of(outputs, self.terms.output, *ranks), none)


MEASURES: Mapping[str, Callable[[Any], Score[Any, Any]]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "detection": Detection,
    "ctc": Texts,
    "embeddings": Embeddings,
    "regression": Regression,
    "segmentation": Segmentation,
    "si_sdr": Signals,
    "tokens": Tokens,
    "perplexity": Perplexity,
}


def score_of(terms: TaskMetric) -> Score[Any, Any]:
    """A new, empty score for a task metric."""
    return MEASURES[terms.name](terms)
