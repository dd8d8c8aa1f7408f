"""The names of arrays whose shape and dtype only run time knows."""

import numpy as np

# Without parameters: any shape, any dtype (numpy's own defaults of both).
Array = np.ndarray
DType = np.dtype
