"""Task metrics of boxes: detection."""

from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.tasks.classes_and_texts import Score, TaskValue, must_fit, output_of, share
from validation.metrics.tasks.terms import BoxForm, DetectionMetric

# The most boxes of one sample (the greatest scores count, as in COCO), and the most candidates for `nms`.
MOST_BOXES, MOST_CANDIDATES = 100, 1000


@dataclass(frozen=True, eq=False)
class BoxSet:
    """Boxes of one sample, greatest score first. corners: [n, 4] as x1, y1, x2, y2.  scores, classes: [n]."""

    corners: Array
    scores: Array
    classes: Array


def read_boxes(outputs: Tensors, terms: DetectionMetric) -> list[BoxSet]:
    """The boxes of each sample. Raises InputError for an output that is missing, DataError for another shape."""
    corners, scores, classes = _read_head(outputs, terms) if terms.head else _read_outputs(outputs, terms)
    return [select(*sample, terms) for sample in zip(corners, scores, classes, strict=True)]


def _read_head(outputs: Tensors, terms: DetectionMetric) -> tuple[Array, Array, Array]:
    """Corners, scores and classes [samples, n, ..] from a head [samples, 4 + classes, n]."""
    rows = output_of(outputs, terms.output, 3).transpose(0, 2, 1).astype(np.float64)
    if rows.shape[2] < 5:
        raise DataError(f"metric output {terms.output!r} has {rows.shape[2]} rows; a head has 4 plus one per class")
    return to_corners(rows[..., :4], terms.form), *_best(rows[..., 4:])


def _read_outputs(outputs: Tensors, terms: DetectionMetric) -> tuple[Array, Array, Array]:
    """Corners, scores and classes [samples, n, ..] from separate outputs for boxes, scores and classes."""
    box_array = output_of(outputs, terms.output, 2, 3).astype(np.float64)
    if box_array.shape[-1] != 4:
        raise DataError(
            f"metric output {terms.output!r} has the shape {box_array.shape}; boxes lie along a last axis of 4"
        )
    batch = box_array if box_array.ndim == 3 else box_array[None]
    scores, classes = np.ones(batch.shape[:2]), np.zeros(batch.shape[:2])
    if terms.scores is not None:
        score_array = output_of(outputs, terms.scores).astype(np.float64)
        if score_array.ndim == box_array.ndim and score_array.shape[:-1] == box_array.shape[:-1]:
            scores, classes = _best(score_array if score_array.ndim == 3 else score_array[None])
        else:
            scores = _fit(score_array, box_array, batch)
    if terms.classes is not None:
        classes = _fit(output_of(outputs, terms.classes), box_array, batch)
    return to_corners(batch, terms.form), scores, classes


def _fit(array: Array, boxes: Array, batch: Array) -> Array:
    must_fit(boxes.shape[:-1], array.shape)
    return array.reshape(batch.shape[:2])


def _best(scores: Array) -> tuple[Array, Array]:
    """The greatest score of each box, and its class, [samples, n] each. scores: [samples, n, classes]."""
    if not scores.shape[2]:
        raise DataError("the scores of boxes have no classes: their last axis is empty")
    return scores.max(axis=2), np.argmax(scores, axis=2)


def to_corners(boxes: Array, form: BoxForm) -> Array:
    """Boxes [.., 4] as x1, y1, x2, y2."""
    first_pair, second_pair = boxes[..., :2], boxes[..., 2:]
    if form == "xyxy":
        return boxes
    low_corners = first_pair if form == "xywh" else first_pair - second_pair / 2
    return np.concatenate([low_corners, low_corners + second_pair], axis=-1)


def select(corners: Array, scores: Array, classes: Array, terms: DetectionMetric) -> BoxSet:
    """The boxes of a sample that count: finite, with `least_score` or more, not removed by `nms`; at most MOST_BOXES.
    corners: [boxes, 4].  scores, classes: [boxes]."""
    finite_mask = np.isfinite(corners).all(axis=1) & np.isfinite(scores)
    candidates = np.flatnonzero(finite_mask & (scores >= terms.least_score))
    candidates = candidates[np.argsort(-scores[candidates], kind="stable")][:MOST_CANDIDATES]
    if terms.nms is not None:
        candidates = candidates[suppress(corners[candidates], classes[candidates], terms.nms)]
    candidates = candidates[:MOST_BOXES]
    return BoxSet(corners[candidates], scores[candidates], classes[candidates])


def suppress(corners: Array, classes: Array, max_overlap: float) -> Array:
    """Indices of the boxes, best first, that do not overlap a better box of their class by more than `max_overlap`
    (greedy non-maximum suppression)."""
    candidates, selection = np.arange(len(corners)), list[int]()
    while len(candidates) and len(selection) < MOST_BOXES:
        best_index, candidates = candidates[0], candidates[1:]
        selection.append(int(best_index))
        overlap_mask = overlaps(corners[best_index : best_index + 1], corners[candidates])[0] > max_overlap
        candidates = candidates[~(overlap_mask & (classes[candidates] == classes[best_index]))]
    return np.array(selection, np.int64)


def overlaps(one: Array, other: Array) -> Array:
    """Intersection over union of boxes [n, 4] and [m, 4] -> [n, m]; 0 for boxes without area."""
    low_corners = np.maximum(one[:, None, :2], other[None, :, :2])
    high_corners = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared_areas = np.prod(np.clip(high_corners - low_corners, 0, None), axis=2)
    areas = [np.prod(np.clip(boxes[:, 2:] - boxes[:, :2], 0, None), axis=1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared_areas
    return np.asarray(np.divide(shared_areas, union, out=np.zeros_like(shared_areas), where=union > 0))


def boxes_of_labels(labels: Array, terms: DetectionMetric) -> list[BoxSet]:
    """The boxes of labels [samples, n, 5] (box and class), or [samples, n, 4] without classes. Boxes with a negative
    class or non-finite numbers are padding. Raises DataError for another shape."""
    if labels.ndim != 3 or labels.shape[2] not in (4, 5):
        raise DataError(f"labels have the shape {labels.shape}; detection takes [samples, boxes, 5]: box and class")
    corners = to_corners(labels[..., :4].astype(np.float64), terms.form)
    classes = labels[..., 4] if labels.shape[2] == 5 else np.zeros(labels.shape[:2])
    valid_mask = (classes >= 0) & np.isfinite(corners).all(axis=2) & (corners[..., 2:] > corners[..., :2]).all(axis=2)
    return [
        BoxSet(box[is_valid], np.ones(int(is_valid.sum())), sample_classes[is_valid])
        for box, sample_classes, is_valid in zip(corners, classes, valid_mask, strict=True)
    ]


# As in COCO: the least overlaps of a correct box, and the recalls at which precision is evaluated.
OVERLAPS = np.arange(10) * 0.05 + 0.5
RECALLS = np.linspace(0.0, 1.0, 101)
_NONE = "no expected box in any golden sample; give samples that have boxes, or a lower least_score"


class Detection(Score[list[BoxSet], list[BoxSet]]):
    """mean_average_precision: mean over classes and over overlaps 0.50, 0.55 .. 0.95 of the average precision at 101
    recalls (COCO: Lin et al., "Microsoft COCO", 2014, and its reference implementation pycocotools).

    matched_boxes: 2 m / (n + w) for n boxes, w expected boxes and m matches, which are one to one within a class, from
    the greatest score down, with an overlap of `iou` or more.
    """

    def __init__(self, terms: DetectionMetric) -> None:
        self.terms, self._matched, self._both = terms, 0, 0
        self._wanted: dict[float, int] = {}
        self._found: dict[float, list[tuple[Array, Array]]] = {}

    def read(self, outputs: Tensors, none: int) -> list[BoxSet]:  # noqa: ARG002 - boxes have classes of their own
        """The boxes of each sample."""
        return read_boxes(outputs, self.terms)

    def read_labels(self, labels: Array) -> list[BoxSet]:
        """The boxes of each sample."""
        return boxes_of_labels(labels, self.terms)

    def add(self, targets: list[BoxSet], answers: list[BoxSet]) -> None:
        """Match the boxes of each sample, class by class."""
        for target, answer in zip(targets, answers, strict=True):
            self._both += len(target.classes) + len(answer.classes)
            for name in np.unique(np.concatenate([target.classes, answer.classes])).tolist():
                target_corners, class_mask = target.corners[target.classes == name], answer.classes == name
                overlap_matrix = overlaps(answer.corners[class_mask], target_corners)
                self._wanted[name] = self._wanted.get(name, 0) + len(target_corners)
                self._found.setdefault(name, []).append((answer.scores[class_mask], match(overlap_matrix, OVERLAPS)))
                self._matched += int(match(overlap_matrix, np.array([self.terms.iou])).sum())

    def values(self) -> list[TaskValue]:
        """Mean average precision and the share of matched boxes."""
        class_names = [name for name, count in self._wanted.items() if count]
        precision = [average_precision(*_join(self._found[name]), self._wanted[name]) for name in class_names]
        mean = float(np.mean(precision)) if precision else None
        return [
            TaskValue("mean_average_precision", mean, "" if precision else _NONE),
            share("matched_boxes", 2 * self._matched, self._both),
        ]


def _join(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([scores for scores, _ in parts]), np.concatenate([hits for _, hits in parts], axis=1)


def match(shared: Array, least: Array) -> Array:
    """Whether each box, best first, matches an expected box that no better box matches: bool [overlaps, boxes].

    shared: intersection over union [boxes, expected].  least: least overlap of a match [overlaps]. Each box matches the
    free expected box with the greatest overlap.
    """
    hits = np.zeros((len(least), len(shared)), bool)
    for index, limit in enumerate(least):
        is_free = np.ones(shared.shape[1], bool)
        for box_index, row in enumerate(shared):
            free_overlaps = np.where(is_free, row, -1.0)
            if len(free_overlaps) and free_overlaps.max() >= limit:
                hits[index, box_index], is_free[int(np.argmax(free_overlaps))] = True, False
    return hits


def average_precision(scores: Array, right: Array, target_count: int) -> float:
    """The mean over overlaps of the precision at 101 recalls. right: bool [overlaps, boxes].  target_count: of boxes.

    The precision at a recall is the greatest at that recall or a higher one.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(right[:, order], axis=1)
    precision = hits / np.arange(1, len(order) + 1)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    precisions = []
    for row, recalls in zip(precision, hits / target_count, strict=True):
        recall_indices = np.searchsorted(recalls, RECALLS, side="left")
        precisions.append(np.append(row, 0.0)[np.minimum(recall_indices, len(row))].mean())
    return float(np.mean(precisions))
