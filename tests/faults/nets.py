"""Small nets with seeded weights, and ways to plant something in a copy of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper, parser

from enginesmith.core.types import Dim, TensorSpec
from tests.pipeline.quantization.small_nets import build, maker
from tests.validation.attribution.planted import copy_of, weight, with_names, with_weight

BATCH = Dim("batch", 1, 4, 16, (4, 16))
ROWS = (TensorSpec("x", "float32", ("batch", 8)),)
MLP = """
    h0 = MatMul(x, w1)
    h1 = Add(h0, b1)
    h = Relu(h1)
    n = LayerNormalization<axis=-1, epsilon=1e-5>(h, gamma, beta)
    m0 = MatMul(n, w2)
    m1 = Add(m0, b2)
    m = Relu(m1)
    logits = MatMul(m, w3)
"""


def mlp(seed: int = 0, text: str = MLP, **more: object) -> ModelProto:
    """Two layers, LayerNorm, logits of ten classes: `x` [batch, 8] -> `logits` [batch, 10]. more: other weights."""
    rng = np.random.default_rng(seed)
    weights: dict[str, object] = {
        "w1": rng.normal(size=(8, 16)), "b1": rng.normal(size=16),
        "gamma": 1 + rng.normal(size=16) / 4, "beta": rng.normal(size=16) / 4,
        "w2": rng.normal(size=(16, 16)) / 3, "b2": rng.normal(size=16) / 2, "w3": rng.normal(size=(16, 10)),
    }  # fmt: skip
    return with_names(build("float[batch,8] x", "float[batch,10] logits", text, weights | more))


def rows(seed: int = 1, count: int = 48) -> dict[str, np.ndarray]:
    """Samples for `mlp`."""
    return {"x": np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)}


def with_swapped(model: ModelProto, name: str, one: int, other: int) -> ModelProto:
    """Two columns of a weight in each other's place."""
    values = weight(model, name).copy()
    values[:, [one, other]] = values[:, [other, one]]
    return with_weight(model, name, values)


def reordered(model: ModelProto, seed: int) -> ModelProto:
    """The same function of `mlp` with its hidden units in another order: every sum is added up in that order."""
    rng = np.random.default_rng(seed)
    first_order, second_order = rng.permutation(16), rng.permutation(16)
    order = {
        "w1": np.s_[:, first_order], "b1": first_order, "gamma": first_order, "beta": first_order,
        "w2": np.ix_(first_order, second_order), "b2": second_order, "w3": second_order,
    }  # fmt: skip
    for name, index in order.items():
        model = with_weight(model, name, weight(model, name)[index])
    return model


def without(model: ModelProto, tensor: str) -> ModelProto:
    """The node that makes a tensor dropped: its readers read its first input."""
    copied_model = copy_of(model)
    node = maker(copied_model, tensor)
    for reader in copied_model.graph.node:
        reader.input[:] = [node.input[0] if name == tensor else name for name in reader.input]
    copied_model.graph.node.remove(node)
    return copied_model


def put_nodes(model: ModelProto, node: NodeProto, nodes: Sequence[NodeProto]) -> None:
    """In place: nodes where the one of `node`'s name is, which may be one of them."""
    node_before = list(model.graph.node)
    index = [item.name for item in node_before].index(node.name)
    del model.graph.node[:]
    model.graph.node.extend([*node_before[:index], *nodes, *node_before[index + 1 :]])


def add_constants(model: ModelProto, constants: Mapping[str, Any]) -> None:
    """In place: initializers by name, of anything that numpy takes for an array."""
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(item), name) for name, item in constants.items())


def after(
    model: ModelProto, tensor: str, text: str, change: Callable[[NodeProto], None] = lambda _: None
) -> ModelProto:
    """Nodes put behind the one that makes `tensor`, which they read as `was` and make again, in ONNX's text form.

    Names that start with `k_` are constants of their own: `k_2` is the float 2, and `k_2i` the integer.
    """
    copied_model = copy_of(model)
    node = maker(copied_model, tensor)
    node.output[0] = "was"
    names = "was, " + ", ".join(item.name for item in copied_model.graph.input)
    header = '<ir_version: 8, opset_import: ["": 20]>'
    inputs = ", ".join(f"float[N] {name}" for name in names.split(", "))
    added_node = parser.parse_model(f"{header} g ({inputs}) => (float[N] {tensor}) {{{text}}}").graph.node
    for name in sorted({name for item in added_node for name in item.input if name.startswith("k_")}):
        digits = name.removeprefix("k_").replace("_", ".")
        value = np.array([int(digits[:-1])], np.int64) if digits.endswith("i") else np.float32(digits)
        add_constants(copied_model, {name: value})
    taken_names = {item.name for item in copied_model.graph.node}
    for item in added_node:
        name = item.name or f"{item.op_type}_{item.output[0]}"
        item.name = f"{name}/planted" if name in taken_names else name
        change(item)
    put_nodes(copied_model, node, [node, *added_node])
    return copied_model


# The size of the batch, and the places in it as [n, 1].
COUNTED = """
    shape = Shape(x) size0 = Gather(shape, k_0i) size = Squeeze(size0)
    zero = Squeeze(k_0i) one = Squeeze(k_1i)
    places = Range(zero, size, one) column = Unsqueeze(places, k_1i)
"""
