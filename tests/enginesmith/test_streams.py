import json
from contextlib import nullcontext

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import Places, State, state_ends, states_of
from enginesmith.core.types import ShapeProfile, TensorSpec
from enginesmith.streams import Streams

INPUTS = [TensorSpec("x", "float32", ("batch", 2)), TensorSpec("h", "float32", (1, "batch", 2))]
STATES = [State("h", "hn", 1.0)]


def add(inputs):
    """A running sum, from 1."""
    total = inputs["h"] + inputs["x"][None]
    return {"y": total[0] * 2, "hn": total}


def rows(*values):
    return {"x": np.array([[value, value] for value in values], np.float32)}


def test_a_state_is_carried_from_call_to_call_and_begins_with_its_initial_value():
    streams = Streams(add, INPUTS, STATES)
    assert [spec.name for spec in streams.inputs] == ["x"]
    assert [float(streams.run(rows(value))["y"][0, 0]) for value in (1, 2, 3)] == [4.0, 8.0, 14.0]


def test_streams_of_a_batch_equal_single_streams():
    joint_streams, steps = Streams(add, INPUTS, STATES), [(1, 5, 9), (2, 6, 7)]
    both_outputs = [joint_streams.run(rows(*step))["y"] for step in steps]
    for place in range(3):
        single_streams = Streams(add, INPUTS, STATES)
        for step, answer in zip(steps, both_outputs, strict=True):
            np.testing.assert_array_equal(single_streams.run(rows(step[place]))["y"][0], answer[place])


def test_some_streams_restart_and_the_others_continue():
    streams = Streams(add, INPUTS, STATES)
    output_before = streams.run(rows(1, 1, 1))["hn"]
    states = output_before.copy()
    streams.reset([1])
    np.testing.assert_array_equal(streams.run(rows(1, 1, 1))["y"][:, 0], [6.0, 4.0, 6.0])
    np.testing.assert_array_equal(output_before, states, "an answer that was given does not change")
    streams.reset()
    np.testing.assert_array_equal(streams.run(rows(1, 1))["y"][:, 0], [4.0, 4.0], "all anew, two of them now")


def test_streams_can_end_and_change_rows():
    streams = Streams(add, INPUTS, STATES)
    streams.run(rows(1, 2, 3))
    streams.keep([2, 0])
    np.testing.assert_array_equal(streams.run(rows(0, 0))["y"][:, 0], [8.0, 4.0])


def test_another_number_of_rows_than_streams_is_refused_with_the_remedy():
    streams = Streams(add, INPUTS, STATES)
    streams.run(rows(1, 2, 3))
    with pytest.raises(DataError, match=r"'x' has 2 rows, and there are 3 streams; .*keep\(rows\)"):
        streams.run(rows(1, 2))


@pytest.mark.parametrize("row", [3, -1, True, np.True_, 0.5])
def test_a_row_without_a_stream_is_reported(row):
    streams = Streams(add, INPUTS, STATES)
    streams.reset([row])
    streams.run(rows(1, 2, 3))
    for change in (streams.reset, streams.keep):
        output = f"there is no stream in row {row}: there are 3, in rows 0 to 2"
        with pytest.raises(DataError, match="rows is a mask; give the numbers" if row in (True, False) else output):
            change([0, row])
    assert len(streams.run(rows(1, 2, 3))["y"]) == 3


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_among_the_inputs_is_refused(steps):
    streams = Streams(add, INPUTS, STATES)
    for _ in range(steps):
        streams.run(rows(1))
    with pytest.raises(
        DataError, match="'h' is a state, which is passed from step to step automatically; leave it out"
    ):
        streams.run({**rows(1), "h": np.ones((1, 1, 2), np.float32)})


def test_a_failed_call_leaves_the_states_unchanged():
    def sometimes(inputs):
        if inputs["x"][0, 0] < 0:
            raise DataError("no")
        return add(inputs)

    streams = Streams(sometimes, INPUTS, STATES)
    streams.run(rows(1))
    with pytest.raises(DataError):
        streams.run(rows(-1))
    assert streams.run(rows(1))["y"][0, 0] == 6.0


def test_outputs_without_a_state_are_refused():
    streams = Streams(lambda inputs: {"y": inputs["x"]}, INPUTS, STATES)
    with pytest.raises(DataError, match="has no output 'hn'"):
        streams.run(rows(1))


def test_a_state_without_an_axis_for_streams_is_reset_as_a_whole():
    inputs = [INPUTS[0], TensorSpec("h", "float32", (2,))]
    streams = Streams(lambda inputs: {"hn": inputs["h"] + 1}, inputs, STATES)
    streams.run(rows(1))
    with pytest.raises(DataError, match="has no axis for streams"):
        streams.reset([0])


CACHE = [TensorSpec("x", "float32", ("batch", 1)), TensorSpec("past", "float32", ("batch", "length"))]


def append(inputs):
    return {"present": np.concatenate([inputs["past"], inputs["x"]], axis=1)}


def test_a_growing_state_begins_empty_and_ends_at_its_limit():
    streams = Streams(append, CACHE, [State("past", "present")], {"length": (0, 2)})
    shapes = [streams.run({"x": np.ones((1, 1), np.float32)})["present"].shape for _ in range(3)]
    assert shapes == [(1, 1), (1, 2), (1, 3)]
    with pytest.raises(DataError, match=r"'past' has reached length=3, but the model accepts at most 2"):
        streams.run({"x": np.ones((1, 1), np.float32)})


FIXED, AT = TensorSpec("cache", "float32", ("batch", 4, 1)), TensorSpec("at", "int64", ("tokens",))


@pytest.mark.parametrize(
    ("count", "at", "message"),
    [
        ("", [2, 3], None),
        ("", [3, 4], "places 0 to 3, but by 'at' this step writes 3 to 4"),
        ("", [-1], "this step writes -1 to -1"),
        ("tokens", [2, 2], None),
        ("tokens", [3, 3], "this step writes 3 to 4"),
        ("", [], None),
    ],
)
def test_a_step_writes_only_within_a_fixed_states_places(count, at, message):
    calls = []
    states = [State("cache", "out", 0.0, Places(1, "at", count))]
    streams = Streams(lambda inputs: calls.append(1) or {"out": inputs["cache"]}, [FIXED, AT], states)
    with pytest.raises(DataError, match=message) if message else nullcontext():
        streams.run({"at": np.array(at, np.int64)})
    assert bool(calls) == (message is None), "refused before it runs"


def test_streams_are_made_from_the_description_of_a_pulled_engine(tmp_path):
    fields = {
        "inputs": [vars(spec) for spec in CACHE],
        "state": [vars(State("past", "present"))],
        "ends": {"length": [0, 1]},
    }
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(fields))
    streams = Streams.described(append, path)
    streams.run({"x": np.ones((1, 1), np.float32)})
    for damaged in ({}, {"inputs": 1}, {**fields, "state": [{"input": 1}]}, {**fields, "ends": {"length": [1]}}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(DataError, match="describes no engine: "):
            Streams.described(append, path)


def test_the_ends_of_states_cover_all_profiles():
    def profile(low, high):
        end_texts = ("x", (low, 1), (low, 1), (high, 1)), ("past", (low, low), (low, low), (high, high))
        return ShapeProfile(end_texts)

    actual = state_ends(CACHE, [State("past", "present")], [profile(1, 4), profile(5, 8)])
    assert actual == {"length": (1, 8)}, "the batch is given by each call"


def test_the_states_of_a_version_are_in_its_spec():
    assert states_of({}) == ()
    spec = {"state": {"h": {"output": "hn", "initial": 1}}}
    assert states_of(spec) == (State("h", "hn", 1.0),)
    spec["state"]["h"]["places"] = {"axis": 1, "at": "at"}
    assert states_of(spec) == (State("h", "hn", 1.0, Places(1, "at")),)
