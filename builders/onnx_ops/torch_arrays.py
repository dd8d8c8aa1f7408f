"""Numpy arrays as torch tensors and back, also of ml_dtypes' types."""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

# ml_dtypes' dtype -> numpy's integer dtype of that width, through which its bytes are passed, and torch's dtype.
_THROUGH_BYTES = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (np.uint8, torch.float8_e4m3fnuz),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (np.uint8, torch.float8_e5m2fnuz),
}
_BACK = {dtype: (getattr(torch, plain.__name__), array) for array, (plain, dtype) in _THROUGH_BYTES.items()}


def to_tensor(array: np.ndarray) -> Tensor:
    """A copy of the array as a tensor on the CPU. Raises TypeError for a type that torch lacks."""
    contiguous_array = np.array(array, order="C")
    if contiguous_array.dtype in _THROUGH_BYTES:
        plain_dtype, dtype = _THROUGH_BYTES[contiguous_array.dtype]
        return torch.from_numpy(contiguous_array.view(plain_dtype)).view(dtype)
    return torch.from_numpy(contiguous_array)


def to_array(tensor: Tensor) -> np.ndarray:
    """The tensor as an array, on the host."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _BACK:
        plain_dtype, dtype = _BACK[tensor.dtype]
        return tensor.view(plain_dtype).numpy().view(dtype)
    return tensor.numpy()
