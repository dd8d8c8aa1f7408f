"""Which sequences a model with state is run through with its own states."""

from dataclasses import dataclass

import numpy as np
import pytest

from enginery.core.errors import DataError
from enginery.core.state import State
from enginery.core.types import Dim, TensorSpec
from pipeline.sources.steps import StateModel

X, H = TensorSpec("x", "float32", (1, "rows", 2)), TensorSpec("h", "float32", ("rows", 2))
COUNT = TensorSpec("count", "int64", ())


@dataclass(frozen=True)
class Steps:
    """Steps 0, 1, ... of one row. count: how many."""

    count: int
    name: str = "golden.npz"
    digest: str = ""

    def runs(self, start=0, stop=None):
        for at in range(self.count):
            yield at + 1, {"x": np.full((1, 1, 2), at, np.float32)}


def run(given):
    total = given["h"] + given["x"][0] + given["count"]
    return {"y": total, "hn": total, "counted": given["count"] + 1}


def model(most):
    states = (State("h", "hn"), State("count", "counted"))
    return StateModel(run, (X, H, COUNT), (Dim("rows", 1, 1, most),), states)


def cases(most, count, order):
    return {case.name: case for case in model(most).sequences(Steps(count), order, ()).golden.cases}


def test_sequences_are_run_alone_and_side_by_side_as_streams_of_a_batch():
    found = cases(4, 8, np.array([0, 0, 0, 1, 1, 2, 2, 2]))
    assert [*found] == ["sequence 0", "sequence 1", "sequence 2", "sequences side by side"]
    together = found["sequences side by side"]
    np.testing.assert_array_equal(together.inputs["x"][:, 0, :, 0], [[0, 3, 5], [1, 4, 6]], "to the shortest's end")
    for row in range(3):
        alone = found[f"sequence {row}"].expected["y"][:2, 0]
        np.testing.assert_array_equal(together.expected["y"][:, row], alone)
    np.testing.assert_array_equal(cases(2, 4, None)["sequences side by side"].inputs["x"][:, 0, :, 0], [[0, 2], [1, 3]])


def test_a_batch_that_holds_no_two_streams_has_none_side_by_side():
    assert [*cases(1, 4, None)] == ["sequence 0"]


def test_sequences_of_one_step_are_refused():
    with pytest.raises(DataError, match="one step each, so that no state is handed on"):
        cases(4, 3, np.arange(3))
