"""numpy arrays as a type: `Array` has any shape and any dtype. By name they are `enginery.core.types.Tensors`."""

import numpy as np

Array = np.ndarray
