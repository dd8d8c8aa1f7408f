"""PyTorch's functions under the names and with the arguments that the ONNX operators use; see `ArrayLibrary`.

Functions that torch itself has under the same name are not here.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor
from torch._higher_order_ops import while_loop
from torch.fx.experimental.symbolic_shapes import statically_known_true

from builders.onnx_ops.table import ArrayLibrary, must
from builders.onnx_ops.torch_arrays import to_array, to_tensor
from enginesmith.core.errors import ModelError
from enginesmith.core.types import Untyped

sym_max, sym_min = torch.sym_max, torch.sym_min
to_numpy = to_array
at_once = nullcontext
astype, is_floating, at, indices_of = Tensor.to, torch.is_floating_point, Tensor.__getitem__, torch.nonzero
truncated_quotient = partial(torch.div, rounding_mode="trunc")
layer_norm = F.layer_norm
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
# Constants and quantized values only: torch has no such tensors, and a byte for each does the same.
NARROW = {"int4": np.dtype(np.int8), "uint4": np.dtype(np.uint8)}
# Maximum number of steps of a recurrent layer that a program unrolls.
_UNROLLED = 4
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
Sizes = list[int]
Where = tuple[Tensor, ...]


def dtype(numpy_dtype: np.dtype[Any], narrow: bool = False) -> torch.dtype:
    """Torch's dtype for numpy's. Raises ModelError for a dtype that torch does not support.

    narrow: the byte that holds 4 bits is one too.
    """
    name = NARROW.get(numpy_dtype.name, numpy_dtype).name if narrow else numpy_dtype.name
    must(
        name in DTYPES,
        f"it is {numpy_dtype.name.upper()}, for which torch has no operators; cast it to int64 or float32",
    )
    return DTYPES[name]


def asarray(array: np.ndarray[Any, Any]) -> Tensor:
    """A copy of an array. Raises ModelError as `dtype` does."""
    dtype(array.dtype, narrow=True)
    return to_tensor(array.astype(NARROW.get(array.dtype.name, array.dtype), copy=False))


def is_signed(x: Tensor) -> bool:
    """Whether its elements can be negative."""
    return x.dtype.is_signed


def ends(of: torch.dtype) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    return torch.iinfo(of).min, torch.iinfo(of).max


def exact_dtype(terms: object) -> torch.dtype:
    """The dtype in which sums of `terms` products of two 8-bit integers are exact.

    Torch has no fast integer product. 256 products (at most 255 * 255 each) sum to less than 2^24, and float32 is exact
    below that.
    """
    return torch.float32 if isinstance(terms, int) and terms <= 256 else torch.float64


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are the same at every size of the dynamic dims."""
    return statically_known_true(a == b)


def numbers(x: Tensor) -> list[Any]:
    """The numbers of x in a flat list; while torch traces, they are symbols that depend on data."""
    return list(x.reshape(-1).tolist())


def branch(condition: Tensor, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """The result of `then` or of `other`. Raises ModelError while a program is exported."""
    if torch.compiler.is_exporting():
        raise ModelError(
            "its branch depends on data, which an exported torch program cannot express; use the backend onnxruntime, "
            "or export the model without it"
        )
    return then() if bool(condition) else other()


def scan(step: Callable[[Where, Where], tuple[Where, Tensor]], state: Where, xs: Where) -> tuple[Where, Tensor]:
    """The last state and all outputs [steps, ...] of step(state, x of this step) -> (state, output), along axis 0.

    A program of few steps has each of them; one of more, or of a dynamic number, has a loop.
    """
    count = xs[0].shape[0]
    if not torch.compiler.is_exporting() or (isinstance(count, int) and count <= _UNROLLED):
        outputs = []
        for step_index in range(count):
            state, output = step(state, tuple(x[step_index] for x in xs))
            outputs.append(output)
        return state, torch.stack(outputs)
    sample_output = step(state, tuple(x[0] for x in xs))[1]  # for its shape; nothing reads it

    def run(at: Tensor, rows: Tensor, *before: Tensor) -> Where:
        index = at.reshape(1)
        next_state, output = step(before, tuple(torch.index_select(x, 0, index)[0] for x in xs))
        return at + 1, torch.index_copy(rows, 0, index, output.unsqueeze(0)), *next_state

    carry = torch.zeros((), dtype=torch.int64), torch.zeros([count, *sample_output.shape], dtype=sample_output.dtype)
    loop: Untyped = while_loop
    _, outputs, *final_state = loop(lambda at, *_: at < count, run, (*carry, *(start.clone() for start in state)))
    return tuple(final_state), outputs


def cut(x: Tensor, axis: int, start: Any, end: Any, step: int = 1) -> Tensor:
    """A slice along an axis, with Python's rules."""
    slice_view: Tensor = torch.ops.aten.slice(x, axis, start, end, step)
    return slice_view


def pad_axes(x: Tensor, widths: Sequence[tuple[Any, Any]], value: float) -> Tensor:
    """x padded with `value`. widths: elements to add before and after each axis; a negative width cuts elements."""
    pads = [width for pair in reversed(widths) for width in pair]
    while pads and isinstance(pads[-1], int) and isinstance(pads[-2], int) and pads[-1] == pads[-2] == 0:
        del pads[-2:]
    if not pads:
        return x
    if x.dtype == torch.bool:
        return F.pad(x.to(torch.uint8), pads, value=int(value)).to(torch.bool)
    return F.pad(x, pads, value=value)


def top_k(x: Tensor, k: int, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k greatest or least values along an axis, and their indices; of equal values the lower index first, which
    torch.topk does not promise."""
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


def take(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Numpy's take. Indices are from 0 on."""
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(indices, x)
    selection = x.index_select(axis, indices.reshape(-1))
    return selection.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def take_along(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Numpy's take_along_axis. Indices are from 0 on."""
    return torch.gather(x, axis, indices)


def put(x: Tensor, where: Where, updates: Tensor, reduction: str) -> Tensor:
    """The tensor with x[where] replaced by `updates`, or combined with them by `reduction`."""
    if reduction == "none":
        return x.index_put(where, updates)
    linear_index = torch.zeros_like(where[0])
    for index, size in zip(where, x.shape, strict=False):
        linear_index = linear_index * size + index
    rows = x.reshape([math.prod(x.shape[: len(where)]), *x.shape[len(where) :]])
    update_rows = updates.reshape([-1, *rows.shape[1:]])
    flat_indices = linear_index.reshape([-1, *[1] * (rows.dim() - 1)]).expand(update_rows.shape)
    return rows.scatter_reduce(0, flat_indices, update_rows, _REDUCTIONS[reduction], include_self=True).reshape(x.shape)


def scatter(x: Tensor, axis: int, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """The tensor with elements at `indices` of an axis replaced by `updates`, or combined with them by `reduction`."""
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _REDUCTIONS[reduction], include_self=True)


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Batch normalization at inference."""
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q @ k^T * scale) @ v."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _rank(x: Tensor) -> int:
    """The number of spatial axes. Raises ModelError for what torch has no kernel for."""
    must(x.dim() - 2 in _CONVOLUTIONS, f"{x.dim() - 2} spatial axes; torch has 1 to 3")
    return x.dim() - 2


def _spatially_padded(x: Tensor, before: Sizes, after: Sizes, value: float = 0.0) -> Tensor:
    return pad_axes(x, [(0, 0), (0, 0), *zip(before, after, strict=True)], value)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sizes, before: Sizes, after: Sizes, dilations: Sizes,
    group: int,
) -> Tensor:  # fmt: skip
    """Torch's convolution; pads that differ before and after, and negative ones, are applied first."""
    function = _CONVOLUTIONS[_rank(x)]
    if before == after and all(width >= 0 for width in before):
        return function(x, weight, bias, strides, before, dilations, group)
    return function(_spatially_padded(x, before, after), weight, bias, strides, 0, dilations, group)


def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sizes, before: Sizes, after: Sizes, extra: Sizes,
    dilations: Sizes, group: int,
) -> Tensor:  # fmt: skip
    """Torch's transposed convolution without pads; the pads are then cut off, for negative ones zeros are added."""
    function = _TRANSPOSED[_rank(x)]
    if before == after and all(size < max(s, d) for size, s, d in zip(extra, strides, dilations, strict=True)):
        return function(x, weight, bias, strides, before, extra, group, dilations)
    output = function(x, weight, None, strides, 0, 0, group, dilations)
    low_pads, high_pads = [-width for width in before], [size - width for size, width in zip(extra, after, strict=True)]
    output = _spatially_padded(output, low_pads, high_pads)
    return output if bias is None else output + bias.reshape([-1, *[1] * (x.dim() - 2)])


def max_pool(x: Tensor, kernel: Sizes, strides: Sizes, before: Sizes, after: Sizes, dilations: Sizes) -> Tensor:
    """The greatest of each window. 8-bit integers are exact in float32, for which torch has kernels."""
    values, function = x if x.is_floating_point() else x.to(torch.float32), _MAX[_rank(x)]
    if before == after and all(2 * p <= k for p, k in zip(before, kernel, strict=True)):
        return function(values, kernel, strides, before, dilations).to(x.dtype)
    return function(_spatially_padded(values, before, after, -math.inf), kernel, strides, 0, dilations).to(x.dtype)


def max_pool_indices(x: Tensor, kernel: Sizes, strides: Sizes, pads: Sizes, dilations: Sizes) -> tuple[Tensor, Tensor]:
    """The greatest of each window, and where it is in the flat tensor."""
    float_values = x if x.is_floating_point() else x.to(torch.float32)
    values, max_indices = _MAX[_rank(x)](float_values, kernel, strides, pads, dilations, return_indices=True)
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape([x.shape[0], x.shape[1], *[1] * (x.dim() - 2)])
    return values.to(x.dtype), max_indices + planes * math.prod(x.shape[2:])


def avg_pool(x: Tensor, kernel: Sizes, strides: Sizes, pads: Sizes, count_pads: bool) -> Tensor:
    """The mean of each window."""
    if all(2 * p <= k for p, k in zip(pads, kernel, strict=True)):
        return _AVERAGE[_rank(x)](x, kernel, strides, pads, False, count_pads)
    mask = _spatially_padded(torch.ones_like(x), pads, pads, float(count_pads))
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    counts = window_sums(mask, kernel, strides, zeros, zeros, ones)
    return window_sums(x, kernel, strides, pads, pads, ones) / counts


def window_sums(x: Tensor, kernel: Sizes, strides: Sizes, before: Sizes, after: Sizes, dilations: Sizes) -> Tensor:
    """The sum of each window, each channel by itself."""
    x = _spatially_padded(x, before, after)
    planes = x.reshape([x.shape[0] * x.shape[1], 1, *x.shape[2:]])
    ones = torch.ones([1, 1, *kernel], dtype=x.dtype)
    sums = _CONVOLUTIONS[len(kernel)](planes, ones, None, strides, 0, dilations)
    return sums.reshape([x.shape[0], x.shape[1], *sums.shape[2:]])


TORCH = ArrayLibrary("torch", sys.modules[__name__], torch, F)
