"""Class maps: how far the areas of each class overlap."""

from collections import Counter

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
    align,
    classes_of,
    output_of,
    share,
)
from validation.metrics.tasks.terms import SegmentationTerms


class Segmentation(Score[Array, Array]):
    """mean_iou: the mean over all classes that either side has of intersection / union, each counted over the whole set
    (Everingham et al., "The PASCAL Visual Object Classes Challenge", 2010, section 4.2).  equal_pixels: their share.
    """

    def __init__(self, terms: SegmentationTerms) -> None:
        self.terms = terms
        self._wanted, self._found, self._both = Counter[int](), Counter[int](), Counter[int]()

    def read_wanted(self, outputs: Tensors) -> Array:
        """Class indices [samples, ..]."""
        return self._read(outputs, NO_WANTED)

    def read_answers(self, outputs: Tensors) -> Array:
        """Class indices [samples, ..]."""
        return self._read(outputs, NO_ANSWER)

    def read_labels(self, labels: Array) -> Array:
        """Class indices [samples, ..]."""
        return labels

    def add(self, wanted: Array, answers: Array) -> None:
        """Count the pixels of a case by class. Labels and answers may differ in axes of one."""
        wanted = align(wanted, answers)
        if self.terms.ignore is not None:
            kept = wanted != self.terms.ignore
            wanted, answers = wanted[kept], answers[kept]
        for counter, classes in ((self._wanted, wanted), (self._found, answers)):
            _count(counter, classes)
        _count(self._both, wanted[wanted == answers])

    def values(self) -> list[TaskValue]:
        """Mean of intersection over union, and the share of equal pixels."""
        classes = (self._wanted.keys() | self._found.keys()) - {NO_WANTED, NO_ANSWER}
        union = {item: self._wanted[item] + self._found[item] - self._both[item] for item in classes}
        overlaps = [self._both[item] / union[item] for item in sorted(classes)]
        mean = TaskValue("mean_iou", float(np.mean(overlaps))) if overlaps else TaskValue("mean_iou", None, NOTHING)
        return [mean, share("equal_pixels", self._both.total(), self._wanted.total())]

    def _read(self, outputs: Tensors, none: int) -> Array:
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


def _count(counter: Counter[int], classes: Array) -> None:
    for item, count in zip(*np.unique(classes, return_counts=True), strict=True):
        counter[int(item)] += int(count)
