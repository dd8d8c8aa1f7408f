"""The grids that Q/DQ nodes round to, and the scales that lay a range of values on one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

# Scales below the smallest normal float32 become zero in kernels that flush subnormal numbers.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """A number format. highest: the largest number that is used; symmetric grids use -highest as their lowest."""

    name: str
    element_type: int
    dtype: np.dtype[Any]
    highest: float
    symmetric: bool = True

    def scale(self, low: float, high: float) -> tuple[float, int]:
        """(scale, zero point) that lay low..high on the grid; zero always lies on it exactly."""
        if self.symmetric:
            return max(max(abs(low), abs(high)) / self.highest, SMALLEST_SCALE), 0
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max((high - low) / self.highest, SMALLEST_SCALE)
        return scale, int(np.clip(round(-low / scale), 0, self.highest))

    def scales(self, values: NDArray[Any], axis: int) -> NDArray[np.float32]:
        """Symmetric scale of each channel along `axis`, reaching its largest magnitude; 0 where all are zero."""
        others = tuple(i for i in range(values.ndim) if i != axis)
        reach = np.abs(values.astype(np.float64)).max(axis=others)
        scales: NDArray[np.float32] = np.maximum(reach / self.highest, SMALLEST_SCALE * (reach > 0)).astype(np.float32)
        return scales

    def rounded(self, values: NDArray[Any], scales: NDArray[Any], axis: int) -> NDArray[Any]:
        """The values on the grid, symmetric scales per channel along `axis`; to nearest even, as ONNX says."""
        shape = [-1 if i == axis else 1 for i in range(values.ndim)]
        on_grid = values.astype(np.float64) / scales.astype(np.float64).reshape(shape)
        if self.dtype.kind == "i":
            on_grid = np.rint(on_grid)
        return np.clip(on_grid, -self.highest, self.highest).astype(np.float32).astype(self.dtype)


GRIDS: Mapping[str, Grid] = {
    "int8": Grid("int8", TensorProto.INT8, np.dtype(np.int8), 127),
    "uint8": Grid("uint8", TensorProto.UINT8, np.dtype(np.uint8), 255, symmetric=False),
    # e4m3 without infinities: 448 is the largest number.
    "fp8": Grid("fp8", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), 448),
}
