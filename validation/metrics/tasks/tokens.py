"""Tokens: how many of a sequence's places hold the same token, and how many sequences are equal throughout."""

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
from validation.metrics.tasks.terms import TokenTerms


class Tokens(Score[Array, Array]):
    """Tokens place by place: argmax over the vocabulary, or ids as they are.

    equal_tokens: share of the places that count.  equal_sequences: share of the samples in which all of them are equal.
    A place that one side lacks is unequal.
    """

    def __init__(self, terms: TokenTerms) -> None:
        self.terms, self._equal, self._places, self._same, self._samples = terms, 0, 0, 0, 0

    def read_wanted(self, outputs: Tensors) -> Array:
        """Token ids [samples, places]."""
        return self._read(outputs, NO_WANTED)

    def read_answers(self, outputs: Tensors) -> Array:
        """Token ids [samples, places]."""
        return self._read(outputs, NO_ANSWER)

    def read_labels(self, labels: Array) -> Array:
        """Token ids [samples, places]."""
        if labels.ndim != 2:
            raise DataError(f"labels have the shape {labels.shape}; tokens takes ids [samples, places]")
        return labels

    def count_classes(self, outputs: Tensors) -> int | None:
        """Of scores, the length of their last axis."""
        return class_count(output_of(outputs, self.terms.output))

    def add(self, wanted: Array, answers: Array) -> None:
        """Count the equal places and sequences of each sample."""
        for one, other in zip(wanted, answers, strict=True):
            length = self._length(one)
            padded = np.full(len(one), NO_ANSWER)
            padded[: len(other)] = other[: len(one)]
            counted = np.arange(len(one)) < length
            if self.terms.pad is not None:
                counted &= one != self.terms.pad
            missing = max(len(other) - len(one), 0) if self.terms.until is None and self.terms.pad is None else 0
            equal, places = int(np.count_nonzero(counted & (one == padded))), int(counted.sum()) + missing
            self._equal, self._places = self._equal + equal, self._places + places
            self._same, self._samples = self._same + (equal == places), self._samples + 1

    def _length(self, ids: Array) -> int:
        """Places up to the first `until`, with it; all where there is none."""
        ends = () if self.terms.until is None else tuple(np.flatnonzero(ids == self.terms.until))
        return int(ends[0]) + 1 if ends else len(ids)

    def values(self) -> list[TaskValue]:
        """Both shares."""
        same = share("equal_sequences", self._same, self._samples, True)
        return [share("equal_tokens", self._equal, self._places), same]

    def _read(self, outputs: Tensors, none: int) -> Array:
        value = output_of(outputs, self.terms.output)
        ranks = (2,) if is_exact(value) else (3,)
        return classes_of(output_of(outputs, self.terms.output, *ranks), none)
