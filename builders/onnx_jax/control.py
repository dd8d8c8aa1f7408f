"""Control flow: If. Loops are refused: their number of rounds is data."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax

from builders.onnx_jax.arrays import data
from builders.onnx_jax.evaluate import evaluate
from builders.onnx_jax.nodes import Node, Value, op


@op("If")
def _if(node: Node, condition: Value, *, scope: Mapping[str, Value]) -> tuple[Value, ...]:
    branches = node.attr("then_branch"), node.attr("else_branch")
    if isinstance(condition, np.ndarray):
        return evaluate(branches[0] if condition.all() else branches[1], scope)

    def run(branch: object) -> tuple[Value, ...]:
        return tuple(map(data, evaluate(branch, scope)))  # type: ignore[arg-type]

    then, other = (lambda branch=branch: run(branch) for branch in branches)
    taken: tuple[Value, ...] = lax.cond(jnp.reshape(data(condition), ()), then, other)
    return taken
