"""Matrix products."""

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.table import operator


@operator("MatMul")
def matmul(xp: ArrayLibrary, a: Array, b: Array) -> Array:
    """a @ b."""
    return xp.matmul(a, b)


@operator("Gemm")
def gemm(
    xp: ArrayLibrary, a: Array, b: Array, c: Array | None = None,
    *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,  # noqa: N803 - ONNX's names
) -> Array:  # fmt: skip
    """alpha * a @ b + beta * c; without factors as a linear layer, for which compilers have the best kernels."""
    a = a.T if transA else a
    if alpha == 1 and beta == 1 and (c is None or c.ndim == 1) and xp.is_floating(a):
        return xp.linear(a, b if transB else b.T, c)
    product = xp.matmul(a, b.T if transB else b)
    product = product if alpha == 1 else xp.astype(alpha * product, a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else xp.astype(beta * c, a.dtype))


@operator("Einsum")
def einsum(xp: ArrayLibrary, *xs: Array, equation: str) -> Array:
    """The library's einsum."""
    return xp.einsum(equation.replace(" ", ""), *xs)


@operator("MatMulInteger")
def matmul_integer(
    xp: ArrayLibrary, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None
) -> Array:
    """The product of 8-bit integers less their zero points, in int32."""
    return integer_product(xp, subtract_zero_point(xp, a, a_zero, -2), subtract_zero_point(xp, b, b_zero, -1))


def subtract_zero_point(xp: ArrayLibrary, x: Array, zero: Array | None, axis: int) -> Array:
    """x - zero in int32; a zero point per row (axis -2) or per column (-1) is laid along that axis."""
    wide = xp.astype(x, xp.int32)
    if zero is None:
        return wide
    zero = xp.astype(zero, xp.int32)
    return wide - (xp.unsqueeze(zero, -1) if zero.ndim == 1 and axis == -2 and zero.shape[0] != 1 else zero)


def integer_product(xp: ArrayLibrary, a: Array, b: Array) -> Array:
    """a @ b of differences of 8-bit integers, in int32; computed in a type in which these sums are exact."""
    wide = xp.exact_dtype(a.shape[-1])
    return xp.astype(xp.matmul(xp.astype(a, wide), xp.astype(b, wide)), xp.int32)
