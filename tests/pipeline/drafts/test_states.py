import pytest

from enginesmith.core.state import State
from enginesmith.core.types import TensorSpec
from pipeline.drafts.facts import FoundDim, FoundModel, as_inputs, begin_empty, find_states


def tensors(names, shape=("batch", 4)):
    return [TensorSpec(name, "float32", shape) for name in names.split()]


@pytest.mark.parametrize(
    ("inputs", "outputs", "pairs"),
    [
        ("input state sr", "output stateN", {"state": "stateN"}),
        ("x h0 c0", "y hn cn", {"h0": "hn", "c0": "cn"}),
        ("input h c", "probs hn cn", {"h": "hn", "c": "cn"}),
        ("spec hidden_in", "gain hidden_out", {"hidden_in": "hidden_out"}),
        ("spec conv_cache", "gain conv_cache_out", {"conv_cache": "conv_cache_out"}),
        ("ids past_key_values.0.key", "logits present.0.key", {"past_key_values.0.key": "present.0.key"}),
        (
            "ids past_key_values.0.key past_key_values.1.key",
            "logits present.1.key present.0.key",
            {"past_key_values.0.key": "present.0.key", "past_key_values.1.key": "present.1.key"},
        ),
        ("ids prevHidden", "logits nextHidden", {"prevHidden": "nextHidden"}),
        ("x past", "y present", {"past": "present"}),
        ("x cache", "y cache_out", {"cache": "cache_out"}),
        ("input", "output", {}),
        ("input mask", "output logits", {}),
        ("state_in", "state_out", {}),  # nothing would be left for a caller
        ("x state past_state", "y next_state", {}),  # which of two
    ],
)
def test_names_identify_states(inputs, outputs, pairs):
    states = find_states(tensors(inputs), tensors(outputs))
    assert {state.input: state.output for state in states} == pairs


def test_states_need_compatible_types_and_shapes():
    (step,) = find_states([*tensors("x"), TensorSpec("step", "int64", ())], [TensorSpec("step_out", "int64", ())])
    assert step == State("step", "step_out")
    items = [*tensors("x"), TensorSpec("h", "float32", (2, "batch"))]
    assert find_states(items, [TensorSpec("hn", "float32", (2, "b"))])
    assert not find_states(items, [TensorSpec("hn", "float16", (2, "b"))])
    assert not find_states(items, [TensorSpec("hn", "float32", (3, "b"))])
    assert not find_states(items, [TensorSpec("hn", "float32", (2, "b", 1))])


def test_a_mask_and_a_passed_input_are_no_states():
    inputs, specs = [*tensors("x"), TensorSpec("mask", "bool", (2,))], [TensorSpec("mask_out", "bool", (2,))]
    assert not find_states(inputs, specs) and find_states(tensors("x h"), tensors("y hn"))
    assert not find_states(tensors("x h"), tensors("y hn"), {"hn": "h"})
    # What came in is what the next call takes: a delay.
    assert find_states(tensors("x h"), tensors("y hn"), {"hn": "x"})


def test_a_growing_cache_begins_empty_and_a_batch_does_not():
    inputs = (TensorSpec("x", "float32", ("batch", 1)), TensorSpec("past", "float32", ("batch", "length", "width")))
    outputs = [TensorSpec("present", "float32", ("batch", "all", "width"))]
    dims = {name: FoundDim(1, 2, 4, "") for name in ("batch", "length", "width")}
    model = FoundModel("m", {}, inputs, ("present",), dims, states=(State("past", "present"),))
    expected = {"batch": 1, "length": 0, "width": 1}
    assert {name: dim.min for name, dim in begin_empty(model, outputs).dims.items()} == expected
    taken = as_inputs(begin_empty(model, outputs))
    assert (taken.states, {dim.min for dim in taken.dims.values()}) == ((), {1}), "requests hold no empty states"
