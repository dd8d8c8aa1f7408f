"""Small engines in Python for tests of what serves: their answers depend on every element that is not masked."""

from collections.abc import Callable, Mapping
from threading import Lock

import numpy as np

from enginesmith.core.state import Padding
from enginesmith.core.types import ShapeProfile, Tensors, TensorSpec
from enginesmith.serving.buckets import RoutedEngine

INPUTS = (TensorSpec("x", "float32", ("batch", "sequence")), TensorSpec("mask", "int64", ("batch", "sequence")))
OUTPUTS = (TensorSpec("each", "float32", ("batch", "sequence")), TensorSpec("mean", "float32", ("batch",)))
PADDING = Padding({"x": {"batch": "repeat", "sequence": 7.0}, "mask": {"batch": "repeat", "sequence": 0.0}})


class Calls:
    """A masked mean that notes the shapes that it was called with."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._lock = Lock()

    def __call__(self, inputs: Tensors) -> Mapping[str, np.ndarray]:
        x, mask = inputs["x"], inputs["mask"]
        with self._lock:
            self.shapes.append(x.shape)
        total = np.maximum(mask.sum(1), 1)
        return {"each": x * 2 + np.float32(1), "mean": ((x * mask).sum(1) / total).astype(np.float32)}


def profile(batch: tuple[int, int], sequence: tuple[int, int], multiple: int = 1) -> ShapeProfile:
    low, high = (batch[0], sequence[0]), (batch[1], sequence[1])
    multiples = (("x", (1, multiple)), ("mask", (1, multiple))) if multiple > 1 else ()
    return ShapeProfile((("x", low, high, high), ("mask", low, high, high)), multiples)


def engine(
    name: str = "a",
    *profiles: ShapeProfile,
    run: Callable[[Tensors], Tensors] | None = None,
    seconds: Callable[[Mapping[str, int]], float] | None = None,
) -> RoutedEngine:
    return RoutedEngine(name, run or Calls(), INPUTS, OUTPUTS, profiles, seconds)


def request(batch: int, sequence: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = (rng.random((batch, sequence)) < 0.8).astype(np.int64)
    mask[:, 0] = 1
    return {"x": rng.standard_normal((batch, sequence), np.float32), "mask": mask}


def assert_same(outputs: Mapping[str, np.ndarray], inputs: Tensors) -> None:
    expected = Calls()(inputs)
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-6)
