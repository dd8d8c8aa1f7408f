from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from builders.as_built import build_engine, call_as_built, store_states
from builders.backends.discovery import open_engine
from builders.backends.onnxruntime import OnnxRuntime
from builders.onnx_graphs.quantized_states import quantize_states
from builders.reference import ReferenceSession
from enginesmith.core.types import QuantizedState
from tests.decoding import REQUEST, make_decoder

INPUTS = {"ids": np.array([[1], [2]]), "past": np.ones((2, 3, 8), np.float32)}


QUANTIZE = ort.InferenceSession(
    onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        round (float[n] x, float scale) => (int8[n] y) {
            zero = Constant <value = int8 {0}> ()
            y = QuantizeLinear (x, scale, zero)
        }
    """).SerializeToString()
)


@given(arrays(np.float32, 20, elements=st.floats(-300, 300, width=32)), st.floats(2.0**-20, 2.0**10, width=32))
def test_an_int8_state_equals_onnxs_and_is_carried_exactly(values, scale):
    state = QuantizedState("past", "present", scale)
    stored = store_states([state], {"past": values})["past"]
    np.testing.assert_array_equal(stored, QUANTIZE.run(None, {"x": values, "scale": np.array(scale, np.float32)})[0])
    second_array = store_states([state], {"past": stored * np.float32(scale)})["past"]
    np.testing.assert_array_equal(second_array, stored)
    np.testing.assert_array_equal(store_states([state], {"past": stored})["past"], stored)


def test_an_engine_with_int8_states_opens_with_the_models_states(tmp_path: Path) -> None:
    state = QuantizedState("past", "present", float(np.float32(0.03)))
    model = make_decoder()
    quantize_states(model, [state])
    onnx.save(model, tmp_path / "model.onnx")
    request = replace(REQUEST, quantized_states=(state,))
    engine = build_engine(OnnxRuntime(), request, tmp_path / "model.onnx", tmp_path)
    assert request.key != REQUEST.key
    file = ort.InferenceSession(str(engine.path))
    assert [item.type for item in file.get_inputs()][:2] == ["tensor(int64)", "tensor(int8)"]
    with open_engine(engine) as actual, ReferenceSession(tmp_path / "model.onnx") as expected:
        assert [spec.dtype for spec in actual.inputs] == ["int64", "float32"]
        assert [spec.dtype for spec in actual.outputs] == ["float32", "float32"]
        result, expected_result = actual.run(INPUTS), expected.run(INPUTS)
        np.testing.assert_array_equal(result["present"], expected_result["present"])
        np.testing.assert_allclose(result["logits"], expected_result["logits"], atol=1e-6)
        call = actual.prepare_call(INPUTS)
        assert call is not None
        call()
    whole_engine, inputs = call_as_built(engine, INPUTS)
    assert inputs["past"].dtype == np.int8 and [spec.dtype for spec in whole_engine.request.inputs] == ["int64", "int8"]
