import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.codec import decode, encode
from enginesmith.core.parsing import Malformed
from enginesmith.core.state import Padding, padding_of
from enginesmith.core.types import TensorSpec
from enginesmith.serving.buckets import plan_padding
from tests.enginesmith.serving.engines import INPUTS, OUTPUTS, PADDING


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_padding_equals_numpys_and_cropping_removes_it(batch, sequence, more, longer):
    sizes, fields = ({"batch": batch, "sequence": sequence}, {"batch": batch + more, "sequence": sequence + longer})
    x = np.arange(batch * sequence, dtype=np.float32).reshape(batch, sequence)
    plan = plan_padding(INPUTS, OUTPUTS, PADDING, sizes, fields)
    result = plan.pad({"x": x, "mask": np.ones(x.shape, np.int64)})
    wide_array = np.pad(x, [(0, 0), (0, longer)], constant_values=7.0)
    np.testing.assert_array_equal(result["x"], np.pad(wide_array, [(0, more), (0, 0)], mode="edge"))
    assert result["mask"].dtype == np.int64 and result["mask"].shape == result["x"].shape
    assert plan.own_elements == 2 * x.size and plan.elements == 2 * result["x"].size
    restored_crop = plan.crop({"each": result["x"], "mean": result["x"][:, 0]})
    np.testing.assert_array_equal(restored_crop["each"], x)
    assert restored_crop["mean"].shape == (batch,)


def test_arrays_without_padding_are_not_copied():
    sizes = {"batch": 1, "sequence": 2}
    inputs = {"x": np.zeros((1, 2), np.float32)}
    plan = plan_padding(INPUTS, OUTPUTS, PADDING, sizes, sizes)
    assert plan.pad(inputs) is inputs


def test_an_input_without_the_dim_and_a_middle_axis():
    specs = [TensorSpec("x", "float32", ("batch", "n", 2)), TensorSpec("k", "float32", (3,))]
    rules = Padding({"x": {"n": 0.0}})
    plan = plan_padding(
        specs, [TensorSpec("y", "float32", (2, "n"))], rules, {"batch": 1, "n": 2}, {"batch": 1, "n": 3}
    )
    result = plan.pad({"x": np.ones((1, 2, 2), np.float32), "k": np.ones(3, np.float32)})
    assert result["x"].tolist() == [[[1, 1], [1, 1], [0, 0]]] and result["k"].shape == (3,)
    assert plan.crop({"y": np.zeros((2, 3))})["y"].shape == (2, 2)


def test_the_rules_of_a_version_are_read_from_its_spec():
    spec = {
        "inputs": {"ids": {"shape": ["batch", "n"], "pad": {"batch": "repeat", "n": 0}}, "k": {"shape": [3]}},
        "dims": {"batch": {"min": 1, "max": 8, "buckets": None}, "n": {"buckets": [8, 16]}},
    }
    result = padding_of(spec)
    assert result == Padding({"ids": {"batch": "repeat", "n": 0.0}}, {"n": (8, 16)})
    assert decode(encode(result), Padding) == result
    assert padding_of({"inputs": {"ids": {"shape": ["batch"]}}, "dims": {"batch": {"buckets": [1]}}}) == Padding()
    with pytest.raises(Malformed, match=r"spec\.inputs\.x\.pad\.n"):
        padding_of({"inputs": {"x": {"pad": {"n": "wrap"}}}})
