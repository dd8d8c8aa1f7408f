from dataclasses import replace

from enginesmith.core.state import with_int8_states
from enginesmith.core.types import QuantizedState
from tests.decoding import REQUEST


def test_only_quantized_states_are_int8_at_both_ends() -> None:
    int8_request = with_int8_states(replace(REQUEST, quantized_states=(QuantizedState("past", "present", 0.1),)))
    assert [(spec.name, spec.dtype) for spec in int8_request.inputs] == [("ids", "int64"), ("past", "int8")]
    assert [(spec.name, spec.dtype) for spec in int8_request.outputs] == [("logits", "float32"), ("present", "int8")]
    assert int8_request.quantized_states == () and with_int8_states(REQUEST) is REQUEST
