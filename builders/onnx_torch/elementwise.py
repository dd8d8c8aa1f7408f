"""Operators on each element by itself, with broadcasting as in numpy (which ONNX and torch share)."""

import math
from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor

from builders.onnx_torch.reading import dtype_of
from builders.onnx_torch.table import Known, Lookups, Value, must, operator

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,  # half to even, as ONNX asks
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
_FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
_FP8_LARGEST |= {torch.float8_e5m2: 57344.0, torch.float8_e5m2fnuz: 57344.0}


def _unary(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return run(x)

    return call


def _binary(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def call(a: Tensor, b: Tensor) -> Tensor:
        return run(a, b)

    return call


for _name, _run in _UNARY.items():
    operator(_name)(_unary(_run))
for _name, _run2 in _BINARY.items():
    operator(_name)(_binary(_run2))


@operator("Div")
def div(a: Tensor, b: Value, *, lookups: Lookups) -> Tensor:
    """Integers are cut towards zero; the lowest divided by -1, which processors refuse, is itself."""
    by = b.on(a.device) if isinstance(b, Known) else b
    if a.is_floating_point():
        return torch.div(a, by)
    if _harmless(b):
        return torch.div(a, by, rounding_mode="trunc")
    by = lookups.divisor(by)
    minus = by == -1 if by.dtype.is_signed else torch.zeros_like(by, dtype=torch.bool)
    one = torch.ones_like(by)
    return torch.div(a, torch.where(minus, one, by), rounding_mode="trunc") * torch.where(minus, by, one)


@operator("Mod")
def mod(a: Tensor, b: Value, *, fmod: int = 0, lookups: Lookups) -> Tensor:
    """The sign is the divisor's, with `fmod` the dividend's."""
    by = b.on(a.device) if isinstance(b, Known) else b
    if not a.is_floating_point() and not _harmless(b):
        by = lookups.divisor(by)
    return torch.fmod(a, by) if fmod else torch.remainder(a, by)


def _harmless(divisor: Value) -> bool:
    """Whether integers can be divided by it: sizes, and constants that are neither 0 nor -1."""
    return isinstance(divisor, Known) and (divisor.symbolic or not {0, -1} & set(divisor.each))


@operator("Pow")
def power(a: Tensor, b: Tensor) -> Tensor:
    """The type is the base's."""
    return torch.pow(a, b).to(a.dtype)


@operator("BitShift")
def bit_shift(a: Tensor, b: Tensor, *, direction: str) -> Tensor:
    """Of unsigned integers, of which torch has uint8."""
    return torch.bitwise_left_shift(a, b) if direction == "LEFT" else torch.bitwise_right_shift(a, b)


@operator("Max")
def maximum(*xs: Tensor) -> Tensor:
    """Of any number of tensors; NaN wins."""
    return reduce(torch.maximum, xs)


@operator("Min")
def minimum(*xs: Tensor) -> Tensor:
    """Of any number of tensors; NaN wins."""
    return reduce(torch.minimum, xs)


@operator("Sum")
def sum_of(*xs: Tensor) -> Tensor:
    """Of any number of tensors."""
    return reduce(torch.add, xs)


@operator("Mean")
def mean_of(*xs: Tensor) -> Tensor:
    """Of any number of tensors."""
    return reduce(torch.add, xs) / len(xs)


@operator("Where")
def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Numpy's where."""
    return torch.where(condition, a, b)


@operator("Identity")
def identity(x: Value) -> Value:
    """The same."""
    return x


@operator("Dropout")
def dropout(
    x: Tensor, ratio: Value | None = None, training_mode: Value | None = None, *, seed: int = 0, outputs: int
) -> Tensor | tuple[Tensor, ...]:
    """Of inference: everything stays."""
    del ratio, seed
    off = training_mode is None or (isinstance(training_mode, Known) and not training_mode.first)
    must(off, "it drops values at random, as in training; export the model for inference")
    return (x, torch.ones_like(x, dtype=torch.bool))[:outputs]


@operator("Clip")
def clip(x: Tensor, low: Value | None = None, high: Value | None = None) -> Tensor:
    """With numbers where they are known, so that a compiler sees them."""
    if low is not None:
        x = torch.clamp(x, min=low.first) if isinstance(low, Known) else torch.maximum(x, low)
    if high is not None:
        x = torch.clamp(x, max=high.first) if isinstance(high, Known) else torch.minimum(x, high)
    return x


@operator("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """Torch's."""
    return F.leaky_relu(x, alpha)


@operator("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """With a slope of any shape that broadcasts to x."""
    return torch.where(x < 0, slope * x, x)


@operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Zero up to alpha."""
    return torch.where(x > alpha, x, torch.zeros_like(x))


@operator("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Torch's."""
    return F.elu(x, alpha)


@operator("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Torch's."""
    return F.celu(x, alpha)


@operator("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    """With alpha and gamma of its own."""
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """With ONNX's slope, which is not torch's 1/6."""
    return torch.clamp(alpha * x + beta, 0, 1)


@operator("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Towards zero by bias, zero within lambd."""
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x))).to(x.dtype)


@operator("Softplus")
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow."""
    return F.softplus(x)


@operator("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Torch's."""
    return F.gelu(x, approximate=approximate)


@operator("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x * sigmoid(alpha * x)."""
    return x * torch.sigmoid(alpha * x)


@operator("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Of either sign or of one."""
    found = torch.zeros_like(x, dtype=torch.bool)
    found = found | (x == math.inf) if detect_positive else found
    return found | (x == -math.inf) if detect_negative else found


@operator("Cast")
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """Between torch's types. Into FP8 values beyond the largest become the largest, unless `saturate` is 0."""
    del round_mode  # of float8e8m0, which is no type of torch's here
    return converted(x, dtype_of(to, "the result of a Cast"), saturate=bool(saturate))


@operator("CastLike")
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """See `cast`."""
    del round_mode
    return converted(x, like.dtype, saturate=bool(saturate))


def converted(x: Tensor, dtype: torch.dtype, *, saturate: bool = True) -> Tensor:
    """`x` in another type, as ONNX's Cast does it."""
    if dtype == torch.bool:
        return (x.to(torch.float32) if x.dtype.itemsize == 1 and x.is_floating_point() else x) != 0
    largest = _FP8_LARGEST.get(dtype)
    if largest is None or not x.is_floating_point():
        return x.to(dtype)
    wide = x.to(torch.float32)
    if saturate:
        return torch.where(wide.isnan(), wide, wide.clamp(-largest, largest)).to(dtype)
    if dtype == torch.float8_e4m3fn:  # has no infinity; half a step beyond its largest value is rounded to that
        wide = torch.where(wide.abs() > largest + 16, torch.full_like(wide, math.nan), wide)
    return wide.to(dtype)
