import copy

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto

from builders.onnx_graphs.quantized_states import quantize_states, with_int8_states
from enginesmith.core.errors import ModelError
from enginesmith.core.types import QuantizedState

SCALE = float(np.float32(0.021))
CACHE = """
<ir_version: 8, opset_import: ["" : 17]>
cached (float[batch, 1, 4] x, float[batch, length, 4] past) => (float[batch, 1, 4] y, float[batch, all, 4] present) {
    present = Concat <axis = 1> (past, x)
    y = ReduceMean <axes = [1], keepdims = 1> (present)
}
"""
RECURRENT = """
<ir_version: 8, opset_import: ["" : 17]>
recurrent (float[batch, 1, 4] x, float[batch, 1, 4] past) => (float[batch, 1, 4] y, float[batch, 1, 4] present) {
    sum = Add (x, past)
    present = Tanh (sum)
    y = Add (present, past)
}
"""
READ_BY_A_BODY = """
<ir_version: 8, opset_import: ["" : 17]>
branching (float[batch, 1, 4] x, float[batch, 1, 4] past) => (float[batch, 1, 4] y, float[batch, 1, 4] present) {
    present = Add (x, past)
    yes = Constant <value = bool {1}> ()
    y = If (yes) <
        then_branch = one () => (float[batch, 1, 4] a) { a = Sub (present, past) },
        else_branch = two () => (float[batch, 1, 4] b) { b = Identity (past) }
    >
}
"""
SHARED = """
<ir_version: 8, opset_import: ["" : 17]>
shared (float[batch, 1, 4] x, float[batch, length, 4] past, float[batch, length, 4] other)
    => (float[batch, 1, 4] y, float[batch, all, 4] present, float[batch, all, 4] others) {
    present = Concat <axis = 1> (past, x)
    others = Concat <axis = 1> (other, x)
    y = Sub (x, x)
}
"""
STATE = QuantizedState("past", "present", SCALE)


def both(text: str, *states: QuantizedState) -> tuple[ModelProto, ModelProto]:
    rounded_model = onnx.parser.parse_model(text)
    quantize_states(rounded_model, states)
    stored_copy = copy.deepcopy(rounded_model)
    with_int8_states(stored_copy, states)
    for model in (rounded_model, stored_copy):
        onnx.checker.check_model(model, full_check=True)
    return rounded_model, stored_copy


def steps(model: ModelProto, first: dict[str, np.ndarray], pairs: dict[str, str]) -> list[dict[str, np.ndarray]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    names, state_values, result = [item.name for item in session.get_outputs()], first, []
    for x in np.random.default_rng(0).normal(size=(9, 2, 1, 4)).astype(np.float32):
        result.append(dict(zip(names, session.run(names, {"x": x, **state_values}), strict=True)))
        state_values = {name: result[-1][output] for name, output in pairs.items()}
    return result


@pytest.mark.parametrize(("text", "rows"), [(CACHE, 0), (RECURRENT, 1), (READ_BY_A_BODY, 1)])
def test_int8_states_carry_the_same_as_float_ones(text: str, rows: int) -> None:
    rounded_values, stored_values = both(text, STATE)
    shape = (2, rows, 4)
    floats = steps(rounded_values, {"past": np.zeros(shape, np.float32)}, {"past": "present"})
    whole_steps = steps(stored_values, {"past": np.zeros(shape, np.int8)}, {"past": "present"})
    for our_float, their_step in zip(floats, whole_steps, strict=True):
        assert their_step["present"].dtype == np.int8
        np.testing.assert_array_equal(our_float["present"], their_step["present"] * np.float32(SCALE))
        np.testing.assert_array_equal(our_float["y"], their_step["y"])


def test_in_a_growing_cache_only_new_rows_are_rounded() -> None:
    rounded_model, model = both(CACHE, STATE)
    assert [node.op_type for node in model.graph.node].count("QuantizeLinear") == 1
    concat = next(node for node in model.graph.node if node.op_type == "Concat")
    assert concat.output[0] == "present" and concat.input[0] == "past"
    assert [item.type.tensor_type.elem_type for item in model.graph.output] == [TensorProto.FLOAT, TensorProto.INT8]
    assert {item.type.tensor_type.elem_type for item in rounded_model.graph.input} == {TensorProto.FLOAT}


def test_two_caches_of_the_same_rows_have_their_own_scales() -> None:
    states = STATE, QuantizedState("other", "others", 2 * SCALE)
    _, stored = both(SHARED, *states)
    empty_array = np.zeros((2, 0, 4), np.int8)
    last_step = steps(stored, {"past": empty_array, "other": empty_array}, {"past": "present", "other": "others"})[-1]
    other_counts, present_counts = last_step["others"].astype(int), last_step["present"].astype(int)
    assert np.abs(present_counts - 2 * other_counts).max() <= 2 and not np.array_equal(present_counts, other_counts)


def test_a_missing_or_non_float32_state_is_refused() -> None:
    with pytest.raises(ModelError, match="'present' is float16, and must be float32; remove the state's dtype"):
        both(CACHE.replace("float[batch, all, 4] present", "float16[batch, all, 4] present"), STATE)
    with pytest.raises(ModelError, match="'gone' is not there"):
        both(CACHE, QuantizedState("gone", "present", SCALE))
