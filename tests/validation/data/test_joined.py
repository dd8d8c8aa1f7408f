from dataclasses import replace

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import State, step_inputs
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.streams import Streams
from validation.data.joined import GrownInputs, JoinedSteps, SequenceSamples, read_steps, stack
from validation.data.samples import Samples

IDS, VOICE = TensorSpec("ids", "int64", ("batch", "tokens")), TensorSpec("voice", "float32", ("batch", 1))
PAST = TensorSpec("past", "int64", ("batch", "past"))
DIMS = [Dim("batch", 1, 1, 4), Dim("tokens", 1, 1, 3), Dim("past", 0, 4, 9)]
ORDER, CALLS = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1, 2, 3])


def samples(folder, calls=CALLS, voice=0.0):
    arrays = {"ids": np.arange(8)[:, None], "voice": np.full((8, 1), voice, np.float32), "call": calls}
    np.savez(folder / "golden.npz", **arrays)
    return Samples.open(folder / "golden.npz", [IDS, VOICE], DIMS, ["call"])


def test_samples_with_one_number_are_one_step_of_their_sequence(tmp_path):
    actual = samples(tmp_path)
    steps = read_steps(actual, ("tokens", "call"), ORDER, DIMS)
    np.testing.assert_array_equal(steps.firsts, [0, 3, 4, 6, 7], "a new sequence is a new step")
    joined_steps = JoinedSteps(actual, steps)
    runs = [(end, inputs["ids"].tolist(), inputs["voice"].shape) for end, inputs in joined_steps.runs()]
    assert runs == [
        (1, [[0, 1, 2]], (1, 1)),
        (2, [[3]], (1, 1)),
        (3, [[4, 5]], (1, 1)),
        (4, [[6]], (1, 1)),
        (5, [[7]], (1, 1)),
    ]
    assert [end for end, _ in joined_steps.runs(1, 3)] == [2, 3], "counted in steps"
    assert read_steps(actual, None, ORDER, DIMS) is None


def test_a_steps_state_comes_from_steps_of_any_size(tmp_path):
    actual = samples(tmp_path)
    streams = Streams(
        lambda inputs: {"present": np.concatenate([inputs["past"], inputs["ids"]], 1)},
        [IDS, VOICE, PAST],
        [State("past", "present")],
    )
    steps = SequenceSamples(actual, streams, ORDER, read_steps(actual, ("tokens", "call"), ORDER, DIMS))
    runs = [inputs for _, inputs in steps.runs()]
    assert [run["past"].tolist()[0] for run in runs] == [[], [0, 1, 2], [], [4, 5], [4, 5, 6]]
    assert [1, 4] in stack(runs, [IDS, VOICE, PAST], DIMS)[1], "one token behind three, of two sequences"
    assert len(steps.digests) == len(replace(steps, steps=None).digests), "samples are compared, whatever their steps"


def test_each_steps_addition_is_joined_to_earlier_steps():
    items = [IDS, TensorSpec("mask", "int64", ("batch", "past + tokens"))]
    added_specs = step_inputs([*items, PAST], [State("past", "present")])
    assert [spec.shape for spec in added_specs] == [("batch", "tokens"), ("batch", "tokens")]
    assert step_inputs([VOICE, replace(items[1], shape=("batch", "past + 1"))], ())[1].shape == ("batch", 1)
    grown_inputs = GrownInputs(items)
    parts = [{"ids": np.ones((1, size), int), "mask": np.full((1, size), size)} for size in (3, 1, 2)]
    masks = [grown_inputs.take(part)["mask"].tolist()[0] for part in parts]
    assert masks == [[3, 3, 3], [3, 3, 3, 1], [3, 3, 3, 1, 2, 2]]


def test_a_step_that_the_dim_does_not_allow_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"step from sample 0, number 7 of 'call', has tokens=4, outside 1..3"):
        read_steps(samples(tmp_path, np.full(8, 7)), ("tokens", "call"), ORDER, DIMS)
    with pytest.raises(DataError, match="shape"):
        read_steps(samples(tmp_path, np.zeros((8, 2))), ("tokens", "call"), ORDER, DIMS)


def test_an_unjoinable_input_is_equal_in_all_samples_of_a_step(tmp_path):
    actual = samples(tmp_path, voice=np.arange(8)[:, None])
    with pytest.raises(DataError, match="samples of one step differ in input 'voice'"):
        list(JoinedSteps(actual, read_steps(actual, ("tokens", "call"), ORDER, DIMS)).runs())
