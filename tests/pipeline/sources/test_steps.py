from dataclasses import dataclass

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import Dim, TensorSpec
from pipeline.sources.steps import StateModel
from validation.data.joined import BEGINS
from validation.data.joined import Steps as Joined

X, H = TensorSpec("x", "float32", (1, "rows", 2)), TensorSpec("h", "float32", ("rows", 2))
COUNT = TensorSpec("count", "int64", ())
PRESENT = State("past", "present")


@dataclass(frozen=True)
class Steps:
    """Steps 0, 1, ... of one row. count: how many."""

    count: int
    name: str = "golden.npz"
    digest: str = ""

    def runs(self, start=0, stop=None):
        for index in range(self.count):
            yield index + 1, {"x": np.full((1, 1, 2), index, np.float32)}


def run(inputs):
    total = inputs["h"] + inputs["x"][0] + inputs["count"]
    return {"y": total, "hn": total, "counted": inputs["count"] + 1}


def model(most):
    states = (State("h", "hn"), State("count", "counted"))
    return StateModel(run, (X, H, COUNT), (Dim("rows", 1, 1, most),), states)


def cases(most, count, order):
    return {case.name: case for case in model(most).sequences(Steps(count), order, ()).golden.cases}


def test_sequences_run_alone_and_together_as_streams_of_a_batch():
    actual = cases(4, 8, np.array([0, 0, 0, 1, 1, 2, 2, 2]))
    assert [*actual] == ["sequence 0", "sequence 1", "sequence 2", "sequences side by side"]
    together = actual["sequences side by side"]
    np.testing.assert_array_equal(together.inputs["x"][:, 0, :, 0], [[0, 3, 5], [1, 4, 6]], "to the shortest's end")
    for row in range(3):
        single_outputs = actual[f"sequence {row}"].expected["y"][:2, 0]
        np.testing.assert_array_equal(together.expected["y"][:, row], single_outputs)
    np.testing.assert_array_equal(cases(2, 4, None)["sequences side by side"].inputs["x"][:, 0, :, 0], [[0, 2], [1, 3]])


TOKENS = TensorSpec("x", "float32", ("rows", "tokens"))


def prompted(begins, order, count=8):
    """Cases of running sums over steps of several samples: each row's, from place to place."""

    class Samples(Steps):
        def runs(self, start=0, stop=None):
            for index in range(self.count):
                yield index + 1, {"x": np.full((1, 1), index, np.float32)}

    def total(inputs):
        summed_sums = inputs["h"][:, None] + np.cumsum(inputs["x"], 1)
        return {"y": summed_sums, "hn": summed_sums[:, -1]}

    state_spec = TensorSpec("h", "float32", ("rows",))
    joined_kind = Joined(np.array(begins, bool), "tokens", (TOKENS,))
    sums = StateModel(
        total, (TOKENS, state_spec), (Dim("rows", 1, 1, 4), Dim("tokens", 1, 1, 4)), (State("h", "hn"),), joined_kind
    )
    return sums.sequences(Samples(count), np.array(order), ())


def test_outputs_of_unequal_steps_are_stored_place_by_place():
    result = prompted([1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1, 1])
    cases = {case.name: case for case in result.golden.cases}
    assert result.lengths == (3, 2, 2), "steps; side by side up to the shortest sequence's end"
    np.testing.assert_array_equal(cases["sequence 0"].expected["y"][:, 0, 0], np.array([0, 1, 3, 6, 10]))
    joint_case = cases["sequences side by side"]
    np.testing.assert_array_equal(joint_case.inputs[BEGINS], [1, 0, 1], "a step ends where one of any stream does")
    np.testing.assert_array_equal(joint_case.expected["y"][:, :, 0], [[0, 5], [1, 11], [3, 18]])
    np.testing.assert_array_equal(cases["sequence 0"].expected["hn"], [[10]])


def test_a_single_prompt_carries_no_state():
    with pytest.raises(DataError, match="every sequence has one step"):
        prompted([1, 0, 0, 0, 1, 0, 0, 0], [0] * 4 + [1] * 4)


def test_sequences_are_cut_after_whole_steps(monkeypatch):
    monkeypatch.setattr("pipeline.sources.steps.MOST_STEPS", 2)
    assert len(prompted([1, 0, 0, 1, 0, 1, 1, 1], [0] * 8).golden.cases[0].inputs["x"]) == 5


def test_a_batch_of_less_than_two_streams_runs_none_together():
    assert [*cases(1, 4, None)] == ["sequence 0"]


def test_sequences_of_one_step_are_refused():
    with pytest.raises(DataError, match="has one step, so no state is passed on"):
        cases(4, 3, np.arange(3))


@pytest.mark.parametrize(("most", "taken"), [(9, 4), (2, 2), (1, None)])
def test_random_steps_end_at_a_caches_limit_if_two_fit(most, taken):
    inputs, past_spec = TensorSpec("x", "float32", ("rows", "tokens")), TensorSpec("past", "float32", ("rows", "past"))
    dims = Dim("rows", 1, 1, 1), Dim("tokens", 1, 2, 2), Dim("past", 0, 0, most)
    grow = StateModel(
        lambda step: {"present": np.concatenate([step["past"], step["x"]], 1)}, (inputs, past_spec), dims, (PRESENT,)
    )
    groups = [{"x": np.ones((1, 2), np.float32)}] * 4
    if taken is None:
        with pytest.raises(DataError, match="has reached past=2"):
            grow.complete_random(groups)
    else:
        assert [step["past"].shape[1] for step in grow.complete_random(groups)] == [0, 2, 4, 6][:taken]
