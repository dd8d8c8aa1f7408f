"""The one type of NumPy arrays of any dtype and shape; where one of them is meant, a docstring says which."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
