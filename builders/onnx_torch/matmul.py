"""Matrix products."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.table import operator

# So many products of two 8-bit integers (255 * 255 at most) sum to less than 2^24, up to which float32 is exact.
_EXACT_TERMS = 256


@operator("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Numpy's matmul."""
    return torch.matmul(a, b)


@operator("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - ONNX's names
    transB: int = 0,  # noqa: N803
) -> Tensor:
    """alpha * a @ b + beta * c; the plain case as a linear layer, which compilers know best."""
    a = a.t() if transA else a
    if alpha == 1 and beta == 1 and (c is None or c.dim() == 1) and a.is_floating_point():
        return F.linear(a, b if transB else b.t(), c)
    product = torch.matmul(a, b.t() if transB else b)
    product = product if alpha == 1 else (alpha * product).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else (beta * c).to(a.dtype))


@operator("Einsum")
def einsum(*xs: Tensor, equation: str) -> Tensor:
    """Torch's."""
    return torch.einsum(equation.replace(" ", ""), *xs)


@operator("MatMulInteger")
def matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    """Of 8-bit integers, into int32. Exact, though computed in floating point: torch has no fast integer product."""
    return integer_product(shifted(a, a_zero, -2), shifted(b, b_zero, -1))


def shifted(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """x - zero in int32; a zero point per row (axis -2) or per column (-1) is laid along that axis."""
    wide = x.to(torch.int32)
    if zero is None:
        return wide
    zero = zero.to(torch.int32)
    return wide - (zero.unsqueeze(-1) if zero.dim() == 1 and axis == -2 and zero.shape[0] != 1 else zero)


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of differences of 8-bit integers, in int32: by floating-point sums that hold every such integer."""
    terms = a.shape[-1]
    wide = torch.float32 if isinstance(terms, int) and terms <= _EXACT_TERMS else torch.float64
    return torch.matmul(a.to(wide), b.to(wide)).to(torch.int32)
