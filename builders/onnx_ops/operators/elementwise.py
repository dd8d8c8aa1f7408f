"""Operators on each element by itself, with broadcasting as in numpy, which ONNX and the libraries share."""

import math
import operator as python
from collections.abc import Callable
from functools import reduce

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.table import Array, ArrayLibrary, DType, Known, Lookups, Value, must, operator

# ONNX's name -> the libraries'. Round is half to even, as ONNX asks.
_UNARY = {"BitwiseNot": "bitwise_not", "Neg": "negative", "Not": "logical_not"}
_UNARY |= {
    name: name.lower()
    for name in (
        *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor"),
        *("HardSwish", "IsNaN", "Log", "Mish", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh"),
        *("Softplus", "Softsign", "Sqrt", "Tan", "Tanh"),
    )
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {"Add": python.add, "Mul": python.mul, "Sub": python.sub}
_BINARY |= {"Equal": python.eq, "Greater": python.gt, "GreaterOrEqual": python.ge}
_BINARY |= {"Less": python.lt, "LessOrEqual": python.le}
_BINARY |= {"And": python.and_, "Or": python.or_, "Xor": python.xor}
_BINARY |= {"BitwiseAnd": python.and_, "BitwiseOr": python.or_, "BitwiseXor": python.xor}
# The largest finite numbers, of ONNX's table in Cast (https://onnx.ai/onnx/technical/float8.html).
_FP8_LARGEST = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0, "float8_e5m2": 57344.0, "float8_e5m2fnuz": 57344.0}


def _unary(name: str, function: str) -> None:
    @operator(name)
    def call(xp: ArrayLibrary, x: Array) -> Array:
        return getattr(xp, function)(x)  # type: ignore[no-any-return]


def _binary(name: str, function: Callable[[Array, Array], Array]) -> None:
    @operator(name)
    def call(xp: ArrayLibrary, a: Array, b: Array) -> Array:  # noqa: ARG001
        return function(a, b)


for _name, _function in _UNARY.items():
    _unary(_name, _function)
for _name, _operation in _BINARY.items():
    _binary(_name, _operation)


@operator("Div")
def div(xp: ArrayLibrary, a: Array, b: Value, *, lookups: Lookups) -> Array:
    """a / b. Integer quotients are truncated; the lowest integer divided by -1, a fault of processors, is itself."""
    divisor = b.on(xp) if isinstance(b, Known) else b
    if xp.is_floating(a):
        return a / divisor
    if _harmless(b):
        return xp.truncated_quotient(a, divisor)
    divisor = lookups.divisor(divisor)
    ones = xp.ones_like(divisor)
    is_minus_one = divisor == -ones if xp.is_signed(divisor) else xp.zeros_like(divisor, dtype=xp.bool)
    return xp.truncated_quotient(a, xp.where(is_minus_one, ones, divisor)) * xp.where(is_minus_one, divisor, ones)


@operator("Mod")
def mod(xp: ArrayLibrary, a: Array, b: Value, *, fmod: int = 0, lookups: Lookups) -> Array:
    """The remainder of a / b, with the divisor's sign, or with `fmod` the dividend's."""
    divisor = b.on(xp) if isinstance(b, Known) else b
    if not xp.is_floating(a) and not _harmless(b):
        divisor = lookups.divisor(divisor)
    return xp.fmod(a, divisor) if fmod else xp.remainder(a, divisor)


def _harmless(divisor: Value) -> bool:
    """Whether every integer can be divided by it: it is of sizes, or of constants that are neither 0 nor -1."""
    return isinstance(divisor, Known) and (divisor.symbolic or not {0, -1} & set(divisor.each))


@operator("Pow")
def power(xp: ArrayLibrary, a: Array, b: Value) -> Array:
    """a ** b in the type of a. Squares and cubes are products, which is exact and what other runtimes do."""
    if isinstance(b, Known) and b.numbers.ndim == 0 and b.first in (2, 3):
        return reduce(python.mul, [a] * int(b.first))
    return xp.astype(xp.pow(a, b.on(xp) if isinstance(b, Known) else b), a.dtype)


@operator("BitShift")
def bit_shift(xp: ArrayLibrary, a: Array, b: Array, *, direction: str) -> Array:
    """Unsigned integers shifted by b bits, to the left or to the right."""
    return xp.bitwise_left_shift(a, b) if direction == "LEFT" else xp.bitwise_right_shift(a, b)


@operator("Max")
def maximum(xp: ArrayLibrary, *xs: Array) -> Array:
    """The greatest of any number of arrays; NaN where one is NaN."""
    return reduce(xp.maximum, xs)


@operator("Min")
def minimum(xp: ArrayLibrary, *xs: Array) -> Array:
    """The least of any number of arrays; NaN where one is NaN."""
    return reduce(xp.minimum, xs)


@operator("Sum")
def sum_of(xp: ArrayLibrary, *xs: Array) -> Array:  # noqa: ARG001
    """The sum of any number of arrays."""
    return reduce(python.add, xs)


@operator("Mean")
def mean_of(xp: ArrayLibrary, *xs: Array) -> Array:  # noqa: ARG001
    """The mean of any number of arrays."""
    return reduce(python.add, xs) / len(xs)


@operator("Where")
def where(xp: ArrayLibrary, condition: Array, a: Array, b: Array) -> Array:
    """a where the condition holds, else b."""
    return xp.where(condition, a, b)


@operator("Identity")
def identity(xp: ArrayLibrary, x: Value) -> Value:  # noqa: ARG001
    """x itself."""
    return x


@operator("Dropout")
def dropout(
    xp: ArrayLibrary, x: Array, _ratio: Value | None = None, training: Value | None = None,
    *, ratio: float = 0.5, seed: int = 0, outputs: int,
) -> tuple[Array, ...]:  # fmt: skip
    """x itself, and a mask of true: dropout at inference."""
    del ratio, seed
    is_inference = training is None or (isinstance(training, Known) and not training.first)
    must(is_inference, "it drops values at random, as in training; export the model for inference")
    return (x, xp.ones_like(x, dtype=xp.bool))[:outputs]


@operator("Clip")
def clip(xp: ArrayLibrary, x: Array, low: Value | None = None, high: Value | None = None) -> Array:
    """x within bounds; known bounds are passed as numbers, so that a compiler sees them."""
    if low is not None:
        x = xp.clip(x, low.first, None) if isinstance(low, Known) else xp.maximum(x, low)
    if high is not None:
        x = xp.clip(x, None, high.first) if isinstance(high, Known) else xp.minimum(x, high)
    return x


@operator("LeakyRelu")
def leaky_relu(xp: ArrayLibrary, x: Array, *, alpha: float = 0.01) -> Array:
    """x, and alpha * x below zero."""
    return xp.leaky_relu(x, alpha)


@operator("PRelu")
def prelu(xp: ArrayLibrary, x: Array, slope: Array) -> Array:
    """x, and slope * x below zero; the slope broadcasts to x."""
    return xp.where(x < 0, slope * x, x)


@operator("ThresholdedRelu")
def thresholded_relu(xp: ArrayLibrary, x: Array, *, alpha: float = 1.0) -> Array:
    """x above alpha, else 0."""
    return xp.where(x > alpha, x, xp.zeros_like(x))


@operator("Elu")
def elu(xp: ArrayLibrary, x: Array, *, alpha: float = 1.0) -> Array:
    """alpha * (exp(x) - 1) below zero."""
    return xp.elu(x, alpha)


@operator("Celu")
def celu(xp: ArrayLibrary, x: Array, *, alpha: float = 1.0) -> Array:
    """alpha * (exp(x / alpha) - 1) below zero."""
    return xp.celu(x, alpha)


@operator("Selu")
def selu(
    xp: ArrayLibrary, x: Array, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Array:
    """gamma * x, and gamma * alpha * (exp(x) - 1) below zero."""
    return gamma * xp.where(x > 0, x, alpha * xp.expm1(x))


@operator("HardSigmoid")
def hard_sigmoid(xp: ArrayLibrary, x: Array, *, alpha: float = 0.2, beta: float = 0.5) -> Array:
    """alpha * x + beta within 0..1; the libraries' own has a slope of 1/6."""
    return xp.clip(alpha * x + beta, 0, 1)


@operator("Shrink")
def shrink(xp: ArrayLibrary, x: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Array:
    """x moved towards zero by bias; 0 within -lambd..lambd."""
    output = xp.where(x < -lambd, x + bias, xp.where(x > lambd, x - bias, xp.zeros_like(x)))
    return xp.astype(output, x.dtype)


@operator("Gelu")
def gelu(xp: ArrayLibrary, x: Array, *, approximate: str = "none") -> Array:
    """The Gaussian error linear unit by erf, or with `approximate` 'tanh' by tanh."""
    return xp.gelu(x, approximate=approximate)


@operator("Swish")
def swish(xp: ArrayLibrary, x: Array, *, alpha: float = 1.0) -> Array:
    """x * sigmoid(alpha * x)."""
    return x * xp.sigmoid(alpha * x)


@operator("IsInf")
def is_inf(xp: ArrayLibrary, x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    """Whether each element is infinite, of either sign or of the sign that the attributes choose."""
    mask = xp.zeros_like(x, dtype=xp.bool)
    mask = mask | (x == math.inf) if detect_positive else mask
    return mask | (x == -math.inf) if detect_negative else mask


@operator("Cast")
def cast(xp: ArrayLibrary, x: Array, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    """x in ONNX's type `to`. In FP8, values beyond the largest become the largest, unless `saturate` is 0."""
    del round_mode  # of float8e8m0
    return convert(xp, x, xp.dtype(tensor_dtype_to_np_dtype(to)), saturate=bool(saturate))


@operator("CastLike")
def cast_like(xp: ArrayLibrary, x: Array, like: Array, *, saturate: int = 1, round_mode: str = "up") -> Array:
    """x in the type of another array, as `cast` does it."""
    del round_mode
    return convert(xp, x, like.dtype, saturate=bool(saturate))


def convert(xp: ArrayLibrary, x: Array, dtype: DType, *, saturate: bool = True) -> Array:
    """`x` in another type, as ONNX's Cast does it."""
    if dtype == xp.bool:
        return xp.astype(x, xp.float32 if xp.is_floating(x) else x.dtype) != 0
    max_value = _FP8_LARGEST.get(str(dtype).removeprefix("torch."))
    if max_value is None or not xp.is_floating(x):
        return xp.astype(x, dtype)
    values = xp.astype(x, xp.float32)
    if saturate:
        values = xp.where(xp.isnan(values), values, xp.clip(values, -max_value, max_value))
    elif max_value == 448:  # has no infinity; half a step beyond its largest value is rounded to that
        values = xp.where(xp.abs(values) > max_value + 16, xp.full_like(values, np.nan), values)
    return xp.astype(values, dtype)
