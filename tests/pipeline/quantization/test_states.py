"""Scales of states of int8: from the largest magnitude that calibration saw."""

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from pipeline.quantization.insertion_points import scale_states
from pipeline.quantization.ranges import Ranges

STATE = State("past", "present")


def test_the_scale_holds_the_largest_magnitude_that_went_in_or_out():
    (found,) = scale_states([STATE], Ranges({"past": (-1.0, 2.0), "present": (-5.08, 2.0)}, "minmax", "", 3))
    assert (found.input, found.output) == ("past", "present")
    assert found.scale == float(np.float32(5.08 / 127)), "as float32 holds it, so that JSON and the graph agree"


@pytest.mark.parametrize("ranges", [None, Ranges({}, "minmax", "", 0), Ranges({"past": (0.0, 0.0)}, "minmax", "", 3)])
def test_a_state_that_was_not_seen_is_refused(ranges):
    with pytest.raises(
        DataError, match=r"state\.past\.dtype: calibration samples do not show how large 'past' becomes"
    ):
        scale_states([STATE], ranges)
    assert scale_states([], ranges) == ()
