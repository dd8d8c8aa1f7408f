"""The two 16-bit float types that a graph can be cast to, and how numbers are rounded to them."""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto

from enginery.arrays.arrays import Array


@dataclass(frozen=True)
class HalfFormat:
    """A 16-bit float type.

    largest: its largest finite value.  tiny: its smallest normal value.
    narrow_range: whether ordinary networks leave its range (fp16: 65504) or only extreme ones (bf16: 3.39e38).
    """

    name: str
    element_type: int
    dtype: np.dtype
    largest: float
    tiny: float
    narrow_range: bool

    @property
    def type_name(self) -> str:
        """The type as operator schemas write it: 'tensor(float16)'."""
        return f"tensor({self.dtype.name})"

    def narrow(self, values: Array) -> Array:
        """Round to this type, to nearest even; what is too large becomes infinite, silently."""
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(self.dtype)


_BF16 = ml_dtypes.finfo(ml_dtypes.bfloat16)

HALVES: Mapping[str, HalfFormat] = {
    "fp16": HalfFormat("fp16", TensorProto.FLOAT16, np.dtype(np.float16), 65504.0, 2.0**-14, narrow_range=True),
    "bf16": HalfFormat(
        "bf16",
        TensorProto.BFLOAT16,
        np.dtype(ml_dtypes.bfloat16),
        float(_BF16.max),
        float(_BF16.smallest_normal),
        narrow_range=False,
    ),
}
