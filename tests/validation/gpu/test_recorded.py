import base64
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enginesmith.core.errors import IntegrityError
from enginesmith.core.types import TensorSpec
from validation.gpu.devices import RecordingSession, ReplaySession, pack, question, unpack

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float16, np.int64, np.bool_, np.uint8]), hnp.array_shapes(min_dims=0, min_side=0)
)


@given(ARRAYS)
def test_an_array_survives_bit_for_bit(array: np.ndarray) -> None:
    result = unpack(pack(array))
    assert result.dtype == array.dtype and result.shape == array.shape
    assert result.tobytes() == array.tobytes()


class _Double:
    inputs = outputs = (TensorSpec("x", "float32", ("n",)),)

    def run(self, inputs: Any) -> Any:
        return {"x": 2 * inputs["x"]}


def test_an_answer_belongs_to_its_inputs() -> None:
    recorder = RecordingSession(_Double())
    requests = {"x": np.arange(3, dtype=np.float32)}
    recorder.run(requests)
    played_session = ReplaySession(_Double.inputs, _Double.outputs, recorder.answers)
    assert np.array_equal(played_session.run(requests)["x"], [0, 2, 4])
    other_fields = [{"x": np.arange(4, dtype=np.float32)}, {"x": requests["x"].view(np.int32)}, {"y": requests["x"]}]
    other_fields += [{"x": requests["x"].reshape(3, 1)}, {"x": requests["x"] + 1}]
    for other_field in other_fields:
        with pytest.raises(IntegrityError, match="has no answer to these inputs"):
            played_session.run(other_field)
    assert len({question(item) for item in [requests, *other_fields]}) == 6


BOMB = base64.b64encode(zlib.compress(b"\0" * 10_000_000)).decode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", BOMB), ("shape", (1 << 40,)), ("shape", (-3,)), ("dtype", "O"), ("dtype", "no type"), ("data", "%"),
    ],
)  # fmt: skip
def test_invalid_arrays_are_refused(field: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match="a recorded answer is damaged"):
        unpack(replace(pack(np.ones(3)), **{field: value}))
