"""Sessions made of functions."""

import numpy as np

from enginesmith.core.types import Dim, TensorSpec
from validation.golden.golden_set import GoldenSet, freeze

SPECS = [TensorSpec("x", "float32", ("batch", 3))]
DIMS = [Dim("batch", 1, 4, 8)]


class Fake:
    """A session made of a function."""

    inputs = SPECS
    outputs = (TensorSpec("y", "float32", ("batch", 3)),)

    def __init__(self, function, dtype=None):
        self.function = function
        if dtype:
            self.outputs = (TensorSpec("y", dtype, ("batch", 3)),)

    def run(self, inputs):
        return self.function(inputs)


def original(inputs):
    return {"y": inputs["x"] * 2}


def golden(labels=None) -> GoldenSet:
    x = np.random.default_rng(3).standard_normal((8, 3)).astype(np.float32)
    return freeze([{"x": x[:4]}, {"x": x[4:]}], SPECS, DIMS, original, labels)
