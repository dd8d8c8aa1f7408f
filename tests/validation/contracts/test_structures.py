from typing import Any

import numpy as np
import pytest

from enginesmith.core.codec import decode
from validation.contracts.predicates import find_broken
from validation.contracts.terms import Structure
from validation.metrics.tasks.boxes import overlaps, to_corners

RNG = np.random.default_rng(0)
CORNERS = np.sort(RNG.uniform(0, 100, (2, 6, 2, 2)), axis=2).reshape(2, 6, 4)
FOUND = {"boxes": CORNERS, "class": RNG.integers(0, 2, (2, 6)), "score": RNG.uniform(0.3, 1, (2, 6))}
WHOLE = {"classes": "class", "scores": "score", "score": 0.05}


def boxes(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray] = FOUND, **asked: Any) -> dict[str, float]:
    structure = decode({"boxes": {**WHOLE, **asked}}, Structure)
    result = find_broken(structure, expected["boxes"], actual["boxes"], {}, (expected, actual))
    return {name: value for name, value, limit in result if not value <= limit}


def changed(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    return {**FOUND, **arrays}


def test_boxes_match_in_any_order_and_form() -> None:
    order = [3, 1, 0, 5, 4, 2]
    assert boxes({name: array[:, order] for name, array in FOUND.items()}) == {}
    low, high = CORNERS[..., :2], CORNERS[..., 2:]
    assert boxes(changed(boxes=CORNERS + 0.01)) == {}
    for form, start in (("xywh", low), ("cxcywh", (low + high) / 2)):
        other_boxes = changed(boxes=np.concatenate([start, high - low], -1))
        assert boxes(other_boxes, other_boxes, form=form) == {}
        np.testing.assert_allclose(to_corners(other_boxes["boxes"], form), CORNERS)  # type: ignore[arg-type]


def test_each_kind_of_box_difference_is_measured() -> None:
    flipped_class = FOUND["class"].copy()
    flipped_class[0, 0] ^= 1
    assert boxes(changed(**{"class": flipped_class})) == pytest.approx({"boxes": 1 / 12})
    assert boxes(changed(boxes=CORNERS + 30))["boxes"] > 0.5
    assert boxes(changed(score=FOUND["score"] - 0.2)) == pytest.approx({"boxes score": 0.2})
    fewer_boxes = {name: array[:, :4] for name, array in FOUND.items()}
    assert boxes(fewer_boxes) == pytest.approx({"boxes": 1 - 16 / 20})
    assert boxes(FOUND, fewer_boxes) == pytest.approx({"boxes": 1 - 16 / 20}), "invented boxes count as missing ones do"
    assert boxes(fewer_boxes, matched=0.75) == {}


def test_boxes_of_low_score_do_not_count_and_two_never_share_a_match() -> None:
    low = np.where(np.arange(6) < 3, 0.01, FOUND["score"])
    moved_array = np.where((np.arange(6) < 3)[:, None], CORNERS + 50, CORNERS)
    assert boxes(changed(boxes=moved_array, score=low), changed(score=low), least_score=0.25) == {}
    double_arrays = {name: np.concatenate([array, array], 1) for name, array in FOUND.items()}
    assert boxes(double_arrays) == pytest.approx({"boxes": 1 - 24 / 36})


@pytest.mark.parametrize(
    "actual",
    [
        changed(boxes=np.where(np.arange(4) == 1, np.nan, CORNERS)),
        changed(boxes=CORNERS[:1], score=FOUND["score"][:1]),
        changed(score=FOUND["score"][:, :2]),
        changed(boxes=CORNERS[..., :3]),
        changed(score=FOUND["score"] * np.nan),
        {"boxes": CORNERS},
    ],
)
def test_an_invalid_set_of_boxes_breaks_the_contract(actual: dict[str, np.ndarray]) -> None:
    assert all(np.isnan(value) for value in boxes(actual, least_score=0.1).values())
    assert "boxes" in boxes(actual, least_score=0.1)


def test_overlap_matches_its_definition() -> None:
    left_array, right = np.array([[0, 0, 2, 2], [1, 1, 1, 1.0]]), np.array([[1, 1, 3, 3], [0, 0, 2, 2], [1, 1, 1, 1.0]])
    np.testing.assert_allclose(overlaps(left_array, right), [[1 / 7, 1, 0], [0, 0, 0]])
    assert boxes({**FOUND, "boxes": (flat_corner := CORNERS[..., [0, 1, 0, 1]])}, {**FOUND, "boxes": flat_corner}) == {}
    assert boxes({name: array[:, :0] for name, array in FOUND.items()}, {n: a[:, :0] for n, a in FOUND.items()}) == {}


GRAPH = np.array([[5, 6, 7, 2, 0, 0], [8, 9, 2, 0, 0, 0], [4, 4, 4, 4, 4, 4]])


def row(index: int, *tokens: int) -> np.ndarray:
    changed_graph = GRAPH.copy()
    changed_graph[index] = tokens
    return changed_graph


def broken(structure: dict[str, Any], actual: np.ndarray) -> dict[str, float]:
    result = find_broken(decode(structure, Structure), GRAPH, actual, {})
    return {name: value for name, value, limit in result if not value <= limit}


@pytest.mark.parametrize(
    ("asked", "actual", "value"),
    [
        ({"until": 2, "first": 4}, GRAPH, None),
        ({"until": 2, "first": 4}, row(1, 8, 9, 2, 5, 5, 5), None),
        ({"until": 2, "first": 4}, row(2, 4, 4, 4, 4, 9, 9), None),
        ({"until": 2, "first": 4}, row(2, 4, 9, 4, 4, 4, 4), 3),
        ({"until": 2, "first": 4}, row(1, 8, 9, 9, 2, 0, 0), 2),
        ({"until": 2, "first": 4}, row(1, 8, 2, 0, 0, 0, 0), 2),
        ({"first": 6}, row(1, 8, 9, 2, 5, 5, 5), 3),
        ({"until": 2, "edits": 0.3}, row(0, 5, 6, 2, 0, 0, 0), None),
        ({"until": 2, "edits": 0.2}, row(0, 5, 6, 2, 0, 0, 0), 0.25),
        ({"until": 2, "edits": 0.2}, GRAPH[:2], np.nan),
        ({"until": 2, "first": 1}, GRAPH[0], np.nan),
        ({"until": 2, "first": 2}, GRAPH[:, :0], 2),
    ],
)
def test_sequences_are_equal_up_to_a_length(asked: dict[str, Any], actual: np.ndarray, value: float | None) -> None:
    name = "sequence first" if "first" in asked else "sequence edits"
    expected = {} if value is None else {name: value}
    assert broken({"sequence": asked}, actual) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("asked", "actual", "expected"),
    [
        ({"apart": 0, "pad": 0}, GRAPH, {}),
        ({}, row(0, 5, 6, 7, 7, 7, 7), {"eos": 1}),
        ({}, row(2, 4, 4, 2, 4, 4, 4), {"eos": 1}),
        ({"apart": 0}, row(0, 5, 6, 7, 7, 7, 2), {"eos apart": 2}),
        ({"apart": 2}, row(0, 5, 6, 7, 7, 7, 2), {}),
        ({"pad": 0}, row(0, 5, 6, 7, 2, 9, 9), {"eos pad": 2}),
        ({}, GRAPH[:1], {"eos": np.nan}),
        ({"apart": 0, "pad": 0}, GRAPH[:, :0], {"eos": 2}),
    ],
)
def test_ends_equal_the_graphs_ends(asked: dict[str, Any], actual: np.ndarray, expected: dict[str, float]) -> None:
    assert broken({"eos": {"token": 2, **asked}}, actual) == pytest.approx(expected, nan_ok=True)


def test_another_type_of_numbers_breaks_dtype() -> None:
    assert broken({"dtype": "int64"}, GRAPH) == {}
    assert broken({"dtype": "int32"}, GRAPH) == {"dtype": 1}
