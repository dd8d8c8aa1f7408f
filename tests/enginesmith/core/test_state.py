"""The request that a compiler gets for a model with quantized states."""

from dataclasses import replace

from enginesmith.core.state import with_int8_states
from enginesmith.core.types import QuantizedState
from tests.decoding import REQUEST


def test_quantized_states_and_nothing_else_are_int8_at_both_ends() -> None:
    made = with_int8_states(replace(REQUEST, quantized_states=(QuantizedState("past", "present", 0.1),)))
    assert [(spec.name, spec.dtype) for spec in made.inputs] == [("ids", "int64"), ("past", "int8")]
    assert [(spec.name, spec.dtype) for spec in made.outputs] == [("logits", "float32"), ("present", "int8")]
    assert made.quantized_states == () and with_int8_states(REQUEST) is REQUEST
