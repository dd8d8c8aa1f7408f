import numpy as np
import pytest

from enginesmith.core.types import TensorSpec
from validation.data.batches import enough_samples
from validation.fuzz.cases import FuzzCase, make

ROWS = [TensorSpec("x", "float32", ("batch", "width"))]
GROUPS = [{"x": np.full((4, 2), float(index), np.float32) + np.arange(4)[:, None] / 8} for index in range(3)]


@pytest.mark.parametrize(("batch", "first"), [(1, [0]), (4, [0]), (5, [0, 1]), (9, [0, 1, 2]), (99, [0, 1, 2])])
def test_groups_are_added_until_there_are_enough(batch, first):
    result = enough_samples(GROUPS, 0, ROWS, {"batch": batch, "width": 7})["x"]
    assert sorted(set(result[:, 0].astype(int))) == first and len(result) == 4 * len(first)


def test_the_first_group_follows_the_last():
    assert enough_samples(GROUPS, 2, ROWS, {"batch": 5})["x"][:, 0].astype(int).tolist() == [2] * 4 + [0] * 4


def test_a_group_stays_alone_if_samples_do_not_join():
    longer_groups = [GROUPS[0], {"x": np.zeros((4, 3), np.float32)}]
    square = [TensorSpec("x", "float32", ("batch", "batch"))]
    fixed_specs = [TensorSpec("x", "float32", (4, "width"))]
    for groups, specs in ((longer_groups, ROWS), (GROUPS, square), (GROUPS, fixed_specs)):
        assert enough_samples(groups, 0, specs, {"batch": 8, "width": 2}) is groups[0]
    assert enough_samples(GROUPS, 1, ROWS, {"width": 5}) is GROUPS[1]


def test_a_drawn_case_contains_each_sample_once():
    """What is copied from one place of a batch to another must differ there."""
    drawn_inputs = make(FuzzCase((("batch", 11), ("width", 2))), ROWS, GROUPS, 0, "fp32")["x"]
    assert len(np.unique(drawn_inputs, axis=0)) == 11
