import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.types import TensorSpec
from enginesmith.recording.traffic import RecordedRequest, RecordedTraffic
from validation.traffic.trace import trace_of

INPUTS = (TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("mask", "int64", ("batch", "length")))


def request(at: float, ids: tuple[int, int], mask: tuple[int, int]) -> RecordedRequest:
    return RecordedRequest(at, {"ids": np.zeros(ids, np.int64), "mask": np.zeros(mask, np.int64)})


def test_a_trace_has_the_size_of_each_dim_in_each_request():
    trace = trace_of(
        RecordedTraffic((request(0.0, (1, 7), (1, 7)), request(2.0, (2, 9), (2, 9))), "", start=1e9), INPUTS
    )
    assert trace.at.tolist() == [0.0, 2.0] and trace.per_second == 0.5 and trace.start == 1e9
    assert {dim: sizes.tolist() for dim, sizes in trace.sizes.items()} == {"batch": [1, 2], "length": [7, 9]}


def test_a_dim_with_two_sizes_in_a_request_is_named():
    with pytest.raises(DataError, match="request 0: dim 'length' is 7 in one input and 8 in 'mask'"):
        trace_of(RecordedTraffic((request(0.0, (1, 7), (1, 8)),), ""), INPUTS)


def test_traffic_without_times_has_no_rate():
    trace = trace_of(RecordedTraffic((request(0.0, (1, 7), (1, 7)), request(0.0, (1, 7), (1, 7))), ""), INPUTS)
    with pytest.raises(DataError, match="no times of arrival"):
        _ = trace.per_second
