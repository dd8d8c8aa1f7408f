"""Whether two detectors found the same boxes: matched greedily within each class by intersection over union.

As COCO's evaluation does (Lin et al., "Microsoft COCO: Common Objects in Context", 2014): the candidate's boxes,
likeliest first, each take the free box of the reference, of their class, with the greatest IoU, if it is large enough.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.types import Tensors

Form = Literal["xyxy", "xywh", "cxcywh"]


@dataclass(frozen=True)
class BoxLimits:
    """Boxes along the last axis of an output (.., n, 4), and what may differ.

    form: two corners; a corner and the size; or the centre and the size.  classes, scores: outputs (.., n) beside it;
    None: one class, and in the order given.  iou: least overlap of a match.  matched: least share of boxes, of both
    sides, that have one.  score: greatest difference between matched boxes; None: any.  least_score: boxes below do
    not count, on either side, because padding and noise are no detections.
    """

    form: Form = "xyxy"
    classes: str | None = None
    scores: str | None = None
    iou: float = 0.9
    matched: float = 0.99
    score: float | None = None
    least_score: float = 0.0

    def broken(self, expected: Array, actual: Array, beside: tuple[Tensors, Tensors]) -> list[tuple[str, float, float]]:
        """(name, by how much, limit): the share without a match, and the greatest difference of scores.

        beside: all outputs of the reference and of the candidate. NaN, another number of images, or an output that is
        missing or does not fit is NaN, which no limit passes.
        """
        unmatched, apart = self._match_images(expected, actual, beside)
        found = [("boxes", unmatched, round(1 - self.matched, 12))]
        return found if self.score is None else [*found, ("boxes score", apart, self.score)]

    def _match_images(self, expected: Array, actual: Array, beside: tuple[Tensors, Tensors]) -> tuple[float, float]:
        ours, theirs = (self._images(*side) for side in ((actual, beside[1]), (expected, beside[0])))
        if ours is None or theirs is None or len(ours) != len(theirs):
            return np.nan, np.nan
        total = matches = 0
        apart = 0.0
        for candidate, reference in zip(ours, theirs, strict=True):
            pairs = list(_matches(candidate, reference, self.iou))
            total += len(candidate.corners) + len(reference.corners)
            matches += len(pairs)
            apart = max([apart, *(abs(float(candidate.scores[i] - reference.scores[j])) for i, j in pairs)])
        return (1 - 2 * matches / total if total else 0.0), apart

    def _images(self, boxes: Array, outputs: Tensors) -> "list[_Image] | None":
        if boxes.ndim < 2 or boxes.shape[-1] != 4:
            return None
        count, shape = boxes.shape[-2], boxes.shape[:-1]
        classes = outputs.get(self.classes) if self.classes else np.zeros(shape)
        scores = outputs.get(self.scores) if self.scores else np.ones(shape)
        if classes is None or scores is None or {classes.shape, scores.shape} != {shape}:
            return None
        images = math.prod(shape[:-1])
        corners = corners_of(boxes, self.form).reshape(images, count, 4)
        rest = [np.asarray(item, np.float64).reshape(images, count) for item in (classes, scores)]
        found = []
        for image in zip(corners, *rest, strict=True):
            kept = ~(image[2] < self.least_score)  # NaN is kept, to fail
            if not all(np.isfinite(item[kept]).all() for item in image):
                return None
            found.append(_Image(*(item[kept] for item in image)))
        return found


@dataclass(frozen=True, eq=False)
class _Image:
    corners: Array
    classes: Array
    scores: Array


def corners_of(boxes: Array, form: Form) -> Array:
    """Boxes of a form as (x1, y1, x2, y2) in float64."""
    wide = np.asarray(boxes, np.float64)
    if form == "xyxy":
        return wide
    start, size = wide[..., :2], wide[..., 2:]
    if form == "cxcywh":
        start = start - size / 2
    return np.concatenate([start, start + size], axis=-1)


def overlaps(left: Array, right: Array) -> Array:
    """IoU of each of (n, 4) corners with each of (m, 4): (n, m). A box without area overlaps with its equal only."""
    low = np.maximum(left[:, None, :2], right[None, :, :2])
    high = np.minimum(left[:, None, 2:], right[None, :, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=-1)
    areas = [np.prod(np.maximum(side[:, 2:] - side[:, :2], 0), axis=-1) for side in (left, right)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    same = (left[:, None] == right[None]).all(axis=-1)
    return np.where(same, 1.0, shared / np.where(union > 0, union, 1.0))


def _matches(candidate: _Image, reference: _Image, least: float) -> Iterator[tuple[int, int]]:
    """(index in the candidate, index in the reference) of each match."""
    found = overlaps(candidate.corners, reference.corners)
    found[candidate.classes[:, None] != reference.classes[None]] = -1
    for index in np.argsort(-candidate.scores, kind="stable"):
        if not found.shape[1] or (best := int(found[index].argmax())) < 0 or found[index, best] < least:
            continue
        found[:, best] = -1
        yield int(index), best
