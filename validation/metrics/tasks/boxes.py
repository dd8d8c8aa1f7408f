"""Boxes: from outputs or labels to the boxes of each sample that count."""

from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.tasks.scores import must_fit, output_of
from validation.metrics.tasks.terms import BoxForm, DetectionTerms

# Of one sample: the boxes with the greatest scores, as COCO counts them; and as many candidates for `nms`.
MOST_BOXES, MOST_CANDIDATES = 100, 1000


@dataclass(frozen=True, eq=False)
class BoxSet:
    """Boxes of one sample, greatest score first. corners: [n, 4] as x1, y1, x2, y2.  scores, classes: [n]."""

    corners: Array
    scores: Array
    classes: Array


def read_boxes(outputs: Tensors, terms: DetectionTerms) -> list[BoxSet]:
    """The boxes of each sample. Raises InputError for an output that is missing, DataError for another shape."""
    corners, scores, classes = _read_head(outputs, terms) if terms.head else _read_outputs(outputs, terms)
    return [select(*sample, terms) for sample in zip(corners, scores, classes, strict=True)]


def _read_head(outputs: Tensors, terms: DetectionTerms) -> tuple[Array, Array, Array]:
    """Corners, scores and classes [samples, n, ..] of [samples, 4 + classes, n]."""
    rows = output_of(outputs, terms.output, 3).transpose(0, 2, 1).astype(np.float64)
    if rows.shape[2] < 5:
        raise DataError(f"metric output {terms.output!r} has {rows.shape[2]} rows; a head has 4 and one per class")
    return to_corners(rows[..., :4], terms.form), *_best(rows[..., 4:])


def _read_outputs(outputs: Tensors, terms: DetectionTerms) -> tuple[Array, Array, Array]:
    """The same of outputs that hold boxes, scores and classes."""
    found = output_of(outputs, terms.output, 2, 3).astype(np.float64)
    if found.shape[-1] != 4:
        raise DataError(f"metric output {terms.output!r} has the shape {found.shape}; boxes lie along a last axis of 4")
    batch = found if found.ndim == 3 else found[None]
    scores, classes = np.ones(batch.shape[:2]), np.zeros(batch.shape[:2])
    if terms.scores is not None:
        given = output_of(outputs, terms.scores).astype(np.float64)
        if given.ndim == found.ndim and given.shape[:-1] == found.shape[:-1]:
            scores, classes = _best(given if given.ndim == 3 else given[None])
        else:
            scores = _fit(given, found, batch)
    if terms.classes is not None:
        classes = _fit(output_of(outputs, terms.classes), found, batch)
    return to_corners(batch, terms.form), scores, classes


def _fit(given: Array, boxes: Array, batch: Array) -> Array:
    must_fit(boxes.shape[:-1], given.shape)
    return given.reshape(batch.shape[:2])


def _best(scores: Array) -> tuple[Array, Array]:
    """The greatest score of each box, and its class, of [samples, n, classes]."""
    if not scores.shape[2]:
        raise DataError("the scores of boxes have no classes: their last axis is empty")
    return scores.max(axis=2), np.argmax(scores, axis=2)


def to_corners(boxes: Array, form: BoxForm) -> Array:
    """Boxes [.., 4] as x1, y1, x2, y2."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if form == "xyxy":
        return boxes
    least = first if form == "xywh" else first - second / 2
    return np.concatenate([least, least + second], axis=-1)


def select(corners: Array, scores: Array, classes: Array, terms: DetectionTerms) -> BoxSet:
    """The boxes of a sample that count: finite ones of `least_score` or more that `nms` leaves, at most MOST_BOXES."""
    finite = np.isfinite(corners).all(axis=1) & np.isfinite(scores)
    found = np.flatnonzero(finite & (scores >= terms.least_score))
    found = found[np.argsort(-scores[found], kind="stable")][:MOST_CANDIDATES]
    if terms.nms is not None:
        found = found[suppress(corners[found], classes[found], terms.nms)]
    found = found[:MOST_BOXES]
    return BoxSet(corners[found], scores[found], classes[found])


def suppress(corners: Array, classes: Array, most: float) -> Array:
    """Places of the boxes, best first, that overlap no better one of their class by more than `most` (greedy
    non-maximum suppression)."""
    left, kept = np.arange(len(corners)), list[int]()
    while len(left) and len(kept) < MOST_BOXES:
        best, left = left[0], left[1:]
        kept.append(int(best))
        over = overlaps(corners[best : best + 1], corners[left])[0] > most
        left = left[~(over & (classes[left] == classes[best]))]
    return np.array(kept, np.int64)


def overlaps(one: Array, other: Array) -> Array:
    """Intersection over union of boxes [n, 4] and [m, 4] -> [n, m]; 0 of boxes without area."""
    least = np.maximum(one[:, None, :2], other[None, :, :2])
    most = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod(np.clip(most - least, 0, None), axis=2)
    areas = [np.prod(np.clip(side[:, 2:] - side[:, :2], 0, None), axis=1) for side in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(shared), where=union > 0))


def boxes_of_labels(labels: Array, terms: DetectionTerms) -> list[BoxSet]:
    """The boxes of [samples, n, 5], box and class; one of a negative class, or not finite, only fills up. Without
    classes [samples, n, 4]. Raises DataError for another shape."""
    if labels.ndim != 3 or labels.shape[2] not in (4, 5):
        raise DataError(f"labels have the shape {labels.shape}; detection takes [samples, boxes, 5]: box and class")
    corners = to_corners(labels[..., :4].astype(np.float64), terms.form)
    classes = labels[..., 4] if labels.shape[2] == 5 else np.zeros(labels.shape[:2])
    kept = (classes >= 0) & np.isfinite(corners).all(axis=2) & (corners[..., 2:] > corners[..., :2]).all(axis=2)
    return [
        BoxSet(box[keep], np.ones(int(keep.sum())), own[keep])
        for box, own, keep in zip(corners, classes, kept, strict=True)
    ]
