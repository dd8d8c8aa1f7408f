"""Classification: accuracy by labels, and whether the right class is among the k likeliest."""

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.drift import is_exact
from validation.metrics.tasks.scores import (
    NO_ANSWER,
    NO_WANTED,
    Score,
    TaskValue,
    class_count,
    classes_of,
    output_of,
    share,
)
from validation.metrics.tasks.terms import AccuracyTerms, TopKTerms


class Accuracy(Score[Array, Array]):
    """The share of answers equal to the wanted ones: argmax over the last axis; an integer output as it is.

    A row with NaN has no answer, and is wrong.
    """

    takes_negative = False

    def __init__(self, terms: AccuracyTerms) -> None:
        self.terms, self._right, self._rows = terms, 0, 0

    def read_wanted(self, outputs: Tensors) -> Array:
        """Class indices [rows]."""
        return self._read(outputs, NO_WANTED)

    def read_answers(self, outputs: Tensors) -> Array:
        """Class indices [rows]."""
        return self._read(outputs, NO_ANSWER)

    def read_labels(self, labels: Array) -> Array:
        """Class indices [rows]."""
        return labels.reshape(-1)

    def count_classes(self, outputs: Tensors) -> int | None:
        """Of scores, the length of their last axis."""
        return class_count(output_of(outputs, self.terms.output))

    def add(self, wanted: Array, answers: Array) -> None:
        """Count the equal ones."""
        self._right += int(np.count_nonzero(wanted == answers))
        self._rows += len(wanted)

    def values(self) -> list[TaskValue]:
        """The accuracy."""
        return [share("accuracy", self._right, self._rows, True)]

    def _read(self, outputs: Tensors, none: int) -> Array:
        value = output_of(outputs, self.terms.output)
        if not value.ndim and not is_exact(value):
            raise DataError(f"metric output {self.terms.output!r} is a single number, which has no argmax")
        return classes_of(value, none).reshape(-1)


class TopK(Score[Array, Array]):
    """The share of rows in which the wanted class is one of the k greatest values; of equal values the first counts as
    the greater one, as argmax takes it. Against the original model: its own likeliest class.
    """

    takes_negative = False

    def __init__(self, terms: TopKTerms) -> None:
        self.terms, self._right, self._rows = terms, 0, 0

    def read_wanted(self, outputs: Tensors) -> Array:
        """Class indices [rows]."""
        return classes_of(self.read_answers(outputs), NO_WANTED)

    def read_answers(self, outputs: Tensors) -> Array:
        """Values [rows, classes]."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim or is_exact(value):
            raise DataError(f"metric output {self.terms.output!r} is {value.dtype} {value.shape}; top_k takes scores")
        return value.reshape(-1, value.shape[-1]) if value.size else value.reshape(0, value.shape[-1])

    def read_labels(self, labels: Array) -> Array:
        """Class indices [rows]."""
        return labels.reshape(-1)

    def count_classes(self, outputs: Tensors) -> int | None:
        """Of scores, the length of their last axis."""
        return class_count(output_of(outputs, self.terms.output))

    def add(self, wanted: Array, answers: Array) -> None:
        """Count the rows whose wanted class has fewer than k before it."""
        known = (wanted >= 0) & (wanted < answers.shape[1])
        rows, places = answers[known], wanted[known].astype(np.int64)[:, None]
        own = np.take_along_axis(rows, places, axis=1)
        before = (rows > own) | ((rows == own) & (np.arange(rows.shape[1]) < places))
        sound = ~np.isnan(rows).any(axis=1)
        self._right += int(np.count_nonzero(sound & (before.sum(axis=1) < self.terms.k)))
        self._rows += len(wanted)

    def values(self) -> list[TaskValue]:
        """The share."""
        return [share("top_k", self._right, self._rows, True)]
