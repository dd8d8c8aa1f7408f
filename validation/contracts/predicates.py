"""Whether two detectors found the same boxes: matched greedily within each class by intersection over union.

As COCO's evaluation does (Lin et al., "Microsoft COCO: Common Objects in Context", 2014): the candidate's boxes,
likeliest first, each take the free box of the reference, of their class, with the greatest IoU, if it is large enough.

Predicates over one output: each measures by how much it is broken, so that a report shows how far it was from it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginery.arrays import Array
from enginery.core.types import Tensors
from validation.contracts.sequences import SequenceEnd, SequenceLimits, rows_of, up_to

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


Order = Literal["ascending", "descending", "strictly ascending", "strictly descending"]


@dataclass(frozen=True)
class StructureLimits:
    """What one output must be, in every case. What is None is not asked for.

    finite: no NaN, no infinity.  range: least and greatest value; None leaves an end open.  sums_to_one, unit_norm: how
    far the sum, or the Euclidean norm, over the last axis may be from 1.  sorted: along the last axis.  shape: sizes,
    and names of dims.  dtype: numpy's name of it.  equal_until: a token: sequences equal the graph's up to it, what
    follows is free.  sequence, eos, boxes: of what is no more than nearly the graph's.
    """

    finite: bool | None = None
    range: tuple[float | None, float | None] | None = None
    sums_to_one: float | None = None
    unit_norm: float | None = None
    sorted: Order | None = None
    shape: tuple[int | str, ...] | None = None
    dtype: str | None = None
    equal_until: int | None = None
    sequence: SequenceLimits | None = None
    eos: SequenceEnd | None = None
    boxes: BoxLimits | None = None

    def broken(
        self,
        expected: Array,
        actual: Array,
        sizes: Mapping[str, int],
        beside: tuple[Tensors, Tensors] = ({}, {}),
    ) -> list[tuple[str, float, float]]:
        """(predicate, by how much it is broken, the limit) for each that is asked for.

        expected: the graph's own output, for what compares with it.  sizes: of the named dims in this case.
        beside: all outputs of the graph and of the engine, for `boxes`.
        """
        asked: list[tuple[str, Callable[[], float], float]] = []
        if self.finite:
            asked.append(("finite", lambda: float(np.size(actual) - np.isfinite(actual).sum()), 0.0))
        if (ends := self.range) is not None:
            asked.append(("range", lambda: _outside(actual, ends), 0.0))
        if self.sums_to_one is not None:
            asked.append(("sums_to_one", lambda: _from_one(_wide(actual).sum(-1)), self.sums_to_one))
        if self.unit_norm is not None:
            asked.append(("unit_norm", lambda: _from_one(np.linalg.norm(_wide(actual), axis=-1)), self.unit_norm))
        if (order := self.sorted) is not None:
            asked.append(("sorted", lambda: _count_unsorted(actual, order), 0.0))
        if (shape := self.shape) is not None:
            asked.append(("shape", lambda: _other_sizes(actual, shape, sizes), 0.0))
        if (token := self.equal_until) is not None:
            asked.append(("equal_until", lambda: _share_differing(expected, actual, token), 0.0))
        if (dtype := self.dtype) is not None:
            asked.append(("dtype", lambda: float(actual.dtype.name != dtype), 0.0))
        found = [(name, measure(), limit) for name, measure, limit in asked]
        found += self.sequence.broken(expected, actual) if self.sequence else []
        found += self.eos.broken(expected, actual) if self.eos else []
        return found + (self.boxes.broken(expected, actual, beside) if self.boxes else [])


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)


def _outside(array: Array, ends: tuple[float | None, float | None]) -> float:
    """The greatest distance of a value from the range."""
    low, high = ends
    wide = _wide(array)
    if wide.size == 0:
        return 0.0
    if np.isnan(wide).any():
        return np.nan
    below = 0.0 if low is None else low - wide.min()
    above = 0.0 if high is None else wide.max() - high
    return float(max(below, above, 0.0))


def _from_one(values: Array) -> float:
    return float(np.abs(values - 1).max()) if values.size else 0.0


def _count_unsorted(array: Array, order: Order) -> float:
    """Neighbours along the last axis that are out of order; one with NaN is."""
    wide = _wide(array)
    left, right = wide[..., :-1], wide[..., 1:]
    if order.endswith("descending"):
        left, right = right, left
    good = left < right if order.startswith("strictly") else left <= right
    return float(good.size - good.sum())


def _other_sizes(array: Array, shape: tuple[int | str, ...], sizes: Mapping[str, int]) -> float:
    """Axes of another size than declared; all of them for another rank. A dim that no input has may be any size."""
    if array.ndim != len(shape):
        return float(max(array.ndim, len(shape)))
    wanted = [
        sizes.get(dim, length) if isinstance(dim, str) else dim for dim, length in zip(shape, array.shape, strict=True)
    ]
    return float(sum(size != length for size, length in zip(wanted, array.shape, strict=True)))


def _share_differing(expected: Array, actual: Array, token: int) -> float:
    """Share of sequences (last axis) that differ before or at the first `token` of the reference."""
    if expected.shape[:-1] != actual.shape[:-1] or not expected.ndim:
        return np.nan
    pairs = list(zip(rows_of(expected), rows_of(actual), strict=True))
    differing = sum(not np.array_equal(up_to(left, token), up_to(right, token)) for left, right in pairs)
    return differing / len(pairs) if pairs else 0.0
