"""Contracts over sequences, and predicates of a user."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Tensors
from validation.contracts.terms import Boxes, End, Order, Sequence, Structure
from validation.metrics.tasks.boxes import overlaps, to_corners
from validation.metrics.tasks.classes_and_texts import edit_distance


def _broken_sequence(limits: Sequence, expected: Array, actual: Array) -> list[tuple[str, float, float]]:
    """(name, value, limit) of each limit: tokens by which the first difference is too early; the share of edits.

    expected, actual: (..., tokens). Values are NaN if the numbers of sequences differ.
    """
    is_comparable = expected.shape[:-1] == actual.shape[:-1] and expected.ndim
    pairs = list(zip(rows_of(expected), rows_of(actual), strict=True)) if is_comparable else []
    if (token := limits.until) is not None:
        pairs = [(up_to(left, token), up_to(right, token)) for left, right in pairs]
    deviations = []
    if (equal_tokens := limits.first) is not None:
        lead_tokens = [max(0, min(equal_tokens, max(map(len, pair))) - _first_difference(*pair)) for pair in pairs]
        deviations.append(("sequence first", float(max(lead_tokens, default=0)) if is_comparable else np.nan, 0.0))
    if limits.edits is not None:
        shares = [edit_distance(*pair) / max(1, *map(len, pair)) for pair in pairs]
        deviations.append(("sequence edits", float(max(shares, default=0)) if is_comparable else np.nan, limits.edits))
    return deviations


def _broken_end(end: End, expected: Array, actual: Array) -> list[tuple[str, float, float]]:
    """(name, value, limit): sequences with an end on one side only; most places between ends; non-pad tokens after it.

    expected, actual: (..., tokens). The value is NaN if the numbers of sequences differ.
    """
    if expected.shape[:-1] != actual.shape[:-1] or not expected.ndim:
        return [("eos", np.nan, 0.0)]
    end_indices = [_ends(tokens, end.token) for tokens in (expected, actual)]
    deviations = [("eos", float(((end_indices[0] < 0) != (end_indices[1] < 0)).sum()), 0.0)]
    shared_mask = (end_indices[0] >= 0) & (end_indices[1] >= 0)
    if end.apart is not None:
        distance = np.abs(end_indices[0] - end_indices[1])[shared_mask].max(initial=0)
        deviations.append(("eos apart", float(distance), float(end.apart)))
    if end.pad is not None:
        rows = rows_of(actual)
        is_after = (np.arange(rows.shape[1]) > end_indices[1][:, None]) & (end_indices[1][:, None] >= 0)
        deviations.append(("eos pad", float((is_after & (rows != end.pad)).sum()), 0.0))
    return deviations


def rows_of(array: Array) -> Array:
    """The sequences of an array (..., n) as rows (m, n)."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def up_to(sequence: Array, token: int) -> Array:
    """The sequence up to and including the first `token`; the whole sequence without one."""
    end_indices = np.flatnonzero(sequence == token)
    return sequence[: end_indices[0] + 1] if end_indices.size else sequence


def _ends(side: Array, token: int) -> Array:
    """The index of the first `token` of each sequence (m,); -1 without one."""
    token_mask = np.pad(rows_of(side) == token, ((0, 0), (0, 1)))  # argmax fails for an empty sequence
    return np.where(token_mask.any(axis=1), token_mask.argmax(axis=1), -1)


def _first_difference(left: Array, right: Array) -> int:
    """The index of the first difference; the length of the shorter sequence if there is none within it."""
    common_length = min(len(left), len(right))
    differ_indices = np.flatnonzero(left[:common_length] != right[:common_length])
    return int(differ_indices[0]) if differ_indices.size else common_length


# Predicates over one output. Each returns the amount by which the output breaks it, for the report.
#
# Boxes of two detectors are matched greedily within each class by intersection over union (IoU), as in COCO's
# evaluation (Lin et al., "Microsoft COCO: Common Objects in Context", 2014): each of the candidate's boxes, likeliest
# first, matches the free box of the reference of its class with the greatest IoU, if that is large enough.


def _broken_boxes(
    limits: Boxes, expected: Array, actual: Array, output_pair: tuple[Tensors, Tensors]
) -> list[tuple[str, float, float]]:
    """(name, value, limit) of each limit: the share of boxes without a match; the greatest difference of scores.

    output_pair: all outputs of the reference and of the candidate. The values are NaN, which no limit passes, if a
    number is not finite, the numbers of images differ, or an output is missing or has another shape. Empty if neither
    side has a box that counts.
    """
    actual_images, expected_images = (
        _images(limits, *box_outputs) for box_outputs in ((actual, output_pair[1]), (expected, output_pair[0]))
    )
    unmatched_share = score_gap = np.nan
    if actual_images is not None and expected_images is not None and len(actual_images) == len(expected_images):
        total, match_count, score_gap = 0, 0, 0.0
        for candidate, reference in zip(actual_images, expected_images, strict=True):
            pairs = list(_matches(candidate, reference, limits.iou))
            total += len(candidate.corners) + len(reference.corners)
            match_count += len(pairs)
            score_gap = max([score_gap, *(abs(float(candidate.scores[i] - reference.scores[j])) for i, j in pairs)])
        if not total:
            return []
        unmatched_share = 1 - 2 * match_count / total
    deviations = [("boxes", unmatched_share, round(1 - limits.matched, 12))]
    return deviations if limits.score is None else [*deviations, ("boxes score", score_gap, limits.score)]


def _images(limits: Boxes, boxes: Array, outputs: Tensors) -> "list[_Image] | None":
    """The boxes that count, by image; None if an output is missing, has another shape, or is not finite."""
    if boxes.ndim < 2 or boxes.shape[-1] != 4:
        return None
    count, shape = boxes.shape[-2], boxes.shape[:-1]
    classes = outputs.get(limits.classes) if limits.classes else np.zeros(shape)
    scores = outputs.get(limits.scores) if limits.scores else np.ones(shape)
    if classes is None or scores is None or {classes.shape, scores.shape} != {shape}:
        return None
    image_count = math.prod(shape[:-1])
    corners = to_corners(np.asarray(boxes, np.float64), limits.form).reshape(image_count, count, 4)
    box_values = [np.asarray(values, np.float64).reshape(image_count, count) for values in (classes, scores)]
    image_boxes = []
    for image in zip(corners, *box_values, strict=True):
        mask = ~(image[2] < limits.least_score)  # NaN is kept, to fail
        if not all(np.isfinite(array[mask]).all() for array in image):
            return None
        image_boxes.append(_Image(*(array[mask] for array in image)))
    return image_boxes


@dataclass(frozen=True, eq=False)
class _Image:
    """The boxes of one image. corners: (n, 4).  classes, scores: (n,)."""

    corners: Array
    classes: Array
    scores: Array


def _matches(candidate: _Image, reference: _Image, least_overlap: float) -> Iterator[tuple[int, int]]:
    """(index in the candidate, index in the reference) of each match."""
    equal_mask = (candidate.corners[:, None] == reference.corners[None]).all(axis=-1)  # also if they have no area
    overlap_matrix = np.where(equal_mask, 1.0, overlaps(candidate.corners, reference.corners))
    overlap_matrix[candidate.classes[:, None] != reference.classes[None]] = -1
    for index in np.argsort(-candidate.scores, kind="stable") if overlap_matrix.shape[1] else ():
        match_index = int(overlap_matrix[index].argmax())
        if overlap_matrix[index, match_index] < least_overlap:
            continue
        overlap_matrix[:, match_index] = -1
        yield int(index), match_index


def find_broken(
    structure: Structure,
    expected: Array,
    actual: Array,
    sizes: Mapping[str, int],
    beside: tuple[Tensors, Tensors] = ({}, {}),
) -> list[tuple[str, float, float]]:
    """(predicate, amount by which it is broken, limit of that) for each predicate that is set.

    sizes: of the named dims in this case.  beside: all outputs of the graph and of the engine, for `boxes`.
    """
    deviations: list[tuple[str, float, float]] = []
    if structure.finite:
        deviations.append(("finite", float(np.size(actual) - np.isfinite(actual).sum()), 0.0))
    if structure.range is not None:
        deviations.append(("range", _outside(_wide(actual), *structure.range), 0.0))
    if structure.sums_to_one is not None:
        deviations.append(("sums_to_one", _from_one(_wide(actual).sum(-1)), structure.sums_to_one))
    if structure.unit_norm is not None:
        deviations.append(("unit_norm", _from_one(np.linalg.norm(_wide(actual), axis=-1)), structure.unit_norm))
    if structure.sorted is not None:
        deviations.append(("sorted", _count_unsorted(_wide(actual), structure.sorted), 0.0))
    if structure.shape is not None:
        deviations.append(("shape", _count_other_sizes(actual.shape, structure.shape, sizes), 0.0))
    if structure.equal_until is not None:
        deviations.append(("equal_until", _share_differing(expected, actual, structure.equal_until), 0.0))
    if structure.dtype is not None:
        deviations.append(("dtype", float(actual.dtype.name != structure.dtype), 0.0))
    deviations += _broken_sequence(structure.sequence, expected, actual) if structure.sequence else []
    deviations += _broken_end(structure.eos, expected, actual) if structure.eos else []
    return deviations + (_broken_boxes(structure.boxes, expected, actual, beside) if structure.boxes else [])


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)


def _outside(values: Array, low: float | None, high: float | None) -> float:
    """The greatest distance of a value from the range low to high."""
    if values.size == 0:
        return 0.0
    if np.isnan(values).any():
        return np.nan
    shortfall = 0.0 if low is None else low - values.min()
    excess = 0.0 if high is None else values.max() - high
    return float(max(shortfall, excess, 0.0))


def _from_one(values: Array) -> float:
    return float(np.abs(values - 1).max()) if values.size else 0.0


def _count_unsorted(values: Array, order: Order) -> float:
    """The number of neighbours along the last axis that are out of order; a pair with NaN is."""
    leaders, followers = values[..., :-1], values[..., 1:]
    if order.endswith("descending"):
        leaders, followers = followers, leaders
    in_order = leaders < followers if order.startswith("strictly") else leaders <= followers
    return float(in_order.size - in_order.sum())


def _count_other_sizes(actual: tuple[int, ...], shape: tuple[int | str, ...], sizes: Mapping[str, int]) -> float:
    """The number of axes of another size than declared; all for another rank. A dim that no input has fits any size."""
    if len(actual) != len(shape):
        return float(max(len(actual), len(shape)))
    pairs = zip(shape, actual, strict=True)
    return float(sum(size != (sizes.get(dim, size) if isinstance(dim, str) else dim) for dim, size in pairs))


def _share_differing(expected: Array, actual: Array, token: int) -> float:
    """The share of sequences along the last axis that differ up to the first `token`; NaN for other shapes."""
    if expected.shape[:-1] != actual.shape[:-1] or not expected.ndim:
        return np.nan
    pairs = list(zip(rows_of(expected), rows_of(actual), strict=True))
    differing_count = sum(not np.array_equal(up_to(left, token), up_to(right, token)) for left, right in pairs)
    return differing_count / len(pairs) if pairs else 0.0
