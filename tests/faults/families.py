"""Seven families of networks, seeded: each seed is another model with other weights and other samples."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, shape_inference

from enginesmith.core.types import Dim, TensorSpec
from tests.faults.nets import MLP, ROWS, add_constants, mlp, rows
from tests.pipeline.quantization.small_nets import MASK, TOKENS, attention_net, build, sentences
from tests.validation.attribution.planted import weight, with_names, with_weight

BATCH = Dim("batch", 1, 4, 8, (4, 8))
STEPS = Dim("steps", 1, 12, 24, (12, 24))
Samples = dict[str, np.ndarray]


@dataclass(frozen=True)
class Family:
    """One kind of network. model: by seed.  samples: by seed and count, along axis 0.  dims: those that change."""

    name: str
    inputs: tuple[TensorSpec, ...]
    model: Callable[[int], ModelProto]
    samples: Callable[[int, int], Samples]
    dims: tuple[Dim, ...] = (BATCH,)


def floats_of(model: ModelProto) -> tuple[str, ...]:
    """Names of all float tensors that a model computes or takes."""
    inferred_graph = shape_inference.infer_shapes(model).graph
    values = (*inferred_graph.input, *inferred_graph.value_info, *inferred_graph.output)
    return tuple(dict.fromkeys(item.name for item in values if item.type.tensor_type.elem_type == 1))


def conv(seed: int) -> ModelProto:
    """Convolution, residual convolution, depthwise convolution, global mean, Gemm."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(16, 3, 3, 3)) / 4, "b1": rng.normal(size=16) / 2,
        "w2": rng.normal(size=(16, 16, 3, 3)) / 10, "b2": rng.normal(size=16) / 4,
        "w3": rng.normal(size=(16, 1, 3, 3)) / 2, "b3": rng.normal(size=16) / 4,
        "w4": rng.normal(size=(16, 10)) / 2, "b4": rng.normal(size=10) / 2,
    }  # fmt: skip
    text = """
        c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(image, w1, b1)
        r1 = Relu(c1)
        c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(r1, w2, b2)
        sum = Add(c2, r1)
        r2 = Relu(sum)
        c3 = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=16>(r2, w3, b3)
        r3 = Relu(c3)
        pooled = GlobalAveragePool(r3)
        flat = Flatten(pooled)
        logits = Gemm(flat, w4, b4)
    """
    return with_names(build("float[batch,3,8,8] image", "float[batch,10] logits", text, weights))


def images(seed: int, count: int) -> Samples:
    """Smooth patches of one colour or another, so that global means differ between samples."""
    rng = np.random.default_rng(seed)
    colour = rng.normal(size=(count, 3, 1, 1))
    return {"image": (colour + rng.normal(size=(count, 3, 8, 8)) / 2).astype(np.float32)}


def encoder(seed: int) -> ModelProto:
    """Embedding, attention with a mask, LayerNorm, erf-GELU, tied projection."""
    net, rng = with_names(attention_net()), np.random.default_rng(seed)
    for item in ("wq", "wk", "wv", "wo", "up", "down", "table", "bq"):
        was = weight(net, item)
        net = with_weight(net, item, rng.normal(size=was.shape) * was.std())
    return net


def recurrent(seed: int, before: str = "", steps: str = "xt", **values: object) -> ModelProto:
    """A GRU over some steps, and a projection of every step.

    before, steps, values: nodes before the GRU, which read `xt`, what of theirs it reads, and their constants.
    """
    rng = np.random.default_rng(seed)
    weights = {
        "w": rng.normal(size=(1, 48, 6)) / 2, "r": rng.normal(size=(1, 48, 16)) / 4, "b": rng.normal(size=(1, 96)) / 4,
        "wo": rng.normal(size=(16, 5)) / 2, "bo": rng.normal(size=5) / 2, "axes": np.array([1]),
    }  # fmt: skip
    text = f"""
        xt = Transpose<perm=[1,0,2]>(x)
        {before}
        y4, last = GRU<hidden_size=16>({steps}, w, r, b)
        y3 = Squeeze(y4, axes)
        y = Transpose<perm=[1,0,2]>(y3)
        z0 = MatMul(y, wo)
        z = Add(z0, bo)
    """
    return with_names(build("float[batch,steps,6] x", "float[batch,steps,5] z", text, weights | values))


def series(seed: int, count: int) -> Samples:
    rng = np.random.default_rng(seed)
    return {"x": (rng.normal(size=(count, 1, 6)) + rng.normal(size=(count, 12, 6)) / 2).astype(np.float32)}


def detector(seed: int, more: str = "", outputs: str = "", **values: object) -> ModelProto:
    """A convolution, and for each of 16 cells a box of 0 to 640 pixels and three scores of 0 to 1, in one output.

    more, outputs, values: nodes behind it, what they give out, and their constants.
    """
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(16, 3, 3, 3)) / 4, "b1": rng.normal(size=16) / 2,
        "w2": rng.normal(size=(7, 16, 1, 1)) / 3, "b2": rng.normal(size=7) / 2,
        "shape": np.array([0, 7, 16]), "sizes": np.array([4, 3]), "side": np.float32(640),
    }  # fmt: skip
    text = f"""
        c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(image, w1, b1)
        r1 = Relu(c1)
        c2 = Conv<kernel_shape=[1,1]>(r1, w2, b2)
        cells = Reshape(c2, shape)
        rows = Transpose<perm=[0,2,1]>(cells)
        p = Sigmoid(rows)
        xywh, scores = Split<axis=-1>(p, sizes)
        boxes = Mul(xywh, side)
        found = Concat<axis=-1>(boxes, scores)
        {more}
    """
    return with_names(build("float[batch,3,8,8] image", f"float[batch,16,7] found{outputs}", text, weights | values))


def columns(seed: int, count: int) -> Samples:
    return {"x": np.abs(np.random.default_rng(seed).normal(size=(count, 2048))).astype(np.float32)}


def wide(seed: int) -> ModelProto:
    """A matrix product that adds 2048 products up, and a second one."""
    rng = np.random.default_rng(seed)
    weights = {"w1": rng.normal(size=(2048, 16)) / 45, "b1": rng.normal(size=16), "w2": rng.normal(size=(16, 10)) / 4}
    text = "h0 = MatMul(x, w1) h1 = Add(h0, b1) h = Relu(h1) logits = MatMul(h, w2)"
    return with_names(build("float[batch,2048] x", "float[batch,10] logits", text, weights))


def far(seed: int) -> ModelProto:
    """`mlp` with logits of 288 and more, of which 0.4 (a standard deviation) tells the samples apart."""
    net = mlp(seed, f"{MLP.replace('logits', 'near')} small = Mul(near, part) logits = Add(small, offset)")
    add_constants(net, {"part": np.float32(0.1), "offset": np.float32(288)})
    return net


IMAGE = (TensorSpec("image", "float32", ("batch", 3, 8, 8)),)
FAMILIES = {
    family.name: family
    for family in (
        Family("conv", IMAGE, conv, images),
        Family("mlp", ROWS, mlp, rows),
        Family("encoder", (TOKENS, MASK), encoder, lambda seed, count: sentences(count, seed)),
        Family("recurrent", (TensorSpec("x", "float32", ("batch", "steps", 6)),), recurrent, series, (BATCH, STEPS)),
        Family("detector", IMAGE, detector, images),
        Family("wide", (TensorSpec("x", "float32", ("batch", 2048)),), wide, columns),
        Family("far", ROWS, far, rows),
    )
}
