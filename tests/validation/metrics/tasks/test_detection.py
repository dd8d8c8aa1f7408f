"""Detection: boxes out of outputs, and average precision against a straight-line implementation of COCO's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import DataError, InputError
from validation.metrics.tasks.boxes import MOST_BOXES, BoxSet, Detection, boxes_of_labels, read_boxes
from validation.metrics.tasks.terms import DetectionMetric

TERMS = DetectionMetric("boxes", scores="scores", classes="classes")


def boxes(corners, scores=None, classes=None):
    corners = np.asarray(corners, float).reshape(-1, 4)
    count = len(corners)
    scores = np.ones(count) if scores is None else np.asarray(scores, float)
    return BoxSet(corners, scores, np.zeros(count) if classes is None else np.asarray(classes))


def values(expected, actual, terms=TERMS):
    score = Detection(terms)
    score.add(expected, actual)
    return {item.name: item.value for item in score.values()}


def straight_iou(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared_width = max(width, 0) * max(height, 0)
    return shared_width / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared_width)


def straight_precision(expected, actual):
    """COCO's mean average precision, box by box."""
    means = []
    for name in sorted({c for sample in expected for c in sample.classes}):
        total = sum(int((sample.classes == name).sum()) for sample in expected)
        for least_ratio in [0.5 + 0.05 * step for step in range(10)]:
            hits = []
            for right_row, own_row in zip(expected, actual, strict=True):
                free_boxes = [box for box, c in zip(right_row.corners, right_row.classes, strict=True) if c == name]
                for box, score, c in sorted(
                    zip(own_row.corners, own_row.scores, own_row.classes, strict=True), key=lambda x: -x[1]
                ):
                    if c != name:
                        continue
                    best = max(range(len(free_boxes)), key=lambda i: straight_iou(box, free_boxes[i]), default=None)
                    is_good = best is not None and straight_iou(box, free_boxes[best]) >= least_ratio
                    hits.append((score, is_good))
                    if is_good:
                        del free_boxes[best]
            hits.sort(key=lambda item: -item[0])
            right_so_far, points = 0, []
            for index, (_, is_good) in enumerate(hits, 1):
                right_so_far += is_good
                points.append((right_so_far / total, right_so_far / index))
            reads = [max([p for r, p in points if r >= level], default=0.0) for level in np.linspace(0, 1, 101)]
            means.append(sum(reads) / 101)
    return sum(means) / len(means)


def draw_sample(rng, count):
    first_array = rng.uniform(0, 10, (count, 2))
    corners = np.concatenate([first_array, first_array + rng.uniform(1, 6, (count, 2))], 1)
    order = np.argsort(-rng.random(count))
    return boxes(corners, np.sort(rng.random(count))[::-1], rng.integers(0, 2, count)[order])


def join(one, other):
    """The boxes of both, those of `other` with half their scores, best first."""
    scores = np.concatenate([one.scores, other.scores / 2])
    order = np.argsort(-scores)
    corners, classes = (np.concatenate(pair) for pair in ((one.corners, other.corners), (one.classes, other.classes)))
    return boxes(corners[order], scores[order], classes[order])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_mean_average_precision_equals_cocos(seed):
    rng = np.random.default_rng(seed)
    expected = [draw_sample(rng, 3) for _ in range(3)]
    moved_boxes = [boxes(s.corners + rng.normal(0, 0.3, s.corners.shape), s.scores, s.classes) for s in expected]
    items = [join(box, draw_sample(rng, 2)) for box in moved_boxes]
    assert values(expected, items)["mean_average_precision"] == pytest.approx(straight_precision(expected, items))


def test_matches_and_precision_equal_manual_results():
    right_boxes = boxes([[0, 0, 10, 10], [20, 20, 30, 30]])
    shifted_boxes = boxes([[0, 0, 10, 8], [50, 50, 60, 60]], [0.9, 0.8])  # overlaps of 0.8 and 0
    actual = values([right_boxes], [shifted_boxes])
    assert actual["matched_boxes"] == 2 * 1 / 4
    assert actual["mean_average_precision"] == pytest.approx(7 / 10 * 51 / 101)  # to 0.80, at recalls up to one half
    assert values([right_boxes], [boxes(right_boxes.corners, classes=[1, 1])])["matched_boxes"] == 0.0
    doubled_boxes = boxes(np.repeat(right_boxes.corners[:1], 2, 0), [0.9, 0.8])
    assert values([right_boxes], [doubled_boxes])["matched_boxes"] == 2 * 1 / 4


def test_empty_boxes_have_no_precision_and_invented_ones_are_not_matched():
    empty_boxes, one_boxes = boxes([]), boxes([[0, 0, 1, 1]])
    assert values([empty_boxes], [empty_boxes]) == {"mean_average_precision": None, "matched_boxes": None}
    assert values([empty_boxes], [one_boxes]) == {"mean_average_precision": None, "matched_boxes": 0.0}
    assert values([one_boxes], [empty_boxes]) == {"mean_average_precision": 0.0, "matched_boxes": 0.0}


@pytest.mark.parametrize(("form", "box"), [("xyxy", [2, 3, 6, 9]), ("xywh", [2, 3, 4, 6]), ("cxcywh", [4, 6, 4, 6])])
def test_all_box_formats_become_corners(form, box):
    (sample,) = read_boxes({"y": np.array([[box]])}, DetectionMetric("y", form))
    assert sample.corners.tolist() == [[2, 3, 6, 9]]


def test_outputs_beside_each_other_with_and_without_a_batch():
    corners = np.array([[0, 0, 1, 1], [0, 0, 2, 2], [0, 0, 3, 3]], np.float32)
    outputs = {"boxes": corners, "scores": np.array([0.2, 0.9, np.nan]), "classes": np.array([7, 8, 9])}
    (sample,) = read_boxes(outputs, TERMS)
    assert sample.classes.tolist() == [8, 7] and sample.corners[0].tolist() == [0, 0, 2, 2]
    (batched_set,) = read_boxes({name: value[None] for name, value in outputs.items()}, TERMS)
    assert batched_set.classes.tolist() == [8, 7]
    by_class = {"boxes": corners[None], "scores": np.array([[[0.1, 0.2], [0.9, 0.3], [0.0, 0.0]]])}
    (sample,) = read_boxes(by_class, DetectionMetric("boxes", scores="scores", least_score=0.1))
    assert sample.classes.tolist() == [0, 1] and sample.scores.tolist() == [0.9, 0.2]


def test_overlapping_boxes_are_removed_within_classes():
    head = np.array(
        [[[5, 5, 4, 4, 0.9, 0.1], [5, 5, 4.1, 4, 0.8, 0.2], [5, 5, 4, 4, 0.1, 0.7], [50, 5, 4, 4, 0.1, 0.0]]]
    )
    terms = DetectionMetric("y", "cxcywh", head=True, least_score=0.25, nms=0.5)
    (sample,) = read_boxes({"y": head.transpose(0, 2, 1)}, terms)
    assert sample.scores.tolist() == [0.9, 0.7] and sample.classes.tolist() == [0, 1]
    assert sample.corners[0].tolist() == [3, 3, 7, 7]


def test_the_best_boxes_count_up_to_cocos_limit():
    many_array = np.tile([0.0, 0, 1, 1], (MOST_BOXES + 20, 1))
    scores = np.arange(MOST_BOXES + 20.0)
    (sample,) = read_boxes({"y": many_array, "s": scores}, DetectionMetric("y", scores="s"))
    assert len(sample.scores) == MOST_BOXES and sample.scores[0] == MOST_BOXES + 19


def test_labels_are_boxes_with_classes_that_end_at_negative_ones():
    labels = np.array([[[0, 0, 2, 2, 3], [0, 0, 0, 0, -1]], [[1, 1, 1, 1, 0], [0, 0, 1, 1, 2]]], float)
    first_set, second_set = boxes_of_labels(labels, TERMS)
    assert first_set.classes.tolist() == [3] and second_set.classes.tolist() == [2]
    assert boxes_of_labels(labels[..., :4], TERMS)[0].classes.tolist() == [0]
    with pytest.raises(DataError, match="samples, boxes, 5"):
        boxes_of_labels(np.zeros((2, 3)), TERMS)


@pytest.mark.parametrize(
    ("outputs", "terms", "error", "message"),
    [
        ({"y": np.zeros((1, 2, 5))}, DetectionMetric("y"), DataError, "last axis of 4"),
        ({"y": np.zeros((1, 2, 4))}, DetectionMetric("y", scores="s"), InputError, "'s' is not an output"),
        ({"y": np.zeros((1, 2, 4)), "s": np.zeros((1, 3))}, DetectionMetric("y", scores="s"), DataError, "expected"),
        ({"y": np.zeros((2, 4)), "s": np.zeros((2, 0))}, DetectionMetric("y", scores="s"), DataError, "no classes"),
        ({"y": np.zeros((1, 4, 9))}, DetectionMetric("y", head=True), DataError, "has 4 rows"),
    ],
)
def test_outputs_without_boxes_are_reported(outputs, terms, error, message):
    with pytest.raises(error, match=message):
        read_boxes(outputs, terms)
