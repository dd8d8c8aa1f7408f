"""Sessions made of functions."""

from enginesmith.core.types import Dim, TensorSpec

SPECS = [TensorSpec("x", "float32", ("batch", 3))]
DIMS = [Dim("batch", 1, 4, 8)]


class Fake:
    """A session made of a function."""

    inputs = SPECS
    outputs = (TensorSpec("y", "float32", ("batch", 3)),)

    def __init__(self, function):
        self.function = function

    def run(self, inputs):
        return self.function(inputs)


def original(inputs):
    return {"y": inputs["x"] * 2}
