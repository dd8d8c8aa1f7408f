"""Measuring a session that tells what its device takes."""

from contextlib import nullcontext

import numpy as np

from builders.types import TensorSpec
from validation.latency.buckets import Bucket
from validation.latency.measure import DEVICE_RUNS, Asked, measure_speed


class Plain:
    inputs = (TensorSpec("x", "float32", ("batch",)),)
    outputs = ()

    def run(self, inputs):
        return {}


class Timed(Plain):
    def device_seconds(self, inputs, runs):
        assert runs == DEVICE_RUNS and inputs.keys() == {"x"}
        return [1.0, 2e-3, 3e-3]


def measured(session):
    bucket = Bucket({"batch": 2}, {"x": np.zeros(2, "f"), "other": np.zeros(1)}, 2)
    return measure_speed(lambda: nullcontext(session), [bucket], Asked(0.01)).to_json()["buckets"][0]


def test_the_median_of_the_devices_own_times_stands_beside_the_clocks():
    assert measured(Timed())["device_s"] == 3e-3
    assert measured(Plain())["device_s"] is None
