"""Detection: how many boxes are found again, and the mean average precision with the wanted boxes as the truth."""

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Tensors
from validation.metrics.tasks.boxes import BoxSet, boxes_of_labels, overlaps, read_boxes
from validation.metrics.tasks.scores import Score, TaskValue, share
from validation.metrics.tasks.terms import DetectionTerms

# COCO's: overlaps from which on a box is right, and points of recall at which precision is read.
OVERLAPS = np.arange(10) * 0.05 + 0.5
RECALLS = np.linspace(0.0, 1.0, 101)
_NONE = "no wanted box in any golden sample; give samples that show something, or a lower least_score"


class Detection(Score[list[BoxSet], list[BoxSet]]):
    """mean_average_precision: mean over classes and over overlaps 0.50, 0.55 .. 0.95 of the average precision at 101
    recalls (COCO: Lin et al., "Microsoft COCO", 2014, and its reference implementation pycocotools).

    matched_boxes: 2 m / (n + w) of n boxes and w wanted ones, m of which match one to one, within a class, from the
    greatest score down, with an overlap of `iou` or more.
    """

    def __init__(self, terms: DetectionTerms) -> None:
        self.terms, self._matched, self._both = terms, 0, 0
        self._wanted: dict[float, int] = {}
        self._found: dict[float, list[tuple[Array, Array]]] = {}

    def read_wanted(self, outputs: Tensors) -> list[BoxSet]:
        """The boxes of each sample."""
        return read_boxes(outputs, self.terms)

    def read_answers(self, outputs: Tensors) -> list[BoxSet]:
        """The boxes of each sample."""
        return read_boxes(outputs, self.terms)

    def read_labels(self, labels: Array) -> list[BoxSet]:
        """The boxes of each sample."""
        return boxes_of_labels(labels, self.terms)

    def add(self, wanted: list[BoxSet], answers: list[BoxSet]) -> None:
        """Match the boxes of each sample, class by class."""
        for one, other in zip(wanted, answers, strict=True):
            self._both += len(one.classes) + len(other.classes)
            for name in np.unique(np.concatenate([one.classes, other.classes])).tolist():
                right, own = one.corners[one.classes == name], other.classes == name
                shared = overlaps(other.corners[own], right)
                self._wanted[name] = self._wanted.get(name, 0) + len(right)
                self._found.setdefault(name, []).append((other.scores[own], match(shared, OVERLAPS)))
                self._matched += int(match(shared, np.array([self.terms.iou])).sum())

    def values(self) -> list[TaskValue]:
        """Mean average precision and the share of matched boxes."""
        known = [name for name, count in self._wanted.items() if count]
        precision = [average_precision(*_join(self._found[name]), self._wanted[name]) for name in known]
        mean = float(np.mean(precision)) if precision else None
        return [
            TaskValue("mean_average_precision", mean, "" if precision else _NONE),
            share("matched_boxes", 2 * self._matched, self._both),
        ]


def _join(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([scores for scores, _ in parts]), np.concatenate([right for _, right in parts], axis=1)


def match(shared: Array, least: Array) -> Array:
    """Whether each box, best first, matches a wanted one that no better box has: bool [overlaps, boxes].

    shared: intersection over union [boxes, wanted].  least: of a match [overlaps]. Each takes the wanted box that it
    shares most with.
    """
    right = np.zeros((len(least), len(shared)), bool)
    for index, limit in enumerate(least):
        free = np.ones(shared.shape[1], bool)
        for box, row in enumerate(shared):
            left = np.where(free, row, -1.0)
            if len(left) and left.max() >= limit:
                right[index, box], free[int(np.argmax(left))] = True, False
    return right


def average_precision(scores: Array, right: Array, wanted: int) -> float:
    """The mean over overlaps of the precision at 101 recalls. right: [overlaps, boxes].  wanted: how many there are.

    The precision at a recall is the greatest at that recall or a higher one.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(right[:, order], axis=1)
    precision = hits / np.arange(1, len(order) + 1)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    found = []
    for row, recalls in zip(precision, hits / wanted, strict=True):
        places = np.searchsorted(recalls, RECALLS, side="left")
        found.append(np.append(row, 0.0)[np.minimum(places, len(row))].mean())
    return float(np.mean(found))
