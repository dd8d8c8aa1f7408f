"""Texts of a recogniser that was trained with connectionist temporal classification (CTC)."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.drift import is_exact
from validation.metrics.tasks.scores import (
    NO_ANSWER,
    NO_WANTED,
    NOTHING,
    Score,
    TaskValue,
    class_count,
    classes_of,
    output_of,
    share,
)
from validation.metrics.tasks.terms import TextTerms

Symbols = Sequence[int]


class Texts(Score[list[Symbols], list[Symbols]]):
    """Texts by greedy decoding: the likeliest class of each frame, repeats merged, blanks left out ("best path
    decoding", Graves et al., "Connectionist Temporal Classification", 2006, section 3.2).

    equal_texts: share of samples with an equal text.  character_error: edits (Levenshtein 1966) of all texts over the
    length of all wanted ones; word_error: the same of words, where `space` is given.
    """

    def __init__(self, terms: TextTerms) -> None:
        self.terms, self._same, self._samples = terms, 0, 0
        self._characters, self._words = EditRate(), EditRate()

    def read_wanted(self, outputs: Tensors) -> list[Symbols]:
        """Class indices of each sample's text."""
        return self._read(outputs, NO_WANTED)

    def read_answers(self, outputs: Tensors) -> list[Symbols]:
        """Class indices of each sample's text."""
        return self._read(outputs, NO_ANSWER)

    def read_labels(self, labels: Array) -> list[Symbols]:
        """Class indices of each text, from [samples, length]: negative ones and blanks fill up."""
        if labels.ndim != 2:
            raise DataError(f"labels have the shape {labels.shape}; ctc takes class indices [samples, length]")
        return [[int(item) for item in row if item >= 0 and item != self.terms.blank] for row in labels]

    def count_classes(self, outputs: Tensors) -> int | None:
        """Of scores, the length of their last axis."""
        return class_count(output_of(outputs, self.terms.output))

    def add(self, wanted: list[Symbols], answers: list[Symbols]) -> None:
        """Compare the texts of a case."""
        for one, other in zip(wanted, answers, strict=True):
            self._same, self._samples = self._same + (list(one) == list(other)), self._samples + 1
            self._characters.add(one, other)
            if self.terms.space is not None:
                self._words.add(*number_words(one, other, self.terms.space))

    def values(self) -> list[TaskValue]:
        """Share of equal texts and the error rates."""
        found = [share("equal_texts", self._same, self._samples, True), self._characters.value("character_error")]
        return found + ([self._words.value("word_error")] if self.terms.space is not None else [])

    def _read(self, outputs: Tensors, none: int) -> list[Symbols]:
        value = output_of(outputs, self.terms.output)
        frames = output_of(outputs, self.terms.output, 2 if is_exact(value) else 3)
        classes = classes_of(frames, none)
        return [decode(row, self.terms.blank) for row in (classes.T if self.terms.time_first else classes).tolist()]


class EditRate:
    """Edits of sequences over the length of the wanted ones."""

    def __init__(self) -> None:
        self.edits, self.length = 0, 0

    def add(self, wanted: Symbols, answer: Symbols) -> None:
        """Take a pair of sequences."""
        self.edits += edit_distance(wanted, answer)
        self.length += len(wanted)

    def value(self, name: str) -> TaskValue:
        """The rate; not defined where every wanted sequence is empty."""
        return TaskValue(name, self.edits / self.length) if self.length else TaskValue(name, None, NOTHING)


def decode(frames: Symbols, blank: int) -> list[int]:
    """The text of a sample's likeliest classes, frame by frame."""
    return [symbol for symbol, _ in groupby(frames) if symbol != blank]


def number_words(wanted: Symbols, answer: Symbols, space: int) -> tuple[list[int], list[int]]:
    """The words of two texts, each distinct one as a number."""
    numbers: dict[tuple[int, ...], int] = {}
    sides = []
    for text in (wanted, answer):
        words = [tuple(group) for between, group in groupby(text, lambda symbol: symbol == space) if not between]
        sides.append([numbers.setdefault(word, len(numbers)) for word in words])
    return sides[0], sides[1]


def edit_distance(one: Symbols, other: Symbols) -> int:
    """The least number of insertions, deletions and replacements that turn one sequence into the other."""
    places, target = np.arange(len(other) + 1), np.asarray(other, np.int64)
    row = places.copy()
    for index, symbol in enumerate(one, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (target != symbol))
        # Insertions go along the row: row[j] = min over i <= j of best[i] + j - i.
        row = np.minimum.accumulate(np.concatenate(([index], best)) - places) + places
    return int(row[-1])
