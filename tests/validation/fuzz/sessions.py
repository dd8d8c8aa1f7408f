"""A model in numpy, with a place for a fault: what an engine does wrongly, given its right outputs."""

from collections.abc import Callable

import numpy as np

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec

SPECS = (TensorSpec("x", "float32", ("batch", 4)),)
DIMS = (Dim("batch", 1, 4, 16, (4, 16)),)
WEIGHTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
GOLDEN = [{"x": np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)} for seed in range(3)]

Fault = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Linear:
    """y = x @ WEIGHTS. fault: inputs and right outputs -> outputs.  refuses: sizes of the batch that it refuses."""

    inputs = SPECS
    outputs = (TensorSpec("y", "float32", ("batch", 3)),)

    def __init__(self, fault: Fault = lambda x, y: y, most: int | None = None) -> None:
        self.fault, self.most = fault, most

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        if self.most is not None and len(x) > self.most:
            raise DataError(f"batch {len(x)} is outside 1..{self.most}")
        return {"y": self.fault(x, x @ WEIGHTS)}
