"""Operators that work element by element."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from builders.onnx_jax.arrays import data, on
from builders.onnx_jax.nodes import OPERATORS, Node, Value, op

# Under these names numpy and jax.numpy have what ONNX means.
_SAME = {
    "Abs": "abs", "Neg": "negative", "Sqrt": "sqrt", "Exp": "exp", "Log": "log", "Sin": "sin", "Cos": "cos",
    "Tan": "tan", "Asin": "arcsin", "Acos": "arccos", "Atan": "arctan", "Sinh": "sinh", "Cosh": "cosh", "Tanh": "tanh",
    "Asinh": "arcsinh", "Acosh": "arccosh", "Atanh": "arctanh", "Floor": "floor", "Ceil": "ceil", "Round": "round",
    "Sign": "sign", "IsNaN": "isnan", "Not": "logical_not", "BitwiseNot": "invert",
    "Add": "add", "Sub": "subtract", "Mul": "multiply", "And": "logical_and", "Or": "logical_or",
    "Xor": "logical_xor", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
    "Equal": "equal", "Greater": "greater", "GreaterOrEqual": "greater_equal", "Less": "less",
    "LessOrEqual": "less_equal", "Where": "where",
}  # fmt: skip


def _same(name: str) -> Callable[..., Value]:
    def call(node: Node, *values: Value) -> Value:  # noqa: ARG001 - every operator gets its node
        module, taken = on(*values)
        return getattr(module, name)(*taken)

    return call


OPERATORS.update({operator: _same(name) for operator, name in _SAME.items()})


@op("Identity")
def _identity(node: Node, x: Value) -> Value:  # noqa: ARG001
    return x


@op("Dropout")
def _dropout(node: Node, x: Value, ratio: Value = None, training: Value = None) -> tuple[Value, Value]:  # noqa: ARG001
    if training is not None and (not isinstance(training, np.ndarray) or bool(training)):
        raise node.refused("it is in training mode")
    return x, jnp.ones(jnp.shape(x), bool) if len(node.outputs) > 1 else None


@op("Div")
def _div(node: Node, a: Value, b: Value) -> Value:  # noqa: ARG001
    module, (x, y) = on(a, b)
    if x.dtype == object or y.dtype == object:
        return x // y
    if not np.issubdtype(x.dtype, np.integer):
        return module.divide(x, y)
    if module is jnp:
        return lax.div(*jnp.broadcast_arrays(x, y))
    return ((x - np.fmod(x, y)) // y).astype(x.dtype)  # towards zero


@op("Mod")
def _mod(node: Node, a: Value, b: Value) -> Value:
    module, taken = on(a, b)
    return module.fmod(*taken) if node.attr("fmod", 0) else module.mod(*taken)


@op("Pow")
def _pow(node: Node, a: Value, b: Value) -> Value:  # noqa: ARG001
    module, (base, exponent) = on(a, b)
    if np.issubdtype(base.dtype, np.integer) and not np.issubdtype(exponent.dtype, np.integer):
        return module.power(base.astype(exponent.dtype), exponent).astype(base.dtype)
    small = isinstance(b, np.ndarray) and b.ndim == 0 and float(b) in (2.0, 3.0)
    if small and module is jnp:  # as products: exact, and what other runtimes do
        return lax.integer_pow(base, int(b))
    return module.power(base, exponent.astype(base.dtype))


@op("BitShift")
def _bit_shift(node: Node, a: Value, b: Value) -> Value:
    module, taken = on(a, b)
    return module.left_shift(*taken) if node.attr("direction") == "LEFT" else module.right_shift(*taken)


@op("Max", "Min", "Sum")
def _many(node: Node, *values: Value) -> Value:
    module, taken = on(*values)
    name = {"Max": "maximum", "Min": "minimum", "Sum": "add"}[node.op]
    return reduce(getattr(module, name), taken)


@op("Mean")
def _mean(node: Node, *values: Value) -> Value:  # noqa: ARG001
    module, taken = on(*values)
    total = reduce(module.add, taken)
    return total / np.asarray(len(taken), total.dtype)


@op("Reciprocal")
def _reciprocal(node: Node, x: Value) -> Value:  # noqa: ARG001
    module, (taken,) = on(x)
    return module.divide(np.ones((), taken.dtype), taken)


@op("IsInf")
def _is_inf(node: Node, x: Value) -> Value:
    taken = data(x)
    positive = jnp.isposinf(taken) if node.attr("detect_positive", 1) else jnp.zeros(taken.shape, bool)
    return positive | jnp.isneginf(taken) if node.attr("detect_negative", 1) else positive


@op("Clip")
def _clip(node: Node, x: Value, low: Value = None, high: Value = None) -> Value:
    low = low if low is not None else _given(node, "min", x)
    high = high if high is not None else _given(node, "max", x)
    module, (taken, least, most) = on(x, low, high)
    taken = taken if least is None else module.maximum(taken, least)
    return taken if most is None else module.minimum(taken, most)


def _given(node: Node, name: str, x: Value) -> Value:
    return np.asarray(node.attr(name), x.dtype) if name in node.attributes else None


@op("Cast")
def _cast(node: Node, x: Value) -> Value:
    return cast(node, x, helper.tensor_dtype_to_np_dtype(node.attr("to")))


@op("CastLike")
def _cast_like(node: Node, x: Value, like: Value) -> Value:
    return cast(node, x, like.dtype)


def cast(node: Node, x: Value, to: Any) -> Value:
    """A value of another type, numpy's or ml_dtypes'. Raises ModelError for strings."""
    wanted = np.dtype(to)
    if wanted.kind in "OSU":
        raise node.refused("XLA has no strings")
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x if wanted.kind in "iu" else data(x).astype(wanted)
    module, (taken,) = on(x)
    if module is jnp and _narrow_float(wanted):
        taken = _saturated(taken, wanted) if node.attr("saturate", 1) else taken
    return taken.astype(wanted)


def _narrow_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name.startswith("float8")


def _saturated(x: jax.Array, to: np.dtype[Any]) -> jax.Array:
    most = float(jnp.finfo(to).max)
    return jnp.clip(x, -most, most)


@op("Sigmoid")
def _sigmoid(node: Node, x: Value) -> Value:  # noqa: ARG001
    return jax.nn.sigmoid(data(x))


@op("Erf")
def _erf(node: Node, x: Value) -> Value:  # noqa: ARG001
    return jax.scipy.special.erf(data(x))


@op("Relu")
def _relu(node: Node, x: Value) -> Value:  # noqa: ARG001
    module, (taken,) = on(x)
    return module.maximum(taken, np.zeros((), taken.dtype))


@op("Gelu")
def _gelu(node: Node, x: Value) -> Value:
    return jax.nn.gelu(data(x), approximate=node.attr("approximate", "none") == "tanh")


@op("LeakyRelu")
def _leaky_relu(node: Node, x: Value) -> Value:
    taken = data(x)
    return jnp.where(taken < 0, taken * _number(node, "alpha", 0.01, taken), taken)


@op("PRelu")
def _prelu(node: Node, x: Value, slope: Value) -> Value:  # noqa: ARG001
    taken = data(x)
    return jnp.where(taken < 0, taken * slope, taken)


@op("Elu", "Celu", "Selu")
def _elu(node: Node, x: Value) -> Value:
    taken = data(x)
    alpha = _number(node, "alpha", 1.6732632423543772 if node.op == "Selu" else 1.0, taken)
    inner = taken / alpha if node.op == "Celu" else taken
    made = jnp.where(taken < 0, alpha * jnp.expm1(inner), taken)
    return made * _number(node, "gamma", 1.0507009873554805, taken) if node.op == "Selu" else made


@op("ThresholdedRelu")
def _thresholded_relu(node: Node, x: Value) -> Value:
    taken = data(x)
    return jnp.where(taken > _number(node, "alpha", 1.0, taken), taken, jnp.zeros((), taken.dtype))


@op("HardSigmoid", "HardSwish")
def _hard_sigmoid(node: Node, x: Value) -> Value:
    taken = data(x)
    alpha = _number(node, "alpha", 0.2 if node.op == "HardSigmoid" else 1 / 6, taken)
    made = jnp.clip(taken * alpha + _number(node, "beta", 0.5, taken), 0, 1)
    return taken * made if node.op == "HardSwish" else made


@op("Softplus")
def _softplus(node: Node, x: Value) -> Value:  # noqa: ARG001
    return jax.nn.softplus(data(x))


@op("Softsign")
def _softsign(node: Node, x: Value) -> Value:  # noqa: ARG001
    return jax.nn.soft_sign(data(x))


@op("Swish")
def _swish(node: Node, x: Value) -> Value:
    taken = data(x)
    return taken * jax.nn.sigmoid(taken * _number(node, "alpha", 1.0, taken))


@op("Shrink")
def _shrink(node: Node, x: Value) -> Value:
    taken = data(x)
    bias, limit = _number(node, "bias", 0.0, taken), _number(node, "lambd", 0.5, taken)
    inner = jnp.where(taken > limit, taken - bias, jnp.zeros((), taken.dtype))
    return jnp.where(taken < -limit, taken + bias, inner)


@op("Mish")
def _mish(node: Node, x: Value) -> Value:  # noqa: ARG001
    return jax.nn.mish(data(x))


def _number(node: Node, name: str, default: float, like: jax.Array) -> Any:
    return np.asarray(node.attr(name, default), like.dtype)
