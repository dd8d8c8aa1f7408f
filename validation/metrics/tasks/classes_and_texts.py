"""Task metrics of classes, likelihoods and texts."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, InputError
from enginesmith.core.types import Tensors
from validation.metrics.drift import count_by_class, is_exact, log_softmax
from validation.metrics.tasks.terms import AccuracyMetric, PerplexityMetric, TextMetric, TopKMetric

# The interface of all task metrics, and the reading of class indices from outputs.

# The class of a row with NaN, which has no answer: the argmax is the index of the NaN, which may be right by chance.
# The classes for the reference and the candidate differ: two rows with NaN are never equal.
NO_WANTED, NO_ANSWER = -1, -2
NOTHING = "there is nothing to compare"

W = TypeVar("W", bound=Sized)
A = TypeVar("A", bound=Sequence[object] | Array)


@dataclass(frozen=True)
class TaskValue:
    """One value of a task metric. value: None if it is undefined; `note` then has the reason.

    count, total: numerator and denominator of a share over independent samples, which has an interval.
    """

    name: str
    value: float | None
    note: str = ""
    count: int | None = None
    total: int | None = None


class Score(ABC, Generic[W, A]):
    """Base of the task metrics' scores, which add up cases. A case has as many answers as expected answers.

    takes_negative: whether a label below 0 has a meaning, such as 'no label'.  has_classes: whether labels are indices
    along the last axis of scores.
    """

    takes_negative: ClassVar[bool] = True
    has_classes: ClassVar[bool] = False

    def read_wanted(self, outputs: Tensors) -> W:
        """The expected answers, from the original model's outputs. Raises InputError for a missing output, DataError
        for an output of a shape that the metric does not accept."""
        return cast("W", self.read(outputs, NO_WANTED))

    def read_answers(self, outputs: Tensors) -> A:
        """The answers in the judged outputs. Raises as `read_wanted`."""
        return cast("A", self.read(outputs, NO_ANSWER))

    @abstractmethod
    def read(self, outputs: Tensors, none: int) -> Any:
        """The answers in outputs. none: class for a row with NaN."""

    def read_labels(self, labels: Array) -> W | Array:
        """The labels of all golden samples as expected answers. Raises DataError for labels of another shape."""
        return labels

    def count_classes(self, outputs: Tensors) -> int | None:
        """The number of classes in the original model's outputs, if labels are indices of classes; None if unknown."""
        value = output_of(outputs, cast("Any", self).terms.output) if self.has_classes else None
        return None if value is None or is_exact(value) or not value.ndim else value.shape[-1]

    def join(self, original: W, labels: Any) -> W:  # noqa: ARG002 - of use to kinds that look at both
        """The expected answers of a case with labels; by default the labels. original: the original model's answers."""
        return cast("W", labels)

    @abstractmethod
    def add(self, targets: W, answers: A) -> None:
        """Add the answers of a case. Raises DataError if they cannot be compared with the expected ones."""

    @abstractmethod
    def values(self) -> list[TaskValue]:
        """The values so far, in the order of the metric's `values`."""


def output_of(outputs: Tensors, name: str, *ranks: int) -> Array:
    """An output by name. ranks: allowed numbers of axes; empty for any.

    Raises InputError for an output that the model lacks, DataError for another number of axes.
    """
    if name not in outputs:
        raise InputError(f"metric output {name!r} is not an output; known: {', '.join(outputs)}")
    output_array = outputs[name]
    if ranks and output_array.ndim not in ranks:
        rank_text = " or ".join(map(str, ranks))
        raise DataError(f"metric output {name!r} has the shape {output_array.shape}; the metric takes {rank_text} axes")
    return output_array


def classes_of(value: Array, none: int, axis: int = -1) -> Array:
    """Class indices: integers unchanged, else the argmax over an axis. none: class for a row with NaN."""
    if is_exact(value):
        return value.astype(np.int64)
    nan_mask = np.isnan(value).any(axis=axis)
    return np.where(nan_mask, none, np.argmax(value, axis=axis)) if value.shape[axis] else np.full(nan_mask.shape, none)


def share(name: str, count: int, total: int, independent: bool = False) -> TaskValue:
    """The share count / total as a value. independent: whether its samples are independent (it has an interval)."""
    if not total:
        return TaskValue(name, None, NOTHING)
    return TaskValue(name, count / total, "", *((count, total) if independent else ()))


def align(targets: Array, answers: Array) -> Array:
    """The expected values reshaped to the answers' shape. Raises DataError if the numbers of elements differ."""
    if targets.size == answers.size:
        targets = targets.reshape(answers.shape)
    must_fit(targets.shape, answers.shape)
    return targets


def must_fit(shape: Sequence[int], other_shape: Sequence[int]) -> None:
    """Raise DataError if the shapes differ."""
    if tuple(shape) != tuple(other_shape):
        raise DataError(f"expected the shape {tuple(shape)}, got {tuple(other_shape)}")


class Accuracy(Score[Array, Array]):
    """The share of answers equal to the expected ones. Answers: argmax over the last axis; integer outputs unchanged.

    A row with NaN has no answer, and is wrong. right: number of correct answers by class.
    """

    takes_negative, has_classes = False, True

    def __init__(self, terms: AccuracyMetric) -> None:
        self.terms, self.right, self._rows = terms, Counter[int](), 0

    def read_labels(self, labels: Array) -> Array:
        """Class indices [rows]."""
        return labels.reshape(-1)

    def add(self, targets: Array, answers: Array) -> None:
        """Count the answers equal to the expected ones, by class."""
        self.right.update(count_by_class(targets[targets == answers]))
        self._rows += len(targets)

    def values(self) -> list[TaskValue]:
        """The accuracy."""
        return [share("accuracy", self.right.total(), self._rows, True)]

    def read(self, outputs: Tensors, none: int) -> Array:
        """Class indices [rows]. Raises DataError for a single float, which has no argmax."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim and not is_exact(value):
            raise DataError(f"metric output {self.terms.output!r} is a single number, which has no argmax")
        return classes_of(value, none).reshape(-1)


class TopK(Score[Array, Array]):
    """The share of rows in which the expected class has one of the k greatest values; the first of equal values counts
    as greater, as in argmax. Without labels, the original model's likeliest class is expected.
    """

    takes_negative, has_classes = False, True

    def __init__(self, terms: TopKMetric) -> None:
        self.terms, self._right, self._rows = terms, 0, 0

    def read(self, outputs: Tensors, none: int) -> Array:
        """Answers: scores [rows, classes]. Expected answers: class indices [rows]. Raises DataError for non-scores."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim or is_exact(value):
            raise DataError(f"metric output {self.terms.output!r} is {value.dtype} {value.shape}; top_k takes scores")
        rows = value.reshape(-1 if value.size else 0, value.shape[-1])
        return rows if none == NO_ANSWER else classes_of(rows, none)

    def read_labels(self, labels: Array) -> Array:
        """Class indices [rows]."""
        return labels.reshape(-1)

    def add(self, targets: Array, answers: Array) -> None:
        """Count the rows in which fewer than k classes precede the expected one."""
        valid_mask = (targets >= 0) & (targets < answers.shape[1])
        rows, target_classes = answers[valid_mask], targets[valid_mask].astype(np.int64)[:, None]
        target_scores = np.take_along_axis(rows, target_classes, axis=1)
        is_above = (rows > target_scores) | ((rows == target_scores) & (np.arange(rows.shape[1]) < target_classes))
        numeric_mask = ~np.isnan(rows).any(axis=1)
        self._right += int(np.count_nonzero(numeric_mask & (is_above.sum(axis=1) < self.terms.k)))
        self._rows += len(targets)

    def values(self) -> list[TaskValue]:
        """The share."""
        return [share("top_k", self._right, self._rows, True)]


@dataclass(frozen=True)
class Following:
    """The expected token at each place. expected: the original's log-probabilities [places, vocabulary].

    tokens: [places], negative at places that do not count; None: all tokens, weighted by the original's probabilities.
    """

    expected: Array
    tokens: Array | None = None

    def __len__(self) -> int:
        return len(self.expected)


class Perplexity(Score[Following, Array]):
    """Likelihoods of tokens at all places, from the softmax of logits [.., vocabulary] over the last axis, in float64.

    kept_likelihood: geometric mean over the places of q(t) / p(t), with the probabilities q of the candidate and p of
    the original for the labelled token t: the original's perplexity over the candidate's. Without labels
    exp(-KL(p || q)), with KL averaged over the places: the limit for many tokens drawn from p. Equal models have 1;
    with labels a candidate may have more.  perplexity: exp of the mean of -ln q(t) (Jelinek et al., "Perplexity - a
    measure of the difficulty of speech recognition tasks", 1977); only with labels.
    """

    def __init__(self, terms: PerplexityMetric) -> None:
        self.terms, self._kept, self._nats, self._places, self._tokens = terms, 0.0, 0.0, 0, 0

    def read(self, outputs: Tensors, none: int) -> Array | Following:
        """Log-probabilities [places, vocabulary]; expected ones in a `Following`. Raises DataError for non-logits."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim or not value.shape[-1] or is_exact(value):
            layout = f"{value.dtype} {value.shape}"
            raise DataError(
                f"metric output {self.terms.output!r} is {layout}; perplexity takes logits [.., vocabulary]"
            )
        logprobs = log_softmax(value.astype(np.float64).reshape(-1, value.shape[-1]))
        return logprobs if none == NO_ANSWER else Following(logprobs)

    def read_labels(self, labels: Array) -> Array:
        """Token ids [places]. Raises DataError unless they are integers."""
        if not is_exact(labels):
            raise DataError(f"labels are {labels.dtype}; perplexity takes token ids")
        return labels.reshape(-1)

    def join(self, original: Following, labels: Array) -> Following:
        """The original's log-probabilities and the labelled tokens."""
        return Following(original.expected, labels.astype(np.int64))

    def add(self, targets: Following, answers: Array) -> None:
        """Add the places that count. Raises DataError for another vocabulary, and for tokens outside it."""
        expected, tokens = targets.expected, targets.tokens
        if expected.shape != answers.shape:
            shapes_text = f"{list(answers.shape)}; the original has {list(expected.shape)}; the shapes must be equal"
            raise DataError(f"{self.terms.output!r} has shape [positions, vocabulary] = {shapes_text}")
        if tokens is None:
            probabilities = np.exp(expected)
            # A token with probability 0 adds nothing, whatever the candidate's probability is.
            gaps = np.subtract(answers, expected, out=np.zeros_like(answers), where=probabilities != 0)
            self._kept, self._places = self._kept + float((probabilities * gaps).sum()), self._places + len(answers)
            return
        if tokens.size and tokens.max() >= answers.shape[1]:
            raise DataError(f"label {tokens.max()} is not a token id; the vocabulary has {answers.shape[1]} tokens")
        row_indices = np.flatnonzero(tokens >= 0)
        expected_logprobs, candidate_logprobs = (
            array[row_indices, tokens[row_indices]] for array in (expected, answers)
        )
        self._kept = self._kept + float((candidate_logprobs - expected_logprobs).sum())
        self._nats = self._nats - float(candidate_logprobs.sum())
        self._places, self._tokens = self._places + len(row_indices), self._tokens + len(row_indices)

    def values(self) -> list[TaskValue]:
        """The kept likelihood and the perplexity."""
        names = "kept_likelihood", "perplexity"
        metric_totals = [
            (names[0], self._kept, self._places, NOTHING),
            (names[1], self._nats, self._tokens, "no labels"),
        ]
        with np.errstate(over="ignore"):
            return [
                TaskValue(name, float(np.exp(total / count)) if count else None, "" if count else empty_note)
                for name, total, count, empty_note in metric_totals
            ]


# Texts of a recogniser trained with connectionist temporal classification (CTC).

Symbols = Sequence[int]


class Texts(Score[list[Symbols], list[Symbols]]):
    """Texts by greedy decoding: the likeliest class of each frame, repeats merged, blanks left out ("best path
    decoding", Graves et al., "Connectionist Temporal Classification", 2006, section 3.2).

    equal_texts: share of samples with an equal text.  character_error: edits (Levenshtein 1966) of all texts over the
    length of all expected texts; word_error: the same for words, if `space` is given.
    """

    has_classes = True

    def __init__(self, terms: TextMetric) -> None:
        self.terms, self._same, self._samples = terms, 0, 0
        self._characters, self._words = EditRate(), EditRate()

    def read_labels(self, labels: Array) -> list[Symbols]:
        """Class indices of each text, from [samples, length]; negative ones and blanks are padding. Raises DataError
        for another rank."""
        if labels.ndim != 2:
            raise DataError(f"labels have the shape {labels.shape}; ctc takes class indices [samples, length]")
        return [[int(symbol) for symbol in row if symbol >= 0 and symbol != self.terms.blank] for row in labels]

    def add(self, targets: list[Symbols], answers: list[Symbols]) -> None:
        """Compare the texts of a case."""
        for target, answer in zip(targets, answers, strict=True):
            self._same, self._samples = self._same + (list(target) == list(answer)), self._samples + 1
            self._characters.add(target, answer)
            if self.terms.space is not None:
                self._words.add(*number_words(target, answer, self.terms.space))

    def values(self) -> list[TaskValue]:
        """Share of equal texts and the error rates."""
        task_values = [share("equal_texts", self._same, self._samples, True), self._characters.value("character_error")]
        return task_values + ([self._words.value("word_error")] if self.terms.space is not None else [])

    def read(self, outputs: Tensors, none: int) -> list[Symbols]:
        """Class indices of each sample's text."""
        value = output_of(outputs, self.terms.output)
        frames = output_of(outputs, self.terms.output, 2 if is_exact(value) else 3)
        classes = classes_of(frames, none)
        return [decode(row, self.terms.blank) for row in (classes.T if self.terms.time_first else classes).tolist()]


class EditRate:
    """The number of edits of sequences over the length of the expected ones."""

    def __init__(self) -> None:
        self.edits, self.length = 0, 0

    def add(self, target: Symbols, answer: Symbols) -> None:
        """Add a pair of sequences."""
        self.edits += edit_distance(target, answer)
        self.length += len(target)

    def value(self, name: str) -> TaskValue:
        """The rate; not defined if every expected sequence is empty."""
        return TaskValue(name, self.edits / self.length) if self.length else TaskValue(name, None, NOTHING)


def decode(frames: Symbols, blank: int) -> list[int]:
    """The text of a sample's likeliest classes, frame by frame."""
    return [symbol for symbol, _ in groupby(frames) if symbol != blank]


def number_words(target: Symbols, answer: Symbols, space: int) -> tuple[list[int], list[int]]:
    """The words of two texts as numbers, one for each distinct word."""
    word_numbers: dict[tuple[int, ...], int] = {}
    number_lists = []
    for text in (target, answer):
        words = [tuple(group) for is_space, group in groupby(text, lambda symbol: symbol == space) if not is_space]
        number_lists.append([word_numbers.setdefault(word, len(word_numbers)) for word in words])
    return number_lists[0], number_lists[1]


def edit_distance(text: Symbols, other_text: Symbols) -> int:
    """The least number of insertions, deletions and replacements that turn one sequence into the other."""
    columns, target = np.arange(len(other_text) + 1), np.asarray(other_text, np.int64)
    row = columns.copy()
    for index, symbol in enumerate(text, start=1):
        steps = np.minimum(row[1:] + 1, row[:-1] + (target != symbol))
        # Insertions go along the row: row[j] = min over i <= j of steps[i] + j - i.
        row = np.minimum.accumulate(np.concatenate(([index], steps)) - columns) + columns
    return int(row[-1])
